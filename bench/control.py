"""Control plane: endpoints created and deleted per second, by REST and at the store, and memory.

Every netmaster is a separate process, and so is the load. Rounds with no endpoints and with 5,000 endpoints alternate;
medians are reported. The peer of REST is a bare handler with one commit of equal size, measured in the same run.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench.figures import Figure, figure
from bench.floor import same_commit
from bench.memory import resident_mb
from weft.domain.ids import StoreKey
from weft.drivers import EtcdStoreSettings, SqliteStoreSettings, open_store
from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.masters import MasterProcess
from weft.lab.servers.processes import Child, free_port
from weft.ports.store import Delete, Store

ROUNDS = 5
PRESENT = 5_000
# Requests in a round, by concurrency.
COUNTS = {1: 150, 8: 600}
CREATE = '{"TenantName":"default","NetworkName":"bench","EndpointID":"e%d","ConfigEP":{"Host":"h1","Container":"c"}}'
DELETE = '{"TenantName":"default","NetworkName":"bench","EndpointID":"e%d"}'
FLOOR = '{"number":%d}'
# etcd's own defaults; tests use shorter ones.
USUAL_PACE = ("--heartbeat-interval", "100", "--election-timeout", "1000")
TARGETS = {("etcd", 1): 300.0, ("etcd", 8): 1000.0, ("sqlite", 8): 1000.0}
STORE_TARGETS = {1: 700.0, 8: 1800.0}

Rates = defaultdict[tuple[Any, ...], list[float]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A netmaster under test, with this number of endpoints."""

    store: str
    present: int
    master: MasterProcess

    @property
    def port(self) -> int:
        return int(self.master.url.rsplit(":", 1)[1])


def run() -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory:
        return asyncio.run(_measure(Path(directory)))


async def _measure(directory: Path) -> dict[str, Figure]:
    rates: Rates = defaultdict(list)
    async with AsyncExitStack() as stack:
        url = await _start_etcd(stack, _new(directory, "port-etcd"))
        await _measure_stores(rates, url, _new(directory, "port") / "port.db")
    memory: dict[str, float] = {}
    for store in ("etcd", "sqlite"):
        async with AsyncExitStack() as stack:
            memory[store] = await _measure_rest(rates, store, stack, _new(directory, store))
    return _figures(rates, memory)


async def _start_etcd(stack: AsyncExitStack, directory: Path) -> str:
    etcd = await stack.enter_async_context(running_etcd(directory, options=USUAL_PACE))
    return etcd.endpoints[0]


async def _measure_rest(rates: Rates, store: str, stack: AsyncExitStack, directory: Path) -> float:
    """Run all rounds of one store, with nothing else running; return netmaster's memory with 5,000 endpoints."""
    benches = []
    where = str(directory / "floor.db")
    for present in (0, PRESENT):
        flags: tuple[str, ...] = ()
        if store == "etcd":
            where = await _start_etcd(stack, _new(directory, f"etcd-{present}"))
            flags = ("--etcd-endpoints", where)
        master = MasterProcess(_new(directory, f"master-{present}"), "--default-subnet", "none", *flags)
        await stack.enter_async_context(master)
        benches.append(Bench(store, present, master))
        await _prepare(benches[-1])
    floor = stack.enter_context(_floor(store, where))
    for number in range(ROUNDS):
        for at_once, count in COUNTS.items():
            for bench in benches:
                first = PRESENT + number * 10_000 + at_once * 1_000
                for what, body in (("create", CREATE), ("delete", DELETE)):
                    rate = _post(bench.port, f"/plugin/{what}Endpoint", body, first, count, at_once)
                    rates[what, store, bench.present, at_once].append(rate)
            rates["floor", store, at_once].append(_post(floor, "/floor", FLOOR, 0, count, at_once))
    return resident_mb(benches[-1].master.pid)


def _new(directory: Path, name: str) -> Path:
    (directory / name).mkdir()
    return directory / name


async def _prepare(bench: Bench) -> None:
    network = {"tenantName": "default", "networkName": "bench", "encap": "vxlan", "subnet": "10.7.0.0/16"}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        await session.put(f"{bench.master.url}/api/v1/networks/default:bench/", json=network)
    if bench.present:
        _post(bench.port, "/plugin/createEndpoint", CREATE, 0, bench.present, 8)


@contextmanager
def _floor(kind: str, where: str) -> Iterator[int]:
    """Run the floor process; its port."""
    port = free_port()
    with Child.python("bench.floor", str(port), kind, where) as child:
        child.read_line()
        yield port


def _post(port: int, path: str, body: str, first: int, count: int, at_once: int) -> float:
    """Requests per second."""
    command = [sys.executable, "-m", "bench.load", str(port), path, str(first), str(count), str(at_once)]
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"bench: {done.stderr.strip()}")
    return count / float(done.stdout)


async def _measure_stores(rates: Rates, etcd: str, sqlite: Path) -> None:
    """Measure equal commits at the store interface, in this process."""
    for name, settings in (
        ("etcd", EtcdStoreSettings(endpoints=(etcd,), root="/port/")),
        ("sqlite", SqliteStoreSettings(path=str(sqlite))),
    ):
        async with open_store(settings) as store:
            for number in range(ROUNDS):
                for at_once, count in COUNTS.items():
                    first = number * 10_000 + at_once * 1_000
                    for what in ("create", "delete"):
                        rate = await _commits(store, what, first=first, count=count, at_once=at_once)
                        rates[f"port {what}", name, at_once].append(rate)


async def _commits(store: Store, what: str, *, first: int, count: int, at_once: int) -> float:
    numbers = iter(range(first, first + count))

    async def work() -> None:
        for number in numbers:
            if what == "create":
                await same_commit(store, number)
            else:
                document = StoreKey(f"endpoints/default/bench/f{number}")
                claim = StoreKey(f"claims/addresses/d/b/{number:08x}")
                await store.commit([], [Delete(document), Delete(claim)])

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return count / (time.perf_counter() - began)


def _figures(rates: Rates, memory: dict[str, float]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for store in ("etcd", "sqlite"):
        for at_once in COUNTS:
            floor = median(rates["floor", store, at_once])
            for what in ("create", "delete"):
                empty = median(rates[what, store, 0, at_once])
                figures[f"REST {what}, {store}, {at_once} at once"] = figure(
                    empty, peer=floor, unit="1/s", target=TARGETS.get((store, at_once)), more_is_better=True,
                    note="peer: bare handler with one equal commit",
                )  # fmt: skip
                figures[f"REST {what}, {store}, {at_once} at once, 5,000 present"] = figure(
                    median(rates[what, store, PRESENT, at_once]), peer=empty, unit="1/s", target=0.85 * empty,
                    more_is_better=True, note="peer: the same with none present; at most 15 % slower",
                )  # fmt: skip
    for store in ("etcd", "sqlite"):
        for at_once in COUNTS:
            for what in ("create", "delete"):
                figures[f"store {what}, {store}, {at_once} at once"] = figure(
                    median(rates[f"port {what}", store, at_once]), unit="1/s", more_is_better=True,
                    target=STORE_TARGETS[at_once] if store == "etcd" else None, note="commits at the store interface",
                )  # fmt: skip
    for store, megabytes in memory.items():
        figures[f"netmaster memory, {store}, 5,000 endpoints"] = figure(
            megabytes, unit="MB RSS", target=70.0, note="after all rounds"
        )
    return figures
