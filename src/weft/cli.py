"""The `weft` command: dispatches to a subcommand.

Each subcommand is imported when it runs, so that `weft --help` and `weft trace` do not load the agent or the lab.
The imports stand in functions, where import-linter sees them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft import __version__
from weft.domain.errors import WeftError


class Subcommand(NamedTuple):
    """A subcommand: takes its arguments and returns the exit code."""

    run: Callable[[Sequence[str]], int]
    summary: str


def _capture(argv: Sequence[str]) -> int:
    from weft.ctl.weft import capture

    return capture.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from weft.ctl.weft import doctor

    return doctor.main(argv)


def _drops(argv: Sequence[str]) -> int:
    from weft.ctl.weft import drops

    return drops.main(argv)


def _etcd_roles(argv: Sequence[str]) -> int:
    from weft.ctl.weft import etcd_roles

    return etcd_roles.main(argv)


# weft.cni stands on its own: it must run on a host before any other part of Weft does.
def _install_cni(argv: Sequence[str]) -> int:
    from weft.cni import install

    return install.main(argv)


def _lab(argv: Sequence[str]) -> int:
    from weft.lab import main as lab

    return lab.main(argv)


def _shell(argv: Sequence[str]) -> int:
    from weft.ctl.weft import shell

    return shell.main(argv)


def _trace(argv: Sequence[str]) -> int:
    from weft.ctl.weft import trace

    return trace.main(argv)


def _uninstall_node(argv: Sequence[str]) -> int:
    from weft.agent import uninstall

    return uninstall.main(argv)


def _up(argv: Sequence[str]) -> int:
    from weft.ctl.weft import up

    return up.main(argv)


# Both of weft.lab import the drivers, netmaster and aiohttp, which take most of a second.
def _verify(argv: Sequence[str]) -> int:
    from weft.lab.verify import main as verify

    return verify.main(argv)


# In the order of `weft --help`.
SUBCOMMANDS = {
    "capture": Subcommand(_capture, "capture the packets of a workload to a pcap file"),
    "doctor": Subcommand(_doctor, "check this node and suggest fixes"),
    "drops": Subcommand(_drops, "show dropped packets of this node and the rules that dropped them"),
    "etcd-roles": Subcommand(_etcd_roles, "create users and roles in etcd for agents that use it directly"),
    "install-cni": Subcommand(_install_cni, "install the CNI plugin and its configuration"),
    "lab": Subcommand(_lab, "run a demo cluster on this machine"),
    "shell": Subcommand(_shell, "run a command in a tenant's network namespace"),
    "trace": Subcommand(_trace, "explain the policy verdict of a flow; --packet also sends a probe"),
    "uninstall-node": Subcommand(_uninstall_node, "remove everything of Weft from this machine"),
    "up": Subcommand(_up, "run netmaster, netplugin and netdns on this machine"),
    "verify": Subcommand(_verify, "verify policy verdicts against a table of expected results"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code, or 2 if it fails with a `WeftError`."""
    listing = (f"  {name:14} {subcommand.summary}" for name, subcommand in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="weft",
        description="Weft: container networking. Run, install and diagnose it.",
        epilog="\n".join(["commands:", *listing]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    parser.add_argument("command", choices=sorted(SUBCOMMANDS), metavar="COMMAND", help="one of the commands below")
    # Not argparse subparsers: those would import every subcommand to know its flags.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see weft COMMAND --help")
    args = parser.parse_args(argv)
    try:
        return SUBCOMMANDS[args.command].run(args.arguments)
    # Subcommands handle the errors that have exit codes of their own; 2 is argparse's code for a usage error too.
    except WeftError as error:
        print(f"weft {args.command}: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
