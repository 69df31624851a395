"""Policy by interface and identity kind, and how drops are logged and counted."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.policy_testbed import TENANT, PolicyTestbed, policy_entry

from weft.adapters.netns.devices import POLICY_DEFERRED_HOP_LIMIT
from weft.domain.addresses import Address, Range, parse_address
from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, VERDICT_DENY, CidrIdentity, IpIdentity
from weft.kernel.netns import Namespace
from weft.lab.waiting import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import MakeNetns

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT = 8080
UNKNOWN = UNKNOWN_IDENTITY | 0x77
FAR = {4: "10.0.1.1", 6: "fd00:1::1"}
_IP_RECVTTL = 12  # `include/uapi/linux/in.h`
NEAR_MAC, FAR_MAC = "02:77:00:00:00:01", "02:77:00:00:00:02"


def run(namespace: Namespace, *commands: str) -> None:
    def carry_out() -> None:
        for command in commands:
            subprocess.run(command.split(), check=True, timeout=DEADLINE)

    namespace.run(carry_out)


def add_address(namespace: Namespace, address: str, *, device: str, family: int) -> None:
    """Add an address that receives packets at once."""
    run(namespace, f"ip -{family} addr add {address} dev {device}" + (" nodad" if family == 6 else ""))
    if family == 6:  # the kernel adds this route itself, but asynchronously
        run(namespace, f"ip -6 route replace local {address} dev {device} table local")


class Beyond:
    """Another node behind a device that is named like an overlay device, with an address of each family."""

    def __init__(self, testbed: PolicyTestbed, far: Namespace) -> None:
        self.namespace = far
        near = testbed.netns.namespace
        run(near, f"ip link add wx9 address {NEAR_MAC} type veth peer name far address {FAR_MAC}")
        near.run(
            lambda: subprocess.run(
                ["ip", "link", "set", "far", "netns", f"/proc/self/fd/{far.fd}"], pass_fds=[far.fd], check=True
            )
        )
        run(near, "ip link set wx9 up")
        run(far, "ip link set lo up", "ip link set far up")
        for family, hop in ((4, "169.254.9.1"), (6, "fe80::9")):
            length = 32 if family == 4 else 128
            run(
                near,
                f"ip -{family} neigh add {FAR[family]} dev wx9 lladdr {FAR_MAC} nud permanent",
                f"ip -{family} route add {FAR[family]}/{length} dev wx9",
            )
            add_address(far, FAR[family], device="far", family=family)
            run(
                far,
                f"ip -{family} neigh add {hop} dev far lladdr {NEAR_MAC} nud permanent",
                f"ip -{family} route add default via {hop} dev far onlink",
            )

    def address(self, family: int) -> Address:
        return parse_address(FAR[family], field="far")

    def open_socket(self, family: int, *, port: int = 0) -> socket.socket:
        opened = self.namespace.open_socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        opened.setblocking(False)
        opened.bind((FAR[family], port))
        return opened


@pytest.fixture
def beyond(testbed: PolicyTestbed, make_netns: MakeNetns) -> Beyond:
    return Beyond(testbed, make_netns("beyond").namespace)


def unknown_identities(family: int) -> CidrIdentity:
    number = parse_address(FAR[family], field="far").number
    return CidrIdentity(TENANT, Range(family, number - 1, number + 100), UNKNOWN)


@pytest.mark.parametrize("family", [4, 6])
def test_a_port_is_closed_until_its_identity_is_known(testbed: PolicyTestbed, family: int) -> None:
    """CVEs about start-up races: no packet enters before the port has its policy."""
    one, two = testbed.pod(1), testbed.pod(2, ready=False)
    assert testbed.probe(one, two, UDP, PORT, family=family) == "weft/endpoint-not-ready"
    testbed.put(*two.ip_identities())
    assert testbed.probe(one, two, UDP, PORT, family=family) == 0


def test_the_first_packet_to_a_new_port_arrives(testbed: PolicyTestbed) -> None:
    """Sent once and at once: the port is open for everything as soon as `plug` returns."""
    one = testbed.pod(1)
    results = [testbed.probe(one, testbed.pod(number), UDP, PORT) for number in range(2, 42)]
    assert results == [0] * 40


@pytest.mark.parametrize("family", [4, 6])
def test_policy_for_an_unknown_destination_is_deferred_to_its_node(
    testbed: PolicyTestbed, beyond: Beyond, family: int
) -> None:
    """It is forwarded unevaluated, packet by packet, whatever the sender's rules; replies pass too."""
    one = testbed.pod(1)
    testbed.put(unknown_identities(family), policy_entry(Direction.EGRESS, one, None, DENY))
    with beyond.open_socket(family, port=PORT) as far, one.open_socket(family, socket.SOCK_DGRAM) as caller:
        report_hop_limit(far, family)
        for _ in range(3):
            caller.sendto(b"?", far.getsockname()[:2])
            assert select.select([far], [], [], DEADLINE)[0]
            assert hops_of(far) == POLICY_DEFERRED_HOP_LIMIT
        far.sendto(b"!", caller.getsockname()[:2])
        assert testbed.packet_result(caller, beyond.address(family)) == 0


