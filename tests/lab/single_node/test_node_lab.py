"""The lab itself leaves nothing behind when its process ends, whatever the signal."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from weft.lab.servers.processes import Child
from weft.lab.waiting import until

# A shell starts background processes with SIGINT ignored, and children inherit that.
PROGRAM = """
import asyncio
import signal
from weft.lab.namespaces import enter_private_namespaces
from weft.lab.netlab import open_lab

async def main() -> None:
    async with open_lab() as lab:
        pod = await (await lab.host("one")).pod("a")
        print(lab.directory, flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)
enter_private_namespaces()
asyncio.run(main())
"""


def processes_of(directory: str) -> set[int]:
    """The processes that were started with a path in the directory."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has exited
                if directory in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.add(int(entry.name))
    return found


def visible_in(directory: str) -> list[Path]:
    return list(Path(directory).iterdir())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_nothing_is_left_when_the_process_ends(tmp_path: Path, how: signal.Signals) -> None:
    with Child([sys.executable, "-c", PROGRAM], log=tmp_path / "log") as child:
        directory = child.read_line()
        assert len(processes_of(directory)) == 3, "netmaster, netplugin and netdns"
        assert visible_in(directory) == [], "the lab's mounts are private"
        os.kill(child.pid, how)
        await until(lambda: not processes_of(directory))
        await until(lambda: not child.running)
