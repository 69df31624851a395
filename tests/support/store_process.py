"""A process that serves an embedded store on a unix socket: `python -m tests.support.store_process FILE SOCKET`.

It prints `serving` when it is ready.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from weft.drivers import SqliteStoreSettings, open_store
from weft.lab.servers.processes import Child
from weft.master.nodes.store_server import serving_store

# Revisions kept for watchers: more than a test writes.
HISTORY = 1_000_000


async def _main(file: str, socket: str) -> None:
    settings = SqliteStoreSettings(path=file, history=HISTORY)
    async with open_store(settings) as store, serving_store(store, unix=Path(socket)):
        os.write(1, b"serving\n")
        await asyncio.Event().wait()


def serving_process(file: Path, socket: Path, *, log: Path) -> Child:
    """Start this program."""
    return Child.python("tests.support.store_process", str(file), str(socket), log=log)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
