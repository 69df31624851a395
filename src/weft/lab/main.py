"""`weft lab`: a small cluster on this machine, told step by step: real programs, real namespaces, real packets."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from weft.lab.namespaces import step_apart
from weft.lab.netlab import open_lab
from weft.lab.scenario import tell

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


async def _run(console: Console, store: str) -> None:
    async with open_lab(store=store) as lab:
        await tell(console, lab)


def main(argv: Sequence[str]) -> int:
    """Show Weft at work; everything is cleaned up at the end, after Ctrl-C too."""
    parser = argparse.ArgumentParser(prog="weft lab", description="Show Weft at work on this machine. Needs root.")
    parser.add_argument("--store", choices=("embedded", "etcd"), default="embedded", help="embedded, or a real etcd")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        sys.stderr.write("weft lab: it makes network namespaces, which takes root: run it as root\n")
        return EXIT_REFUSED
    step_apart()
    try:
        asyncio.run(_run(Console(), args.store))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
