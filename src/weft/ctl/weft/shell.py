"""`weft shell TENANT [-- COMMAND …]`: a shell, or a command, inside a tenant's space."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.domain.errors import NotFound
from weft.domain.ids import TenantName, check_name
from weft.drivers import datapath_tools

_NO_SUCH_COMMAND = 127
_NOT_STARTED = 126


def main(argv: Sequence[str]) -> int:
    """The exit code is the command's own. Works whether the agent runs or not."""
    parser = argparse.ArgumentParser(prog="weft shell", description="Run a command inside a tenant's network space.")
    parser.add_argument("tenant", metavar="TENANT")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --; a shell unless given")
    parser.add_argument("--run-dir", type=Path, default=Path("/run/weft"), help="that of netplugin (/run/weft)")
    parser.add_argument("--datapath", choices=("linux", "ovs"), default="linux", help="that of netplugin (linux)")
    args = parser.parse_args(argv)
    tenant = TenantName(check_name(args.tenant, field="TENANT"))
    command = args.command or [os.environ.get("SHELL") or "/bin/sh"]
    try:
        datapath_tools(args.datapath).enter(args.run_dir / "netns", tenant)
    except NotFound as error:
        raise NotFound(f"tenant {tenant} has no workload on this machine: {error.message}") from error
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, {**os.environ, "WEFT_TENANT": tenant})  # noqa: S606  the person's own command
    except OSError as error:
        print(f"weft shell: {command[0]}: {error.strerror}", file=sys.stderr)
        return _NO_SUCH_COMMAND if isinstance(error, FileNotFoundError) else _NOT_STARTED
