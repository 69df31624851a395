"""Bridge mode, checked with frames: anti-spoofing, ARP and ND, and policy for every packet (R9, bridge.md)."""

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
    is_arp,
    is_from,
    open_packet_socket,
    receives,
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
    """The MAC that a pod has resolved for an address."""
    command = ["ip", "neigh", "show", str(address)]
    done = pod.namespace.run(
        lambda: subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE)
    )
    found = done.stdout.split()
    return found[found.index("lladdr") + 1] if "lladdr" in found else ""


@pytest.mark.parametrize("family", [4, 6])
def test_proxy_mode_answers_without_asking_others(testbed: PolicyTestbed, family: int) -> None:
    """R9, W40: the kernel answers with the real MAC; a third pod sees no request."""
    one, two, three = (testbed.pod(number) for number in (1, 2, 3))
    with open_packet_socket(three.namespace) as listener:
        assert testbed.probe(one, two, UDP, 53, family=family) == 0
        assert mac_of_neighbour(one, two.address(family)) == two.config.port.mac
        assert not receives(listener, is_from(one.config.port.mac))


def test_flood_mode_floods_arp(testbed: PolicyTestbed) -> None:
    """N9, R9: changed with running pods, and back."""
    one, two, three = (testbed.pod(number) for number in (1, 2, 3))
    quiet = testbed.segment
    assert quiet is not None
    loud = msgspec.structs.replace(quiet, floods=True)
    for before, after, number in ((quiet, loud, 4), (loud, quiet, 5)):
        testbed.datapath.apply(Difference((after,), (before,)))
        late = testbed.pod(number)
        with open_packet_socket(three.namespace) as listener:
            assert testbed.probe(late, two, UDP, 53) == 0
            assert receives(listener, is_arp) is after.floods
        assert testbed.probe(one, late, TCP, 80) == 0


def test_arp_and_nd_only_about_own_addresses(testbed: PolicyTestbed) -> None:
    """ARP with another address or MAC is dropped, also in flood mode; with its own it passes."""
    one, two, three = (testbed.pod(number) for number in (1, 2, 3))
    segment = testbed.segment
    assert segment is not None
    testbed.datapath.apply(Difference((msgspec.structs.replace(segment, floods=True),), (segment,)))
    own, its = (one.config.port.mac, one.address(4)), (two.config.port.mac, two.address(4))
    with open_packet_socket(one.namespace) as sender, open_packet_socket(two.namespace, ARP) as listener:
        for claimed, mac in (((own[0], three.address(4)), own[0]), (("02:00:00:00:00:66", own[1]), own[0])):
            for target in (its[0], BROADCAST):
                sender.send(frame(target, mac, ARP, arp(REPLY, sender=claimed, target=its)))
        sender.send(frame(its[0], "02:00:00:00:00:66", ARP, arp(REPLY, sender=own, target=its)))
        assert not receives(listener, is_arp)
        sender.send(frame(its[0], own[0], ARP, arp(REPLY, sender=own, target=its)))
        assert receives(listener, is_arp, within=DEADLINE)


def test_only_ip_and_arp_pass_a_bridge(testbed: PolicyTestbed) -> None:
    """Policy does not see frames with VLAN tags; other protocols have no policy at all."""
    one, two = testbed.pod(1), testbed.pod(2)
    mac, its = one.config.port.mac, two.config.port.mac
    packet = datagram(one.address(4), two.address(4))
    with open_packet_socket(one.namespace) as sender, open_packet_socket(two.namespace) as listener:
        for target in (its, BROADCAST, "01:00:5e:00:00:fb"):
            sender.send(frame(target, mac, VLAN, struct.pack(">HH", 5, IPV4) + packet))
            sender.send(frame(target, mac, 0x88CC, b"lldp"))
        sender.send(frame(BROADCAST, mac, IPV4, packet))
        assert not receives(listener, is_from(mac))


@pytest.mark.parametrize("family", [4, 6])
def test_without_br_netfilter_a_segment_fails_closed(testbed: PolicyTestbed, family: int) -> None:
    """Another process turns br_netfilter off; `converge` repairs it."""
    one, two = testbed.pod(1), testbed.pod(2)
    assert testbed.probe(one, two, UDP, 53, family=family) == 0
    testbed.netns.namespace.write_sysctls(dict.fromkeys(list(BRIDGE_SYSCTLS)[:2], "0"))
    where = (str(two.address(family)), 54)
    with (
        one.open_socket(family, socket.SOCK_DGRAM) as sender,
        two.open_socket(family, socket.SOCK_DGRAM, port=54) as listener,
    ):
        listener.settimeout(QUIET_S)
        sender.sendto(b"unevaluated", where)
        with pytest.raises(TimeoutError):
            listener.recv(100)
    assert any("bridge-nf" in fault for inspect in testbed.datapath.inspect() for fault in inspect.faults)
    testbed.datapath.converge(testbed.items([one, two]))
    assert testbed.probe(one, two, UDP, 53, family=family) == 0


@pytest.mark.parametrize(("family", "protocol"), [(4, ICMP), (6, ICMPV6)])
def test_a_pod_without_identity_cannot_send(testbed: PolicyTestbed, family: int, protocol: int) -> None:
    """New ports are closed, in bridge mode too."""
    one, two = testbed.pod(1), testbed.pod(2, ready=False)
    assert testbed.probe(one, two, protocol, family=family) == "weft/endpoint-not-ready"


def test_only_the_gateway_of_the_own_network_answers(testbed: PolicyTestbed) -> None:
    """Networks are not routed, and no gateway answers for another one."""
    one = testbed.pod(1)
    near, far = Address(4, 0x0A0000FE), Address(4, 0x0A0000FD)
    segment = testbed.segment
    assert segment is not None
    other = msgspec.structs.replace(segment, number=8)
    testbed.datapath.apply(Difference((other, Gateway(TENANT, near, 7), Gateway(TENANT, far, 8)), ()))

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
    assert testbed.wait_for_drop(one.address(4)).reason == "weft/cross-network"


def test_a_restart_finds_no_drift(testbed: PolicyTestbed) -> None:
    """And drift is repaired without a change to the pods."""
    one, two = testbed.pod(1), testbed.pod(2)
    wanted = testbed.items([one, two])
    testbed.restart()
    assert testbed.datapath.converge(wanted).repaired == ()
    assert testbed.probe(one, two, TCP, 80) == 0
    for command in ("ip link set wp1 nomaster", "bridge fdb del 02:02:0a:00:00:02 dev wp2 master", "nft flush ruleset"):
        testbed.netns.namespace.run(lambda: subprocess.run(command.split(), check=True, timeout=DEADLINE))  # noqa: B023
        assert testbed.datapath.converge(wanted).repaired
        assert testbed.datapath.converge(wanted).repaired == ()
        for family in (4, 6):
            assert testbed.probe(one, two, UDP, 53, family=family) == 0