@pytest.mark.parametrize("family", [4, 6])
def test_a_deferred_packet_is_evaluated_here_or_dropped(testbed: PolicyTestbed, beyond: Beyond, family: int) -> None:
    """From an unknown identity it is dropped: neither node knows both ends."""
    one = testbed.pod(1)
    testbed.put(unknown_identities(family), policy_entry(Direction.INGRESS, one, None, DENY))
    with beyond.open_socket(family) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as listener:
        set_hops(far, family, POLICY_DEFERRED_HOP_LIMIT)
        far.sendto(b"?", listener.getsockname()[:2])
        assert testbed.packet_result(listener, beyond.address(family)) == "weft/unknown-identity"
        friend = IpIdentity(TENANT, beyond.address(family), 0x88)
        testbed.put(friend)
        far.sendto(b"?", listener.getsockname()[:2])
        assert testbed.packet_result(listener, beyond.address(family)) == DENY
        testbed.put(policy_entry(Direction.INGRESS, one, 0x88, ALLOW))
        far.sendto(b"?", listener.getsockname()[:2])
        assert testbed.packet_result(listener, beyond.address(family)) == 0
        testbed.drop(friend)
        set_hops(far, family, POLICY_DEFERRED_HOP_LIMIT - 1)  # the highest TTL of a workload's packet after its node
        far.sendto(b"?", listener.getsockname()[:2])
        assert testbed.packet_result(listener, beyond.address(family)) == 0


def report_hop_limit(listener: socket.socket, family: int) -> None:
    """Have the socket report the TTL of received datagrams."""
    if family == 4:
        listener.setsockopt(socket.IPPROTO_IP, _IP_RECVTTL, 1)
    else:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)


def hops_of(listener: socket.socket) -> int:
    """The TTL of the next datagram."""
    _, [(_, _, hops)], _, _ = listener.recvmsg(64, socket.CMSG_SPACE(4))
    return int.from_bytes(hops, sys.byteorder)


def set_hops(sender: socket.socket, family: int, hops: int) -> None:
    if family == 4:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
    else:
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)


@pytest.mark.parametrize("family", [4, 6])
def test_H1_an_unknown_source_passes_only_without_ingress_rules(
    testbed: PolicyTestbed, beyond: Beyond, family: int
) -> None:
    """Its own node has evaluated egress. Ingress rules apply to it: it may be the source of nobody."""
    one, two, free = testbed.pod(1), testbed.pod(2, ready=False), testbed.pod(3)
    testbed.put(unknown_identities(family), policy_entry(Direction.INGRESS, one, None, DENY))
    with beyond.open_socket(family) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as listener:
        far.sendto(b"?", listener.getsockname()[:2])
        assert testbed.packet_result(listener, beyond.address(family)) == DENY
        with free.open_socket(family, socket.SOCK_DGRAM, port=PORT) as open_listener:
            far.sendto(b"?", open_listener.getsockname()[:2])
            assert testbed.packet_result(open_listener, beyond.address(family)) == 0
            open_listener.sendto(b"!", far.getsockname()[:2])
            assert testbed.packet_result(far, free.address(family)) == 0
        with two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as closed:
            far.sendto(b"?", closed.getsockname()[:2])
            assert testbed.packet_result(closed, beyond.address(family)) == "weft/endpoint-not-ready"


@pytest.mark.parametrize("family", [4, 6])
def test_ranges_apply_to_addresses_without_identity(testbed: PolicyTestbed, beyond: Beyond, family: int) -> None:
    one = testbed.pod(1)
    number = beyond.address(family).number
    world = 0x99
    testbed.put(
        CidrIdentity(TENANT, Range(family, number, number), world),
        CidrIdentity(TENANT, Range(family, number + 1, number + 5), world + 1),
        policy_entry(Direction.EGRESS, one, None, ALLOW),
        policy_entry(Direction.EGRESS, one, world, DENY, protocol=UDP),
        policy_entry(Direction.INGRESS, one, None, ALLOW),
        policy_entry(Direction.INGRESS, one, world, VERDICT_DENY | 5, protocol=UDP),
    )
    with beyond.open_socket(family, port=PORT) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as near:
        near.sendto(b"?", far.getsockname()[:2])
        assert testbed.packet_result(far, one.address(family)) == DENY
        far.sendto(b"?", near.getsockname()[:2])
        assert testbed.packet_result(near, beyond.address(family)) == VERDICT_DENY | 5
        testbed.drop(CidrIdentity(TENANT, Range(family, number, number), world))
        near.sendto(b"?", far.getsockname()[:2])
        assert testbed.packet_result(far, one.address(family)) == 0


def test_nothing_passes_from_overlay_to_overlay(testbed: PolicyTestbed, beyond: Beyond) -> None:
    run(testbed.netns.namespace, "ip route add 10.0.2.0/24 dev wx9")
    with beyond.open_socket(4) as far:
        far.sendto(b"?", ("10.0.2.9", PORT))
        assert testbed.wait_for_drop(beyond.address(4)).reason == "weft/overlay-transit"


