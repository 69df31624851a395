"""A segment by frames: what a port may say, who hears questions, and that nothing passes unjudged (R9, bridge.md)."""

from __future__ import annotations

import socket
import struct
import subprocess

import msgspec
import pytest
from tests.support.ethernet import (
    ARP,
    BROADCAST,
    IPV4,
    REPLY,
    VLAN,
    arp,
    datagram,
    frame,
    hears,
    is_arp,
    is_from,
    wire_of,
)
from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed

from weft.adapters.netns.nft.bridge_filter import BRIDGE_SYSCTLS
from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Gateway
from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP, UDP
from weft.lab.traffic import QUIET_S
from weft.lab.waiting import DEADLINE


@pytest.fixture
def fwdmode() -> str:
    return "bridge"


def mac_of_neighbour(pod: Pod, address: Address) -> str:
    """The MAC that a pod has found for an address."""
    command = ["ip", "neigh", "show", str(address)]
    done = pod.namespace.run(
        lambda: subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE)
    )
    found = done.stdout.split()
    return found[found.index("lladdr") + 1] if "lladdr" in found else ""


@pytest.mark.parametrize("family", [4, 6])
def test_the_node_answers_and_nobody_else_is_asked(ward: PolicyTestbed, family: int) -> None:
    """R9, W40: the real MAC of who is asked for comes without a process of ours; a third pod hears nothing of it."""
    one, two, three = (ward.pod(number) for number in (1, 2, 3))
    with wire_of(three.namespace) as ear:
        assert ward.ask(one, two, UDP, 53, family=family) == 0
        assert mac_of_neighbour(one, two.address(family)) == two.wiring.port.mac
        assert not hears(ear, is_from(one.wiring.port.mac))


def test_questions_are_flooded_where_the_cluster_says_so(ward: PolicyTestbed) -> None:
    """N9, R9: changed under pods that stay, and back."""
    one, two, three = (ward.pod(number) for number in (1, 2, 3))
    quiet = ward.segment
    assert quiet is not None
    loud = msgspec.structs.replace(quiet, floods=True)
    for before, after, number in ((quiet, loud, 4), (loud, quiet, 5)):
        ward.datapath.apply(Difference((after,), (before,)))
        late = ward.pod(number)
        with wire_of(three.namespace) as ear:
            assert ward.ask(late, two, UDP, 53) == 0
            assert hears(ear, is_arp) is after.floods
        assert ward.ask(one, late, TCP, 80) == 0


def test_a_pod_speaks_of_no_address_but_its_own(ward: PolicyTestbed) -> None:
    """ARP of another address or MAC reaches nobody, not even where all is flooded; that of its own does."""
    one, two, three = (ward.pod(number) for number in (1, 2, 3))
    segment = ward.segment
    assert segment is not None
    ward.datapath.apply(Difference((msgspec.structs.replace(segment, floods=True),), (segment,)))
    own, its = (one.wiring.port.mac, one.address(4)), (two.wiring.port.mac, two.address(4))
    with wire_of(one.namespace) as mouth, wire_of(two.namespace, ARP) as ear:
        for claimed, mac in (((own[0], three.address(4)), own[0]), (("02:00:00:00:00:66", own[1]), own[0])):
            for target in (its[0], BROADCAST):
                mouth.send(frame(target, mac, ARP, arp(REPLY, sender=claimed, target=its)))
        mouth.send(frame(its[0], "02:00:00:00:00:66", ARP, arp(REPLY, sender=own, target=its)))
        assert not hears(ear, is_arp)
        mouth.send(frame(its[0], own[0], ARP, arp(REPLY, sender=own, target=its)))
        assert hears(ear, is_arp, within=DEADLINE)


