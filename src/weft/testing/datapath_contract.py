"""What every datapath must do, as tests (`weft.ports.datapath`).

A suite for one datapath subclasses `DatapathContract` and gives the fixture `settings`, with which a datapath is opened
as often as it is asked for: each time by a process with no memory. The tests are in namespaces of their own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support.inventory import devices

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
_CHANGES = 10


def address(number: int) -> Address:
    """That of a workload."""
    return Address(4, _SUBNET.number + number)


def ground(*workloads: int) -> frozenset[StateItem]:
    """A tenant with a network and another node, and who some workloads are to policy."""
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


def wiring(pods: NamespaceDirectory, number: int) -> EndpointConfig:
    """A workload's; its namespace is the caller's business."""
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


def wire(datapath: Datapath, pods: NamespaceDirectory, *numbers: int) -> list[EndpointConfig]:
    """Workloads in namespaces of their own, plugged one after the other."""
    wirings = [wiring(pods, number) for number in numbers]
    for number, each in zip(numbers, wirings, strict=True):
        pods.create(f"pod{number}").close()
        datapath.plug(each)
    return wirings


def _refused(datapath: Datapath) -> int:
    """How many packets policy has refused so far."""
    counts = (counters.outcomes.items() for counters in datapath.counters())
    return sum(count for each in counts for outcome, count in each if outcome & VERDICT_DENY)


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

    def test_what_is_so_already_is_left_alone(self, datapath: Datapath) -> None:
        assert datapath.converge(ground()).repaired
        assert datapath.converge(ground()).repaired == ()
        assert not datapath.has_drifted()
        assert [space.tenant for space in datapath.survey()] == [BLUE]

    def test_one_with_no_memory_finds_all_of_it(
        self, datapath: Datapath, pods: NamespaceDirectory, settings: DatapathSettings
    ) -> None:
        datapath.converge(ground(1))
        (wired,) = wire(datapath, pods, 1)
        with open_datapath(settings) as other:
            assert other.converge(ground(1) | {wired.port}).repaired == ()
            assert other.check(wired) == []
            assert other.converge(frozenset()).repaired
            assert other.converge(frozenset()).repaired == ()
            assert other.survey() == []

    def test_ports_that_are_wanted_and_not_there_are_told(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        port = wiring(pods, 1).port
        assert datapath.converge(ground(1) | {port}).missing == {port}

    def test_ports_that_nobody_wants_go(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(ground(1, 2))
        first, second = wire(datapath, pods, 1, 2)
        assert datapath.converge(ground(1) | {first.port}).repaired
        assert datapath.check(first) == []
        assert datapath.check(second)
        assert datapath.converge(ground(1) | {first.port}).repaired == ()

    # Differences

    def test_what_is_applied_step_by_step_is_what_is_wanted(self, datapath: Datapath) -> None:
        """There is nothing to mend after it, nor when it is told twice."""
        steps = [frozenset[StateItem](), ground(), ground(1, 2), ground(2), ground()]
        for before, after in itertools.pairwise(steps):
            for _ in range(2):
                datapath.apply(diff(after, before, rank=rank))
            assert datapath.converge(after).repaired == ()
        datapath.apply(diff(frozenset(), ground(), rank=rank))
        assert datapath.survey() == []

    async def test_what_has_settled_holds_for_the_next_packet(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        """Of a connection that was let pass before: a switch remembers what it did with its packets."""
        datapath.converge(ground(1, 2))
        wire(datapath, pods, 1, 2)
        outcome = VERDICT_DENY | 1
        closed = PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 2, None, outcome)
        datapath.apply(Difference((VerdictCounter(BLUE, outcome),), ()))
        loop = asyncio.get_running_loop()
        with ExitStack() as closing:
            source, target = (
                traffic.Place(closing.enter_context(pods.open(f"pod{number}")), ip_address(str(address(number))))
                for number in (1, 2)
            )
            there = (str(target.address), 80)
            mouth = closing.enter_context(source.open_caller(traffic.UDP))
            ear = closing.enter_context(target.listening(80, traffic.UDP))
            for number in range(_CHANGES):
                await loop.sock_sendto(mouth, b"open", there)
                assert await soon(loop.sock_recv(ear, 64)) == b"open"
                datapath.apply(Difference((closed,), ()))
                datapath.settle()
                await loop.sock_sendto(mouth, b"closed", there)
                await until(lambda: _refused(datapath) > number)  # noqa: B023
                datapath.apply(Difference((), (closed,)))
                datapath.settle()

    async def test_a_packet_that_is_refused_before_anybody_asked_is_told(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        datapath.converge(ground(1, 2))
        wire(datapath, pods, 1, 2)
        outcome = VERDICT_DENY | 1
        datapath.apply(
            Difference(
                (PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 2, None, outcome), VerdictCounter(BLUE, outcome)), ()
            )
        )
        with pods.open("pod1") as namespace:
            source = traffic.Place(namespace, ip_address(str(address(1))))
            with source.open_caller(traffic.UDP) as mouth:
                mouth.sendto(b"refused", (str(address(2)), 80))
        told: list[Drop] = []

        def is_told() -> bool:
            told.extend(drop for drop in datapath.drops() if drop.outcome == outcome)
            return bool(told)

        await until(is_told)
        assert (told[0].source, told[0].target) == (address(1), address(2))

    # Workloads

    async def test_workloads_are_whole_once_they_are_plugged(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        datapath.converge(ground(1, 2))
        wirings = wire(datapath, pods, 1, 2)
        assert [datapath.check(each) for each in wirings] == [[], []]
        assert datapath.converge(ground(1, 2) | {each.port for each in wirings}).repaired == ()
        with pods.open("pod1") as first, pods.open("pod2") as second:
            places = [
                traffic.Place(namespace, ip_address(str(each.addresses[0].address)))
                for namespace, each in zip((first, second), wirings, strict=True)
            ]
            assert await traffic.reaches(*places, port=80)

    def test_who_is_taken_off_is_gone_at_once(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        """The name of its interface too, and twice is as good as once; the next one may have both at once."""
        datapath.converge(ground(1))
        (wired,) = wire(datapath, pods, 1)
        for _ in range(2):
            datapath.unplug(wired)
            assert "eth0" not in devices(Path(wired.netns))
            assert datapath.check(wired)
        datapath.plug(wired)
        datapath.reap()
        assert datapath.check(wired) == []
        assert datapath.converge(ground(1) | {wired.port}).repaired == ()

    def test_what_cannot_be_had_is_refused_and_changes_nothing(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        datapath.converge(ground(1, 2))
        (wired,) = wire(datapath, pods, 1)
        with pytest.raises(Conflict):
            datapath.plug(wired)
        with pytest.raises(NotFound):
            datapath.plug(wiring(pods, 2))
        assert datapath.check(wired) == []
        assert datapath.converge(ground(1, 2) | {wired.port}).repaired == ()

    def test_of_workloads_that_come_at_once_each_fails_for_itself(
        self, datapath: Datapath, pods: NamespaceDirectory
    ) -> None:
        datapath.converge(ground(1, 2, 3))
        wirings = [wiring(pods, number) for number in (1, 2, 3)]
        for number in (1, 3):
            pods.create(f"pod{number}").close()
        faults = [*datapath.plug_together([*map(PlugRequest, wirings)])]
        assert [type(fault) for fault in faults] == [type(None), NotFound, type(None)]
        wanted = ground(1, 2, 3) | {wirings[0].port, wirings[2].port}
        assert datapath.converge(wanted).repaired == ()

    def test_policy_comes_with_a_workload(self, datapath: Datapath, pods: NamespaceDirectory) -> None:
        datapath.converge(ground())
        pods.create("pod1").close()
        wired, who = wiring(pods, 1), IpIdentity(BLUE, address(1), WORKLOAD | 1)
        datapath.plug(wired, Difference((who,), ()))
        assert datapath.converge(ground(1) | {wired.port}).repaired == ()