@pytest.mark.parametrize("family", [4, 6])
def test_spoofed_sources_are_dropped(testbed: PolicyTestbed, family: int) -> None:
    """CVEs about spoofing: neither with the address of another pod nor with an unused one."""
    one, two = testbed.pod(1), testbed.pod(2)
    forged = parse_address("10.0.0.9" if family == 4 else "fd00::9", field="forged")
    for address in (forged, two.address(family)):
        run(one.namespace, f"ip -{family} addr add {address} dev eth0")
        caller = one.namespace.open_socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        with caller:
            if family == 6:
                caller.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND: any source address
            caller.bind((str(address), 0))
            caller.sendto(b"?", ("10.0.0.3" if family == 4 else "fd00::3", PORT))
            drop = testbed.wait_for_drop(address)
            assert (drop.reason, drop.verdict_id, drop.in_iface) == ("weft/spoofed", 0, "wp1")
    assert testbed.count("weft/spoofed") == 2


def test_router_advertisements_of_pods_are_dropped(testbed: PolicyTestbed) -> None:
    """CVE-2020-10749: a pod that announces itself as the default router."""
    one = testbed.pod(1)
    testbed.pod(2)
    with one.open_socket(6, socket.SOCK_RAW, ICMPV6) as caller:
        caller.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        caller.sendto(struct.pack(">BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0), ("fd00::2", 0))
        drop = testbed.wait_for_drop(one.address(6))
    assert (drop.reason, drop.protocol, drop.target) == ("weft/rogue-ra", ICMPV6, parse_address("fd00::2", field="pod"))
    assert testbed.count("weft/rogue-ra") == 1


def test_invalid_packets_are_dropped(testbed: PolicyTestbed) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    with one.open_socket(4, socket.SOCK_RAW, ICMP) as caller:
        caller.sendto(struct.pack(">BBHHH", 0, 0, 0xFFFD, 1, 1), (str(two.address(4)), 0))  # a reply without a request
        assert testbed.wait_for_drop(one.address(4)).reason == "weft/invalid"


@pytest.mark.parametrize(("family", "control"), [(4, ICMP), (6, ICMPV6)])
def test_packets_to_the_node_obey_egress_policy(testbed: PolicyTestbed, family: int, control: int) -> None:
    one = testbed.pod(1)
    gateway = "10.0.0.254" if family == 4 else "fd00::fe"
    add_address(testbed.netns.namespace, gateway, device="lo", family=family)
    with testbed.netns.namespace.open_socket(
        socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM
    ) as listener:
        listener.bind((gateway, PORT))
        with one.open_socket(family, socket.SOCK_DGRAM) as caller:
            caller.sendto(b"?", (gateway, PORT))
            assert testbed.packet_result(listener, one.address(family)) == 0
            listener.recv(1)
            listener.sendto(b"!", caller.getsockname()[:2])
            assert testbed.packet_result(caller, parse_address(gateway, field="gateway")) == 0
            caller.recv(1)
            testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
            caller.sendto(b"?", (gateway, PORT))
            assert testbed.packet_result(listener, one.address(family)) == DENY


def test_a_drop_has_all_fields(testbed: PolicyTestbed) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.INGRESS, two, one, DENY), policy_entry(Direction.INGRESS, two, None, ALLOW))
    before = time.time()
    for family in (4, 6):
        for protocol, kind in ((TCP, socket.SOCK_STREAM), (UDP, socket.SOCK_DGRAM)):
            with one.open_socket(family, kind, port=1234) as caller:
                caller.connect_ex((str(two.address(family)), PORT))
                if kind == socket.SOCK_DGRAM:
                    caller.send(b"?")
                drop = testbed.wait_for_drop()
            assert (drop.tenant, drop.verdict_id, drop.reason) == (TENANT, DENY, "")
            assert (drop.source, drop.target) == (one.address(family), two.address(family))
            assert (drop.protocol, drop.source_port, drop.target_port) == (protocol, 1234, PORT)
            assert (drop.in_iface, drop.out_iface) == ("wp1", "wp2")
            assert before - 1 <= drop.at <= time.time() + 1


def test_a_flood_is_counted_in_full_and_logged_in_samples(testbed: PolicyTestbed) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
    with one.open_socket(4, socket.SOCK_DGRAM) as caller:
        for _ in range(3000):
            caller.sendto(b"?", (str(two.address(4)), PORT))
    testbed.wait_for_drop(one.address(4))
    deadline = time.monotonic() + DEADLINE
    while testbed.count(DENY) < 3000 and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert testbed.count(DENY) == 3000
    drops_seen = 1 + len(testbed.drops_seen)
    while more := testbed.datapath.drops():
        drops_seen += len(more)
    assert 1 < drops_seen < 3000


def test_one_process_at_a_time_reads_drops(testbed: PolicyTestbed) -> None:
    """A restarted agent reads them too."""
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
    testbed.restart()
    assert testbed.probe(one, two, UDP, PORT) == DENY
