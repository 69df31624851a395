"""A lab of real processes under attack from all sides for an hour, or for WEFT_HOSTILE_SECONDS.

Meanwhile pods come and go. No process may end, ADD stays fast, names resolve, and no packet arrives that policy denies.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.forbidden_traffic import ForbiddenTraffic
from tests.support.hostile import IdleConnections, StoreVandal, hostile_objects, overlapping_rules
from tests.support.kubernetes.kubeletless_cluster import KubeletlessCluster, open_kubeletless_cluster

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import open_lab
from weft.lab.waiting import eventually

SECONDS = float(os.environ.get("WEFT_HOSTILE_SECONDS", "3600"))
# At most so many ADDs measure the quiet lab.
QUIET_ADDS = 60
IDLE = 5_000
RULES = 500
CLOSED_PORT, OPEN_PORT = 9000, 80
# Writes of garbage at once.
BATCH = 40
SLOWDOWN = 3.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 1800)]


@pytest.fixture(params=["embedded", "etcd"])
async def kube(
    request: pytest.FixtureRequest, isolated: None, kube_apiserver: Path
) -> AsyncIterator[KubeletlessCluster]:
    async with open_lab(store=request.param) as lab:
        try:
            async with open_kubeletless_cluster(lab, programs=kube_apiserver) as cluster:
                yield cluster
        finally:
            lab.print_logs(lines=80)


class Churn:
    """Pods that come and go on a host, one after the other, and how long their ADDs took."""

    def __init__(self, kube: KubeletlessCluster, host: Host) -> None:
        self._kube = kube
        self._host = host
        self._number = 0
        self.seconds: list[float] = []

    async def once(self) -> None:
        """Create, attach and remove one pod. Only the ADD is measured."""
        self._number += 1
        name = f"{self._host.name}-churn-{self._number}"
        uid = await self._kube.create_pod(self._host, name, {"app": "churn"})
        started = time.monotonic()
        pod = await self._kube.attach(self._host, name, uid)
        self.seconds.append(time.monotonic() - started)
        await pod.remove()
        await self._kube.delete_pods(name)


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


async def assert_names_resolve(pod: Pod, answer: str) -> None:
    async def query() -> list[str] | None:
        try:
            return await pod.dig("web.lab.svc.cluster.local")
        except AssertionError:
            return None  # lost, as a datagram may be

    await eventually(query, lambda found: found == [answer])


async def test_nothing_falls_over_and_nothing_opens(kube: KubeletlessCluster) -> None:
    seed = int(os.environ.get("WEFT_FUZZ_SEED", secrets.randbits(32)))
    one, two = kube.lab.hosts["one"], kube.lab.hosts["two"]
    web = await kube.pod(one, "web", app="web")
    near, far = await kube.pod(one, "near", app="client"), await kube.pod(two, "far", app="client")
    address = await kube.service("web", web)
    deny = {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}
    await kube.policy("only-web", **deny, ingress=[{"from": [{"podSelector": {}}], "ports": [{"port": OPEN_PORT}]}])
    await eventually(lambda: near.never_reaches(web, port=CLOSED_PORT), bool)
    for client in (near, far):
        assert await client.eventually_reaches(web, port=OPEN_PORT)
        await assert_names_resolve(client, address)
    churns = [Churn(kube, host) for host in (one, two)]
    for _ in range(QUIET_ADDS):
        await asyncio.gather(*(churn.once() for churn in churns))
    quiet = p99([each for churn in churns for each in churn.seconds])
    for churn in churns:
        churn.seconds.clear()

    processes = {
        "netplugin one": one.agent,
        "netplugin two": two.agent,
        "netdns one": one.netdns,
        "netdns two": two.netdns,
    }
    vandal = StoreVandal(kube.lab, seed=seed)
    with Namespace.current() as here, Namespace.open(one.netns) as inside:
        host, _, port = kube.lab.master.address.rpartition(":")
        listeners: list[tuple[Namespace, tuple[str, int] | Path]] = [
            (here, (host, int(port))), (inside, ("127.0.0.1", 9090)), (here, one.socket), (here, kube.lab.store_socket),
            (here, one.home / "run" / "dns.sock"),
        ]  # fmt: skip
        with (
            IdleConnections(listeners, count=IDLE) as idle,
            ForbiddenTraffic([near, far], [web], port=CLOSED_PORT, families=(4,)) as forbidden,
        ):
            before = forbidden.arrived  # a look at what the taps have seen until now
            assert before == 0
            await kube.policy("costly", podSelector={"matchLabels": {"app": "web"}}, ingress=[
                {"from": [{"podSelector": {}}], "ports": [{"port": OPEN_PORT}]}, *overlapping_rules(RULES)
            ])  # fmt: skip
            for path, document in hostile_objects():
                await kube.api.create(path, document)
            until = time.monotonic() + SECONDS
            rounds = 0
            while time.monotonic() < until:
                rounds += 1
                await vandal.attack(BATCH)
                idle.refill()
                for _ in range(5):
                    await asyncio.gather(*(churn.once() for churn in churns))
                for client in (near, far):
                    assert await client.eventually_reaches(web, port=OPEN_PORT), f"round {rounds}, seed {seed}"
                    await assert_names_resolve(client, address)
                ended = {name: child.exit_code for name, child in processes.items() if not child.running}
                assert ended == {}, f"round {rounds}, seed {seed}, {vandal.writes} writes"
                assert forbidden.arrived == 0, f"round {rounds}, seed {seed}"
            await forbidden.wait_for_more_packets()
            assert forbidden.arrived == 0
            assert idle.count > 0
    (await kube.lab.rest.send("GET", "/healthz")).accepted()
    hostile = p99([each for churn in churns for each in churn.seconds])
    sys.stdout.write(
        f"seed {seed}: {rounds} rounds, {vandal.writes} writes of garbage, "
        f"{sum(len(churn.seconds) for churn in churns)} ADDs, p99 {hostile * 1e3:.0f} ms, quiet {quiet * 1e3:.0f} ms\n"
    )
    assert hostile < SLOWDOWN * quiet
