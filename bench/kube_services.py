"""Many services of Kubernetes: how soon a change of one is in force, and what an agent takes to keep them all.

A real API server declares them, netmaster and two agents carry them out. A pod asks a service without pause, whose
slice is changed from one of two other pods to the other: from the request to the first answer of the other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.support.kubernetes.fake_cluster import SERVICES, SLICES, PaperCluster, open_paper_cluster
from tests.support.responders import answering, ask

from bench.figures import Figure, figure
from bench.memory import resident_mb
from weft.lab.hosts import Pod
from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import open_lab
from weft.lab.waiting import DEADLINE, eventually

MANY, ENDPOINTS = 1_000, 3
CHANGES, NOT_COUNTED = 100, 10
AT_ONCE = 8
TARGET_MS, TARGET_MB = 100.0, 120.0
_PORT = 8080


def run(programs: Path) -> dict[str, Figure]:
    """The caller is root; `programs` has a kube-apiserver."""
    with stepped_apart():
        return asyncio.run(_measure(programs))


async def _measure(programs: Path) -> dict[str, Figure]:
    async with open_lab() as lab, open_paper_cluster(lab, programs=programs) as kube:
        one, two = lab.hosts["one"], lab.hosts["two"]
        asks, left, right = [
            await kube.pod(host, name) for host, name in ((one, "asks"), (one, "left"), (two, "right"))
        ]
        await _declare_all(kube)
        address = await kube.service("asked", left, target_port=_PORT)
        async with answering({each.name: each.place() for each in (left, right)}, port=_PORT):
            await _until_answered(asks, address, left.name)
            times = [await _change(kube, asks, address, to=(right, left)[number % 2]) for number in range(CHANGES)]
        memory = max(resident_mb(host.agent.pid) for host in (one, two))
    times = times[NOT_COUNTED:]
    name, worst = f"{MANY} services, {MANY * ENDPOINTS} endpoints", f"{max(times):.0f} at worst"
    note = f"from the request to the API server until an answer; p50 {median(times):.0f} of {len(times)}, {worst}"
    return {
        f"a change in force, {name}, p99": figure(_p99(times), unit="ms", target=TARGET_MS, note=note),
        f"agent, {name}": figure(memory, unit="MB RSS", target=TARGET_MB, note="the larger of two, after all changes"),
    }


async def _declare_all(kube: PaperCluster) -> None:
    """All services that nobody asks, each with endpoints of its own, and return when the store has them."""
    numbers = iter(range(MANY))

    async def work() -> None:
        for number in numbers:
            await _declare(kube, number)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await eventually(lambda: _kept(kube), lambda found: found >= MANY, within=DEADLINE)


async def _kept(kube: PaperCluster) -> int:
    return len((await kube.lab.rest.get("kubeSlices")).accepted())


async def _declare(kube: PaperCluster, number: int) -> None:
    name = f"many-{number}"
    ports = [{"name": "web", "port": 80, "targetPort": _PORT}]
    await kube.api.create(SERVICES, {"metadata": {"name": name}, "spec": {"ports": ports}})
    endpoints = [
        {"addresses": [f"10.224.{number % 200 + 20}.{number // 200 * ENDPOINTS + each + 1}"], "nodeName": "two"}
        for each in range(ENDPOINTS)
    ]
    piece: dict[str, Any] = {
        "metadata": {"name": f"{name}-1", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "web", "port": _PORT, "protocol": "TCP"}],
    }
    await kube.api.create(SLICES, piece)


async def _change(kube: PaperCluster, asks: Pod, address: str, *, to: Pod) -> float:
    """Milliseconds until another pod answers for the service."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kube.serve_by("asked", to))
        await _until_answered(asks, address, to.name)
    return (time.perf_counter() - began) * 1e3


async def _until_answered(asks: Pod, address: str, name: str) -> None:
    for _ in count():
        with suppress(OSError):
            if (await ask(asks.place(), address, 80)).who == name:
                return
        await asyncio.sleep(0.001)  # the one that answers is in this process too


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100)[98]
