"""Contract tests for datapaths (`weft.ports.datapath`).

A test class for one datapath subclasses `DatapathContract` and provides the fixture `settings`. The tests open the
datapath several times, each time as a process without memory. They must run in network namespaces of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest

from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    Port,
    Prefix,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VxlanPeer,
    rank,
)
from weft.domain.errors import Conflict, NotFound
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, WORKLOAD, IpIdentity, PolicyEntry, VerdictCounter
from weft.drivers import DatapathSettings, open_datapath
from weft.kernel.netns import NamespaceDirectory
from weft.lab import traffic
from weft.lab.waiting import soon, until
from weft.ports.datapath import Datapath, Drop, EndpointConfig, InterfaceAddress, PlugRequest

BLUE = TenantName("blue")
VTEP = parse_address("192.0.2.1", field="vtep")
_SUBNET = Address(4, 0x0A010000)
_GATEWAY = Address(4, 0x0A01FFFE)
# Repeated, because a stale cache entry shows only with some timing.
_CHANGES = 10


def address(number: int) -> Address:
    """The address of a workload."""
    return Address(4, _SUBNET.number + number)


def base_state(*workloads: int) -> frozenset[StateItem]:
    """A tenant with a network, another node, and the identities of some workloads."""
    return frozenset(
        {
            TenantNetns(BLUE),
            Gateway(BLUE, _GATEWAY),
            Overlay(BLUE, 7),
            VxlanPeer(BLUE, 7, "192.0.2.2"),
            RemoteRoute(BLUE, Prefix(4, 0x0A010040, 26), 7, "192.0.2.2"),
            *(IpIdentity(BLUE, address(number), WORKLOAD | number) for number in workloads),
        }
    )


def config(pods: NamespaceDirectory, number: int) -> EndpointConfig:
    """The configuration of a workload; the caller creates its namespace."""
    own = address(number)
    return EndpointConfig(
        port=Port(BLUE, f"wp{number:011x}", mac_of(own), (own,)),
        netns=str(pods.path / f"pod{number}"),
        interface="eth0",
        addresses=(InterfaceAddress(own, 16, _GATEWAY),),
        mtu=1450,
        endpoint=f"e{number}",
        workload=f"c{number}",
    )


def plug(datapath: Datapath, pods: NamespaceDirectory, *numbers: int) -> list[EndpointConfig]:
    """Create namespaces for workloads and plug them one after the other."""
    configs = [config(pods, number) for number in numbers]
    for number, workload in zip(numbers, configs, strict=True):
        pods.create(f"pod{number}").close()
        datapath.plug(workload)
    return configs


def _denied_packets(datapath: Datapath) -> int:
    """The number of packets that policy has denied so far."""
    counts = (counters.verdicts.items() for counters in datapath.counters())
    return sum(count for each in counts for verdict_id, count in each if verdict_id & VERDICT_DENY)


def _devices(pods: NamespaceDirectory, name: str) -> set[str]:
    with pods.open(name) as namespace:
        return namespace.run(lambda: {device for _, device in socket.if_nameindex()})


class DatapathContract:
    """The contract of `weft.ports.datapath`, one behaviour per test."""

    @pytest.fixture
    def datapath(self, settings: DatapathSettings) -> Iterator[Datapath]:
        with open_datapath(settings) as datapath:
            yield datapath

    @pytest.fixture
    def pods(self, tmp_path: Path) -> NamespaceDirectory:
        pods = NamespaceDirectory(tmp_path / "pods")
        pods.prepare()
        return pods

    # Converging

    def test_converging_twice_repairs_nothing(self, datapath: Datapath) -> None:
        assert datapath.converge(base_state()).repaired
        assert datapath.converge(base_state()).repaired == ()
        assert not datapath.has_drifted()
        assert [report.tenant for report in datapath.inspect()] == [BLUE]

    def test_a_restarted_datapath_finds_all_its_objects(
        self, datapath: Datapath, pods: NamespaceDirectory, settings: DatapathSettings
    ) -> None:
        datapath.converge(base_state(1))
        (wired,) = plug(datapath, pods, 1)
        # A second instance knows only what it reads from the kernel and the switch.
        with open_datapath(settings) as other:
            assert other.converge(base_state(1) | {wired.port}).repaired == ()
            assert other.check(wired) == []
            assert other.converge(frozenset()).repaired
            assert other.converge(frozenset()).repaired == ()
            assert other.inspect() == []

    def test_missing_ports_are_reported(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        port = config(pods, 1).port
        assert datapath.converge(base_state(1) | {port}).missing == {port}

    def test_converging_removes_undesired_ports(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state(1, 2))
        first, second = plug(datapath, pods, 1, 2)
        assert datapath.converge(base_state(1) | {first.port}).repaired
        assert datapath.check(first) == []
        assert datapath.check(second)
        assert datapath.converge(base_state(1) | {first.port}).repaired == ()

    # Differences

    def test_incremental_changes_lead_to_the_desired_state(self, datapath: Datapath) -> None:
        """Incremental changes leave nothing to repair, even if each is applied twice."""
        # Growing and shrinking, ending where it began.
        steps = [frozenset[StateItem](), base_state(), base_state(1, 2), base_state(2), base_state()]
        for before, after in itertools.pairwise(steps):
            for _ in range(2):
                datapath.apply(diff(after, before, rank=rank))
            assert datapath.converge(after).repaired == ()
        datapath.apply(diff(frozenset(), base_state(), rank=rank))
        assert datapath.inspect() == []

    async def test_after_a_cache_flush_changes_apply_to_the_next_packet(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        """Even of an established connection: a switch caches the actions of earlier packets."""
        datapath.converge(base_state(1, 2))
        plug(datapath, pods, 1, 2)
        verdict_id = VERDICT_DENY | 1
        closed = PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 2, None, verdict_id)
        datapath.apply(Difference((VerdictCounter(BLUE, verdict_id),), ()))
        loop = asyncio.get_running_loop()
        with ExitStack() as closing:
            source, target = (
                traffic.NetnsAddress(closing.enter_context(pods.open(f"pod{number}")), ip_address(str(address(number))))
                for number in (1, 2)
            )
            there = (str(target.address), 80)
            client = closing.enter_context(source.open_client(traffic.UDP))
            server = closing.enter_context(target.listening(80, traffic.UDP))
            for number in range(_CHANGES):
                await loop.sock_sendto(client, b"open", there)
                assert await soon(loop.sock_recv(server, 64)) == b"open"
                datapath.apply(Difference((closed,), ()))
                datapath.flush_datapath_cache()
                await loop.sock_sendto(client, b"closed", there)
                await until(lambda: _denied_packets(datapath) > number)  # noqa: B023
                datapath.apply(Difference((), (closed,)))
                datapath.flush_datapath_cache()

    async def test_a_drop_before_the_first_read_is_reported(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state(1, 2))
        plug(datapath, pods, 1, 2)
        verdict_id = VERDICT_DENY | 1
        datapath.apply(
            Difference(
                (
                    PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 2, None, verdict_id),
                    VerdictCounter(BLUE, verdict_id),
                ),
                (),
            )
        )
        with pods.open("pod1") as namespace:
            source = traffic.NetnsAddress(namespace, ip_address(str(address(1))))
            with source.open_client(traffic.UDP) as client:
                client.sendto(b"refused", (str(address(2)), 80))
        drops: list[Drop] = []

        def is_reported() -> bool:
            drops.extend(drop for drop in datapath.drops() if drop.verdict_id == verdict_id)
            return bool(drops)

        await until(is_reported)
        assert (drops[0].source, drops[0].target) == (address(1), address(2))

    # Workloads

    async def test_plugged_workloads_are_fully_configured(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state(1, 2))
        configs = plug(datapath, pods, 1, 2)
        assert [datapath.check(each) for each in configs] == [[], []]
        assert datapath.converge(base_state(1, 2) | {each.port for each in configs}).repaired == ()
        with pods.open("pod1") as first, pods.open("pod2") as second:
            places = [
                traffic.NetnsAddress(namespace, ip_address(str(each.addresses[0].address)))
                for namespace, each in zip((first, second), configs, strict=True)
            ]
            assert await traffic.reaches(*places, port=80)

    def test_an_unplugged_workload_is_removed_at_once(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        """Its interface name is free at once, unplugging is idempotent, and it can be plugged again at once."""
        datapath.converge(base_state(1))
        (wired,) = plug(datapath, pods, 1)
        for _ in range(2):
            datapath.unplug(wired)
            assert "eth0" not in _devices(pods, "pod1")
            assert datapath.check(wired)
        datapath.plug(wired)
        datapath.reap()
        assert datapath.check(wired) == []
        assert datapath.converge(base_state(1) | {wired.port}).repaired == ()

    def test_a_rejected_plug_changes_nothing(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state(1, 2))
        (wired,) = plug(datapath, pods, 1)
        with pytest.raises(Conflict):
            datapath.plug(wired)
        with pytest.raises(NotFound):
            datapath.plug(config(pods, 2))
        assert datapath.check(wired) == []
        assert datapath.converge(base_state(1, 2) | {wired.port}).repaired == ()

    def test_workloads_of_a_batch_fail_independently(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state(1, 2, 3))
        configs = [config(pods, number) for number in (1, 2, 3)]
        for number in (1, 3):
            pods.create(f"pod{number}").close()
        # The second one has no namespace.
        faults = [*datapath.plug_batch([*map(PlugRequest, configs)])]
        assert [type(fault) for fault in faults] == [type(None), NotFound, type(None)]
        wanted = base_state(1, 2, 3) | {configs[0].port, configs[2].port}
        assert datapath.converge(wanted).repaired == ()

    def test_policy_is_installed_with_the_port(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(base_state())
        pods.create("pod1").close()
        wired, identity = config(pods, 1), IpIdentity(BLUE, address(1), WORKLOAD | 1)
        datapath.plug(wired, Difference((identity,), ()))
        assert datapath.converge(base_state(1) | {wired.port}).repaired == ()
