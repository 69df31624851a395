"""`weft lab`: runs a demo cluster on this machine, with the real programs in network namespaces."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from weft.lab.namespaces import enter_private_namespaces
from weft.lab.netlab import open_lab
from weft.lab.scenario import run_scenario

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


async def _run(console: Console, store: str) -> None:
    async with open_lab(store=store) as lab:
        await run_scenario(console, lab)


def main(argv: Sequence[str]) -> int:
    """Run the demo; everything is cleaned up at the end, after Ctrl-C too."""
    parser = argparse.ArgumentParser(prog="weft lab", description="Run a demo cluster on this machine. Needs root.")
    parser.add_argument(
        "--store", choices=("embedded", "etcd"), default="embedded", help="store of the cluster (embedded)"
    )
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("weft lab: creating network namespaces needs root: run it as root", file=sys.stderr)
        return EXIT_REFUSED
    # Before the event loop: setns and unshare affect only the calling thread.
    enter_private_namespaces()
    try:
        asyncio.run(_run(Console(), args.store))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
