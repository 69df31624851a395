"""Masters that call themselves the same: leadership is not taken back and forth (M6)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds
from weft.domain.ids import StoreKey
from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.masters import MasterProcess, client, running_master
from weft.lab.servers.processes import Child, free_port
from weft.lab.waiting import eventually, soon
from weft.master.settings import read_master_settings
from weft.ports.store import Store
from weft.runtime.backoff import Backoff
from weft.runtime.settings import BadSettings
from weft.runtime.store.election import lead

KEY = StoreKey("leader")


async def test_M6_two_candidates_of_one_name_do_not_take_leadership_from_each_other() -> None:
    """M6: a process takes over from a holder of its own name once, at its start; later holders are somebody else."""
    terms: list[str] = []

    async def candidate(store: Store, name: str) -> None:
        first = True
        while True:
            async with lead(store, key=KEY, name=b"same", ttl=60.0, replace_own=first) as leadership:
                first = False
                terms.append(name)
                await leadership.lost.wait()

    async with MemoryStore() as store, asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(candidate(store, name)) for name in ("one", "two")]
        pace = Backoff(first=0.01, cap=0.01)
        for _ in range(100):
            await pace.pause()
        assert len(terms) <= 3, "each takes over at most once"
        for task in both:
            task.cancel()


@pytest.mark.parametrize(
    "address", [(), ("--external-address", "127.0.0.1:9999"), ("--external-address", "[::1]:9999")]
)
def test_M6_a_loopback_address_is_refused_with_etcd(address: tuple[str, ...]) -> None:
    """M6: other masters cannot reach it, and every machine has the same one."""
    etcd = ("--etcd-endpoints", "http://192.0.2.1:2379")
    with pytest.raises(BadSettings, match="--internal-address") as refused:
        read_master_settings([*etcd, *address], {})
    assert "--single-machine" in str(refused.value), "the error names the flag for one machine"
    assert read_master_settings([*etcd, *address, "--single-machine"], {}).external[1] == 9999
    assert read_master_settings(list(address), {}).external[1] == 9999, "the embedded store has one netmaster"


async def test_M6_the_program_says_why_it_refuses(tmp_path: Path) -> None:
    flags = ("--etcd-endpoints", "http://127.0.0.1:2379", "--data-dir", str(tmp_path / "data"))
    with Child.python("weft.master.main", *flags, log=tmp_path / "log") as child:
        await eventually(lambda: _exit_code(child), lambda code: code == 22)
    assert "127.0.0.1:9999" in (tmp_path / "log").read_text()


async def _exit_code(child: Child) -> int | None:
    return child.exit_code


async def test_M6_masters_of_one_address_are_told_apart_by_their_instance(tmp_path: Path) -> None:
    """M6: two processes with one etcd and one name lead one after the other, each for its whole life."""
    async with running_etcd(tmp_path / "etcd") as etcd, AsyncExitStack() as stack:
        # Both say that they are reached at the same address, as two machines with default addresses did.
        shared = ("--etcd-endpoints", etcd.endpoints[0], "--internal-address", f"127.0.0.1:{free_port()}")
        one = await stack.enter_async_context(MasterProcess(tmp_path / "one", *shared, "--leader-ttl", "600"))
        # It cannot listen on the same address here, so that it is stopped before the other starts: kill -9 leaves
        # its leader key behind, with ten minutes to go.
        one.kill()
        other = MasterProcess(tmp_path / "two", *shared, "--leader-ttl", "600", "--default-subnet", "none")
        stack.callback(other.kill)
        waiting = asyncio.create_task(other.start())
        async with client(other.url) as rest:
            await rest.alive()
            done, _ = await asyncio.wait([waiting], timeout=1.0)
            assert not done, "the other one took the leadership of a process that is not its own"
            waiting.cancel()
            other.kill()
            # The process of the same data directory is the same instance: it is replaced at once.
            await soon(one.start())


async def test_M6_the_leader_is_known_by_its_address() -> None:
    """M6: the instance is part of the name, not of the address that followers forward to."""
    async with MemoryStore() as store, running_master(store=store) as rest:
        entry = await store.read(kinds.LEADER_KEY)
        assert entry is not None
        address = rest.url.removeprefix("http://")
        assert entry.value.decode().startswith(f"{address}#")
        assert (await rest.send("GET", "/info")).accepted()["leader-ip"] == address
