"""`weft shell TENANT [-- COMMAND …]`: runs a shell or a command in a tenant's network namespace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.domain.errors import NotFound
from weft.domain.ids import TenantName, check_name
from weft.drivers import datapath_tools

# Exit codes as in POSIX shells.
_COMMAND_NOT_FOUND = 127
_CANNOT_EXECUTE = 126


def main(argv: Sequence[str]) -> int:
    """Replace this process by the command. Works without the agent."""
    parser = argparse.ArgumentParser(prog="weft shell", description="Run a command in a tenant's network namespace.")
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --; a shell by default")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/weft"), help="netplugin's run directory (/run/weft)")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="netplugin's datapath (linux)")
    args = parser.parse_args(argv)
    tenant = TenantName(check_name(args.tenant, field="TENANT"))
    command = args.command or [os.environ.get("SHELL") or "/bin/sh"]
    try:
        datapath_tools(args.datapath).enter_tenant_netns(args.run_dir / "netns", tenant)
    except NotFound as error:
        raise NotFound(f"tenant {tenant} has no workload on this machine: {error.message}") from error
    sys.stdout.flush()  # exec discards Python's buffers
    try:
        os.execvpe(command[0], command, {**os.environ, "WEFT_TENANT": tenant})  # noqa: S606  the user's own command
    except OSError as error:
        print(f"weft shell: {command[0]}: {error.strerror}", file=sys.stderr)
        return _COMMAND_NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_EXECUTE
