"""Silent and excessive connections, and excessive requests, against the real programs (M2)."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import pytest

from weft.lab.servers.masters import MasterProcess, client
from weft.lab.waiting import DEADLINE
from weft.runtime.listener import raise_open_files

# More than the soft limit of open files of a program that does not raise it.
SILENT = 1100


@contextmanager
def silent_connections(address: str, number: int) -> Iterator[list[socket.socket]]:
    """So many connections that never send anything."""
    raise_open_files()
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE)) for _ in range(number)
        ]


@contextmanager
def few_open_files(soft: int = 1024) -> Iterator[None]:
    """Processes started in the block begin with the soft limit that most systems give a service."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def health(address: str) -> int:
    """The status of /healthz for a client with a connection of its own."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: weft\r\nConnection: close\r\n\r\n")
        return int(connection.makefile("rb").readline().split()[1])


async def test_M2_silent_connections_do_not_stop_netmaster(tmp_path: Path) -> None:
    """M2: it was dead at 1,024 open files. Now it answers, and writes are served, while all of them are open."""
    async with AsyncExitStack() as stack:
        with few_open_files():
            master = await stack.enter_async_context(MasterProcess(tmp_path / "master"))
        with silent_connections(master.address, SILENT):
            assert await asyncio.to_thread(health, master.address) == 200
            async with client(master.url) as rest:
                (await rest.put("tenants", tenantName="blue")).accepted()
        assert resource.prlimit(master.pid, resource.RLIMIT_NOFILE)[0] > SILENT


@pytest.mark.soak
async def test_M2_five_thousand_idle_connections(tmp_path: Path) -> None:
    """M2: in several waves from this machine, more than one source may have; writes and health are served."""
    async with MasterProcess(tmp_path / "master") as master, client(master.url) as rest:
        for wave in range(3):
            with silent_connections(master.address, 5000):
                assert await asyncio.to_thread(health, master.address) == 200
                (await rest.put("tenants", tenantName=f"t{wave}")).accepted()


async def test_M2_a_limit_of_files_below_the_connections_stops_nothing(tmp_path: Path) -> None:
    """M2: where accept itself fails (EMFILE), idle connections make room, for new ones and for other files."""
    async with MasterProcess(tmp_path / "master") as master, client(master.url) as rest:
        (await rest.put("tenants", tenantName="before")).accepted()
        # It has read its limit at start. The kernel's is lower now: far below the connections to come.
        files = open_files(master.pid) + 40
        resource.prlimit(master.pid, resource.RLIMIT_NOFILE, (files, files))
        for wave in range(2):
            with silent_connections(master.address, 300):
                assert await asyncio.to_thread(health, master.address) == 200
                (await rest.put("tenants", tenantName=f"during{wave}")).accepted()
        async with client(master.url) as another:
            text = (await another.send("GET", "/metrics")).accepted()
        assert re.search(r'weft_connections_closed_total\{listener="[^"]+",reason="open_files"\}', text)
