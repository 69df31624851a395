"""Helpers for labs: attach many pods, restart agents, measure round trips and throughput."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from weft.cni.errors import CniError, Code
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.servers.processes import Child
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

ROUNDS = 7
AT_ONCE = 8
NETWORK = "full"
CHECKOUT = Path(__file__).parents[1]
_CREATE = '{"TenantName":"default","NetworkName":"full","EndpointID":"e%d","ConfigEP":{"Host":"two","Container":"c"}}'


class Pair(NamedTuple):
    """Two pods: the namespaces of client and server, and the server's address."""

    client: Path
    server: Path
    address: str


def pair_of(client: Pod, server: Pod) -> Pair:
    return Pair(client.netns, server.netns, str(server.address()))


def measure_alternating(
    places: dict[str, tuple[Pair, Pair]], *, rounds: int = ROUNDS
) -> dict[tuple[str, int, str], list[float]]:
    """Measure round trips (`ping`) and TCP throughput (`send`) of both pairs of each place, alternating. Values at
    the same index of both lists are neighbours in time.
    """
    found: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for place, pairs in places.items():
            for side, times in enumerate(round_trips(*pairs)):
                found[place, side, "ping"] += times
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                found[place, side, "send"].append(float(_packets("send", pairs[side])))
    return found


def round_trips(ours: Pair, peer: Pair) -> tuple[list[float], list[float]]:
    """Round-trip times in microseconds, of alternating batches."""
    batches = [tuple(map(float, line.split())) for line in _packets("ping", ours, peer).splitlines()]
    return [first for first, _ in batches], [second for _, second in batches]


async def start_servers(places: dict[str, tuple[Pair, Pair]], stack: ExitStack) -> None:
    """Run all servers until the stack is closed."""
    for pair in (pair for pairs in places.values() for pair in pairs):
        child = Child.python("bench.packets", "serve", str(pair.server), pair.address)
        await stack.enter_context(child).next_line()


def _packets(what: str, *pairs: Pair) -> str:
    places = [word for pair in pairs for word in (str(pair.client), pair.address)]
    command = [sys.executable, "-m", "bench.packets", what, *places]
    done = subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE, cwd=CHECKOUT, text=True)
    return done.stdout


def ip(namespace: Namespace, *lines: str) -> None:
    commands = "\n".join(lines).encode()
    namespace.run(
        lambda: subprocess.run(["ip", "-batch", "-"], input=commands, capture_output=True, check=True, timeout=DEADLINE)
    )


async def attach(host: Host, name: str, turns: asyncio.Semaphore) -> None:
    """ADD with retries on "try again later", like a runtime."""
    async with turns:
        backoff = Backoff(within=DEADLINE)
        while True:
            try:
                await host.pod(name, network=NETWORK)
            except CniError as error:
                if error.code != Code.TRY_LATER:
                    raise
                await backoff.pause()
            else:
                return


def create_remote(url: str, count: int) -> None:
    command = [sys.executable, "-m", "bench.load", url.rsplit(":", 1)[1], "/plugin/createEndpoint", "0", str(count)]
    command.append(str(AT_ONCE))
    subprocess.run(command, input=_CREATE, text=True, capture_output=True, check=True, timeout=600, cwd=CHECKOUT)


async def restart(host: Host) -> float:
    """Seconds from the start of the agent until STATUS succeeds."""
    host.kill()
    began = time.perf_counter()
    host.launch()
    backoff = Backoff(first=0.01, cap=0.01, within=DEADLINE)
    while True:
        try:
            await host.cni.status(host.network)
        except CniError:
            await backoff.pause()
        else:
            return time.perf_counter() - began
