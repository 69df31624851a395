"""The lab itself: all of it is gone with the process that made it, however that ends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from weft.lab.servers.processes import Child
from weft.lab.waiting import until

# A shell starts what it puts into the background with SIGINT ignored, and children inherit that.
PROGRAM = """
import asyncio
import signal
from weft.lab.namespaces import step_apart
from weft.lab.netlab import open_lab

async def main() -> None:
    async with open_lab() as lab:
        pod = await (await lab.host("one")).pod("a")
        print(lab.directory, flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)
step_apart()
asyncio.run(main())
"""


def processes_of(directory: str) -> set[int]:
    """The processes that were started with a path in the directory."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                if directory in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.add(int(entry.name))
    return found


def seen_in(directory: str) -> list[Path]:
    return list(Path(directory).iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_nothing_is_left_when_its_process_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    with Child([sys.executable, "-c", PROGRAM], log=tmp_path / "log") as child:
        directory = child.read_line()
        assert len(processes_of(directory)) == 3, "netmaster, netplugin and netdns"
        assert seen_in(directory) == [], "what the lab mounts is seen by nobody else"
        os.kill(child.pid, how)
        await until(lambda: not processes_of(directory))
        await until(lambda: not child.running)
