"""Many Kubernetes Services: the latency of a change, and the memory of an agent.

With a real API server, netmaster and two agents. A pod queries a service continuously, whose EndpointSlice alternates
between two backends: the latency is from the API request to the first answer of the new backend.
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

from tests.support.kubernetes.kubeletless_cluster import SERVICES, SLICES, KubeletlessCluster, open_kubeletless_cluster
from tests.support.responders import answering, query

from bench.figures import Figure, figure
from bench.memory import resident_mb
from weft.lab.hosts import Pod
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import open_lab
from weft.lab.waiting import DEADLINE, eventually

MANY, ENDPOINTS = 1_000, 3
CHANGES, NOT_COUNTED = 100, 10
AT_ONCE = 8
TARGET_MS, TARGET_MB = 100.0, 120.0
_PORT = 8080


def run(programs: Path) -> dict[str, Figure]:
    """Measure as root; `programs` contains a kube-apiserver."""
    with private_namespaces():
        return asyncio.run(_measure(programs))


async def _measure(programs: Path) -> dict[str, Figure]:
    async with open_lab() as lab, open_kubeletless_cluster(lab, programs=programs) as kube:
        one, two = lab.hosts["one"], lab.hosts["two"]
        client, left, right = [
            await kube.pod(host, name) for host, name in ((one, "client"), (one, "left"), (two, "right"))
        ]
        await _create_services(kube)
        address = await kube.service("service", left, target_port=_PORT)
        async with answering({each.name: each.place() for each in (left, right)}, port=_PORT):
            await _wait_for_backend(client, address, left.name)
            times = [await _change(kube, client, address, to=(right, left)[number % 2]) for number in range(CHANGES)]
        memory = max(resident_mb(host.agent.pid) for host in (one, two))
    times = times[NOT_COUNTED:]
    name, worst = f"{MANY} services, {MANY * ENDPOINTS} endpoints", f"{max(times):.0f} at worst"
    note = f"from the request to the API server until an answer; p50 {median(times):.0f} of {len(times)}, {worst}"
    return {
        f"service change to packet, {name}, p99": figure(_p99(times), unit="ms", target=TARGET_MS, note=note),
        f"agent memory, {name}": figure(
            memory, unit="MB RSS", target=TARGET_MB, note="the larger of two, after all changes"
        ),
    }


async def _create_services(kube: KubeletlessCluster) -> None:
    """Create all idle services, each with its own endpoints, and wait until the store has them."""
    numbers = iter(range(MANY))

    async def work() -> None:
        for number in numbers:
            await _create_service(kube, number)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await eventually(lambda: _count_slices(kube), lambda found: found >= MANY, within=DEADLINE)


async def _count_slices(kube: KubeletlessCluster) -> int:
    return len((await kube.lab.rest.get("kubeSlices")).accepted())


async def _create_service(kube: KubeletlessCluster, number: int) -> None:
    name = f"many-{number}"
    ports = [{"name": "web", "port": 80, "targetPort": _PORT}]
    await kube.api.create(SERVICES, {"metadata": {"name": name}, "spec": {"ports": ports}})
    endpoints = [
        {"addresses": [f"10.224.{number % 200 + 20}.{number // 200 * ENDPOINTS + each + 1}"], "nodeName": "two"}
        for each in range(ENDPOINTS)
    ]
    endpoint_slice: dict[str, Any] = {
        "metadata": {"name": f"{name}-1", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "web", "port": _PORT, "protocol": "TCP"}],
    }
    await kube.api.create(SLICES, endpoint_slice)


async def _change(kube: KubeletlessCluster, client: Pod, address: str, *, to: Pod) -> float:
    """Milliseconds until the new backend answers."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kube.set_backends("service", to))
        await _wait_for_backend(client, address, to.name)
    return (time.perf_counter() - began) * 1e3


async def _wait_for_backend(client: Pod, address: str, name: str) -> None:
    for _ in count():
        with suppress(OSError):
            if (await query(client.place(), address, 80)).responder == name:
                return
        await asyncio.sleep(0.001)  # a rate limit: the backends run in this process too


def _p99(times: Sequence[float]) -> float:
    return quantiles(times, n=100)[98]