def test_what_is_not_plain_ip_passes_no_segment(ward: PolicyTestbed) -> None:
    """Frames with VLAN tags would pass by the judge; others have none at all."""
    one, two = ward.pod(1), ward.pod(2)
    mac, its = one.wiring.port.mac, two.wiring.port.mac
    packet = datagram(one.address(4), two.address(4))
    with wire_of(one.namespace) as mouth, wire_of(two.namespace) as ear:
        for target in (its, BROADCAST, "01:00:5e:00:00:fb"):
            mouth.send(frame(target, mac, VLAN, struct.pack(">HH", 5, IPV4) + packet))
            mouth.send(frame(target, mac, 0x88CC, b"lldp"))
        mouth.send(frame(BROADCAST, mac, IPV4, packet))
        assert not hears(ear, is_from(mac))


@pytest.mark.parametrize("family", [4, 6])
def test_a_segment_whose_packets_nobody_judges_is_silent(ward: PolicyTestbed, family: int) -> None:
    """When somebody tells the kernel not to show what passes bridges; a round mends it."""
    one, two = ward.pod(1), ward.pod(2)
    assert ward.ask(one, two, UDP, 53, family=family) == 0
    ward.space.namespace.write_sysctls(dict.fromkeys(list(BRIDGE_SYSCTLS)[:2], "0"))
    where = (str(two.address(family)), 54)
    with (
        one.open_socket(family, socket.SOCK_DGRAM) as mouth,
        two.open_socket(family, socket.SOCK_DGRAM, port=54) as ear,
    ):
        ear.settimeout(QUIET_S)
        mouth.sendto(b"unjudged", where)
        with pytest.raises(TimeoutError):
            ear.recv(100)
    assert any("bridge-nf" in fault for survey in ward.datapath.survey() for fault in survey.faults)
    ward.datapath.converge(ward.parts([one, two]))
    assert ward.ask(one, two, UDP, 53, family=family) == 0


@pytest.mark.parametrize(("family", "protocol"), [(4, ICMP), (6, ICMPV6)])
def test_a_pod_that_is_not_known_is_not_heard(ward: PolicyTestbed, family: int, protocol: int) -> None:
    """Ports are born closed, on segments too."""
    one, two = ward.pod(1), ward.pod(2, ready=False)
    assert ward.ask(one, two, protocol, family=family) == "weft/not-ready"


def test_only_the_segments_own_gateway_answers(ward: PolicyTestbed) -> None:
    """Nobody routes between networks, and no gateway answers for another one."""
    one = ward.pod(1)
    near, far = Address(4, 0x0A0000FE), Address(4, 0x0A0000FD)
    segment = ward.segment
    assert segment is not None
    other = msgspec.structs.replace(segment, number=8)
    ward.datapath.apply(Difference((other, Gateway(TENANT, near, 7), Gateway(TENANT, far, 8)), ()))

    def answers(address: Address) -> bool:
        with one.open_socket(4, socket.SOCK_RAW, ICMP) as asking:
            asking.settimeout(QUIET_S)
            asking.sendto(struct.pack(">BBHHH", 8, 0, 0xF7FD, 1, 1), (str(address), 0))
            try:
                return asking.recv(100)[20] == 0
            except TimeoutError:
                return False

    assert answers(near)
    assert not answers(far)
    assert ward.wait_for_drop(one.address(4)).reason == "weft/other-network"


def test_a_process_with_no_memory_finds_nothing_to_mend(ward: PolicyTestbed) -> None:
    """And what somebody took apart is put together again, without the pods' doing."""
    one, two = ward.pod(1), ward.pod(2)
    wanted = ward.parts([one, two])
    ward.restart()
    assert ward.datapath.converge(wanted).repaired == ()
    assert ward.ask(one, two, TCP, 80) == 0
    for command in ("ip link set wp1 nomaster", "bridge fdb del 02:02:0a:00:00:02 dev wp2 master", "nft flush ruleset"):
        ward.space.namespace.run(lambda: subprocess.run(command.split(), check=True, timeout=DEADLINE))  # noqa: B023
        assert ward.datapath.converge(wanted).repaired
        assert ward.datapath.converge(wanted).repaired == ()
        for family in (4, 6):
            assert ward.ask(one, two, UDP, 53, family=family) == 0
