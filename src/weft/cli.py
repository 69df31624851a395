"""The `weft` command: finds the subcommand, and imports only that one."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from weft import __version__
from weft.domain.errors import WeftError


class Subcommand(NamedTuple):
    """What a subcommand does, and where: `module:function`, which takes arguments and gives the exit code."""

    where: str
    about: str


SUBCOMMANDS = {
    "lab": Subcommand("weft.lab.main:main", "show Weft at work on this machine"),
    "up": Subcommand("weft.ctl.weft.up:main", "run netmaster and netplugin together on this machine"),
    "doctor": Subcommand("weft.ctl.weft.doctor:main", "check this node, and say what to do"),
    "capture": Subcommand("weft.ctl.weft.capture:main", "write the packets of a workload to a file"),
    "shell": Subcommand("weft.ctl.weft.shell:main", "run a command inside a tenant's network space"),
    "drops": Subcommand("weft.ctl.weft.drops:main", "what was refused on this node, and why"),
    "trace": Subcommand("weft.ctl.weft.trace:main", "whether a flow would pass, and why; --packet tries it out"),
    "oracle": Subcommand("weft.lab.verify.main:main", "judge the policy engine by a table of right answers"),
    "install-cni": Subcommand("weft.cni.install:main", "install the CNI plugin and its configuration"),
    "uninstall-node": Subcommand("weft.agent.uninstall:main", "take everything of Weft off this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. The exit code is its own, or 2 when it was refused."""
    parser = argparse.ArgumentParser(
        prog="weft",
        description="Weft: container networking, and how to look into it.",
        epilog="\n".join(["commands:", *(f"  {name:14} {each.about}" for name, each in sorted(SUBCOMMANDS.items()))]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    parser.add_argument("command", choices=sorted(SUBCOMMANDS), metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see weft COMMAND --help")
    args = parser.parse_args(argv)
    module, _, function = SUBCOMMANDS[args.command].where.partition(":")
    run = cast("Callable[[Sequence[str]], int]", getattr(importlib.import_module(module), function))
    try:
        return run(args.arguments)
    except WeftError as error:
        print(f"weft {args.command}: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
