"""The linux datapath: packets between pods, compared with plain bridges, and the agent on a full node.

Ours and the peer alternate, and medians are reported. Across hosts the peer is a bridge with a kernel VXLAN device on
either end of the same underlay.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.figures import Figure, Skipped, figure, paired_figure
from bench.labs import (
    AT_ONCE,
    NETWORK,
    Pair,
    attach,
    create_remote,
    ip,
    measure_alternating,
    pair_of,
    restart,
    start_servers,
)
from bench.memory import resident_mb
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.hosts import Host
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import NetLab, open_lab

LOCAL, REMOTE = 500, 5_000
RESTARTS = 5
SUBNET = "10.7.0.0/16"


def run() -> dict[str, Figure]:
    if os.geteuid() != 0:
        raise Skipped("creating network namespaces needs root")
    with private_namespaces():
        return asyncio.run(_measure())


async def _measure() -> dict[str, Figure]:
    async with open_lab() as lab:
        await lab.network(NETWORK, subnet=SUBNET, gateway="10.7.0.1")
        one, two = await lab.host("one"), await lab.host("two")
        figures = await _measure_packets(lab, one, two)
        two.kill()  # its endpoints stay in the store without an agent that would remove them
        return figures | await _measure_agent(lab, one)


async def _measure_packets(lab: NetLab, one: Host, two: Host) -> dict[str, Figure]:
    here, near, far = await one.pod("here"), await one.pod("near"), await two.pod("far")
    with ExitStack() as stack:
        hand = _PlainBridges(lab, stack)
        places = {
            "one host": (pair_of(here, near), hand.one_host()),
            "two hosts": (pair_of(here, far), hand.two_hosts()),
        }
        await start_servers(places, stack)
        found = await asyncio.to_thread(measure_alternating, places)
    figures = {}
    for place, (slower, less) in {"one host": (1.2, 0.9), "two hosts": (1.35, 0.7)}.items():
        trips, peer_trips = (found[place, side, "ping"] for side in (0, 1))
        note = "64 bytes by TCP, both ends on one core; median of the pairs' ratios"
        figures[f"round trip, {place}"] = paired_figure(trips, peer_trips, unit="us", most=slower, note=note)
        ours, peer = (median(found[place, side, "send"]) for side in (0, 1))
        figures[f"TCP throughput, {place}"] = figure(
            ours, peer=peer, unit="MB/s", target=less * peer, more_is_better=True, note="one stream, cubic"
        )
    return figures


class _PlainBridges:
    """Bridges and VXLAN devices configured with `ip`."""

    def __init__(self, lab: NetLab, stack: ExitStack) -> None:
        self._stack = stack
        self._directory = NamespaceDirectory(lab.directory / "hand")
        self._directory.prepare()
        self._underlay = stack.enter_context(Namespace.current())

    def one_host(self) -> Pair:
        """Create two pods on one bridge."""
        host = self._namespace("plain")
        ip(host, "link add br0 type bridge", "link set br0 up")
        pods = [self._pod(host, f"plain{number}", address=f"10.98.0.{number}") for number in (1, 2)]
        return Pair(pods[0], pods[1], "10.98.0.2")

    def two_hosts(self) -> Pair:
        """Create a pod on either side of a VXLAN tunnel between two bridges."""
        pods = []
        for number, other in ((1, 2), (2, 1)):
            host = self._namespace(f"tunnel{number}")
            ip(
                self._underlay,
                f"link add hand{number} type veth peer name eth0 netns {self._directory.path}/tunnel{number}",
                f"link set hand{number} master underlay up",
            )
            ip(
                host,
                f"addr add 192.0.2.{100 + number}/24 dev eth0",
                "link set eth0 up",
                "link add br0 type bridge",
                "link set br0 up",
                f"link add vx0 type vxlan id 99 dstport 4789 local 192.0.2.{100 + number} remote 192.0.2.{100 + other}",
                "link set vx0 master br0 up",
            )
            pods.append(self._pod(host, f"far{number}", address=f"10.99.0.{number}"))
        return Pair(pods[0], pods[1], "10.99.0.2")

    def _namespace(self, name: str) -> Namespace:
        return self._stack.enter_context(self._directory.create(name))

    def _pod(self, host: Namespace, name: str, *, address: str) -> Path:
        path = self._directory.path / name
        pod = self._namespace(name)
        ip(host, f"link add {name} type veth peer name eth0 netns {path}", f"link set {name} master br0 up")
        ip(pod, f"addr add {address}/24 dev eth0", "link set eth0 mtu 1450 up")
        return path


async def _measure_agent(lab: NetLab, host: Host) -> dict[str, Figure]:
    """The agent's memory with many local and remote endpoints, and its restart time."""
    await asyncio.to_thread(create_remote, lab.master.url, REMOTE)
    turns = asyncio.Semaphore(AT_ONCE)

    await asyncio.gather(*(attach(host, f"full-{number}", turns) for number in range(LOCAL)))
    before = resident_mb(host.agent.pid)
    times = [await restart(host) for _ in range(RESTARTS)]
    return {
        "agent memory": figure(
            before, unit="MB RSS", target=70.0, note=f"{LOCAL} local and {REMOTE} remote endpoints, before a restart"
        ),
        "agent memory after a restart": figure(
            resident_mb(host.agent.pid), unit="MB RSS", target=70.0, note="the same endpoints"
        ),
        "restart to ready": figure(
            median(times), unit="s", target=2.0, note=f"from exec to STATUS, {LOCAL} pods; median of {RESTARTS}"
        ),
    }
