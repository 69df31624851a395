"""What is decided by where a packet comes from and goes to, and how every refusal is told and counted."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.policy_testbed import TENANT, PolicyTestbed, row

from weft.adapters.netns.nft.policy_chains import UNJUDGED
from weft.domain.addresses import Address, Range, parse_address
from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, VERDICT_DENY, CidrIdentity, IpIdentity
from weft.kernel.netns import Namespace
from weft.lab.waiting import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import MakeSpace

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


def give_address(namespace: Namespace, address: str, *, device: str, family: int) -> None:
    """Packets to it are taken in at once."""
    run(namespace, f"ip -{family} addr add {address} dev {device}" + (" nodad" if family == 6 else ""))
    if family == 6:  # the kernel makes this route by itself, but a moment later
        run(namespace, f"ip -6 route replace local {address} dev {device} table local")


class Beyond:
    """Another node: what is reached through a device named like an overlay, with an address of each family."""

    def __init__(self, ward: PolicyTestbed, far: Namespace) -> None:
        self.namespace = far
        near = ward.space.namespace
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
            give_address(far, FAR[family], device="far", family=family)
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
def beyond(ward: PolicyTestbed, make_space: MakeSpace) -> Beyond:
    return Beyond(ward, make_space("beyond").namespace)


def strangers(family: int) -> CidrIdentity:
    number = parse_address(FAR[family], field="far").number
    return CidrIdentity(TENANT, Range(family, number - 1, number + 100), UNKNOWN)


@pytest.mark.parametrize("family", [4, 6])
def test_a_port_is_born_closed_and_opens_when_it_is_known_who_is_there(ward: PolicyTestbed, family: int) -> None:
    """CVE rows about start windows: nothing comes in before the port has its policy."""
    one, two = ward.pod(1), ward.pod(2, ready=False)
    assert ward.ask(one, two, UDP, PORT, family=family) == "weft/not-ready"
    ward.put(*two.who())
    assert ward.ask(one, two, UDP, PORT, family=family) == 0


def test_the_first_packet_to_a_new_port_arrives(ward: PolicyTestbed) -> None:
    """Sent once and at once: the port is open for everything as soon as `plug` returns."""
    one = ward.pod(1)
    fates = [ward.ask(one, ward.pod(number), UDP, PORT) for number in range(2, 42)]
    assert fates == [0] * 40


@pytest.mark.parametrize("family", [4, 6])
def test_what_is_said_to_a_stranger_beyond_the_overlay_is_left_to_its_node(
    ward: PolicyTestbed, beyond: Beyond, family: int
) -> None:
    """It goes on as not judged, packet by packet, whatever the sender's rules say; answers come by the same right."""
    one = ward.pod(1)
    ward.put(strangers(family), row(Direction.EGRESS, one, None, DENY))
    with beyond.open_socket(family, port=PORT) as far, one.open_socket(family, socket.SOCK_DGRAM) as caller:
        tell_hops(far, family)
        for _ in range(3):
            caller.sendto(b"?", far.getsockname()[:2])
            assert select.select([far], [], [], DEADLINE)[0]
            assert hops_of(far) == UNJUDGED
        far.sendto(b"!", caller.getsockname()[:2])
        assert ward.fate(caller, beyond.address(family)) == 0


@pytest.mark.parametrize("family", [4, 6])
def test_what_was_not_judged_is_judged_here_or_refused(ward: PolicyTestbed, beyond: Beyond, family: int) -> None:
    """From a stranger it is refused: its node did not know the target, and this one does not know the source."""
    one = ward.pod(1)
    ward.put(strangers(family), row(Direction.INGRESS, one, None, DENY))
    with beyond.open_socket(family) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as ear:
        set_hops(far, family, UNJUDGED)
        far.sendto(b"?", ear.getsockname()[:2])
        assert ward.fate(ear, beyond.address(family)) == "weft/stranger"
        friend = IpIdentity(TENANT, beyond.address(family), 0x88)
        ward.put(friend)
        far.sendto(b"?", ear.getsockname()[:2])
        assert ward.fate(ear, beyond.address(family)) == DENY
        ward.put(row(Direction.INGRESS, one, 0x88, ALLOW))
        far.sendto(b"?", ear.getsockname()[:2])
        assert ward.fate(ear, beyond.address(family)) == 0
        ward.drop(friend)
        set_hops(far, family, UNJUDGED - 1)  # the most that a workload's packet has left after its node
        far.sendto(b"?", ear.getsockname()[:2])
        assert ward.fate(ear, beyond.address(family)) == 0


def tell_hops(ear: socket.socket, family: int) -> None:
    """Have the socket say how many hops its datagrams had left."""
    if family == 4:
        ear.setsockopt(socket.IPPROTO_IP, _IP_RECVTTL, 1)
    else:
        ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)


def hops_of(ear: socket.socket) -> int:
    """The hops that the next datagram had left."""
    _, [(_, _, hops)], _, _ = ear.recvmsg(64, socket.CMSG_SPACE(4))
    return int.from_bytes(hops, sys.byteorder)


def set_hops(mouth: socket.socket, family: int, hops: int) -> None:
    if family == 4:
        mouth.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
    else:
        mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)


@pytest.mark.parametrize("family", [4, 6])
def test_a_stranger_from_beyond_was_judged_by_its_own_node(ward: PolicyTestbed, beyond: Beyond, family: int) -> None:
    one, two = ward.pod(1), ward.pod(2, ready=False)
    ward.put(strangers(family), row(Direction.INGRESS, one, None, DENY))
    with beyond.open_socket(family) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as ear:
        far.sendto(b"?", ear.getsockname()[:2])
        assert ward.fate(ear, beyond.address(family)) == 0
        ear.sendto(b"!", far.getsockname()[:2])
        assert ward.fate(far, one.address(family)) == 0
        with two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as closed:
            far.sendto(b"?", closed.getsockname()[:2])
            assert ward.fate(closed, beyond.address(family)) == "weft/not-ready"


@pytest.mark.parametrize("family", [4, 6])
def test_ranges_speak_where_nobody_is_known(ward: PolicyTestbed, beyond: Beyond, family: int) -> None:
    one = ward.pod(1)
    number = beyond.address(family).number
    world = 0x99
    ward.put(
        CidrIdentity(TENANT, Range(family, number, number), world),
        CidrIdentity(TENANT, Range(family, number + 1, number + 5), world + 1),
        row(Direction.EGRESS, one, None, ALLOW),
        row(Direction.EGRESS, one, world, DENY, protocol=UDP),
        row(Direction.INGRESS, one, None, ALLOW),
        row(Direction.INGRESS, one, world, VERDICT_DENY | 5, protocol=UDP),
    )
    with beyond.open_socket(family, port=PORT) as far, one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as near:
        near.sendto(b"?", far.getsockname()[:2])
        assert ward.fate(far, one.address(family)) == DENY
        far.sendto(b"?", near.getsockname()[:2])
        assert ward.fate(near, beyond.address(family)) == VERDICT_DENY | 5
        ward.drop(CidrIdentity(TENANT, Range(family, number, number), world))
        near.sendto(b"?", far.getsockname()[:2])
        assert ward.fate(far, one.address(family)) == 0


def test_nothing_passes_from_overlay_to_overlay(ward: PolicyTestbed, beyond: Beyond) -> None:
    run(ward.space.namespace, "ip route add 10.0.2.0/24 dev wx9")
    with beyond.open_socket(4) as far:
        far.sendto(b"?", ("10.0.2.9", PORT))
        assert ward.wait_for_drop(beyond.address(4)).reason == "weft/transit"


@pytest.mark.parametrize("family", [4, 6])
def test_nobody_speaks_for_another(ward: PolicyTestbed, family: int) -> None:
    """CVE rows about spoofing: neither with an address of another pod nor with one of nobody."""
    one, two = ward.pod(1), ward.pod(2)
    forged = parse_address("10.0.0.9" if family == 4 else "fd00::9", field="forged")
    for address in (forged, two.address(family)):
        run(one.namespace, f"ip -{family} addr add {address} dev eth0")
        caller = one.namespace.open_socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        with caller:
            if family == 6:
                caller.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # freely chosen source
            caller.bind((str(address), 0))
            caller.sendto(b"?", ("10.0.0.3" if family == 4 else "fd00::3", PORT))
            drop = ward.wait_for_drop(address)
            assert (drop.reason, drop.outcome, drop.in_iface) == ("weft/spoofed", 0, "wp1")
    assert ward.count("weft/spoofed") == 2


def test_no_pod_is_a_router(ward: PolicyTestbed) -> None:
    """CVE-2020-10749: a pod that announces itself as the way out."""
    one = ward.pod(1)
    ward.pod(2)
    with one.open_socket(6, socket.SOCK_RAW, ICMPV6) as caller:
        caller.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        caller.sendto(struct.pack(">BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0), ("fd00::2", 0))
        drop = ward.wait_for_drop(one.address(6))
    assert (drop.reason, drop.protocol, drop.target) == ("weft/router", ICMPV6, parse_address("fd00::2", field="pod"))
    assert ward.count("weft/router") == 1


def test_what_is_no_connection_is_refused(ward: PolicyTestbed) -> None:
    one, two = ward.pod(1), ward.pod(2)
    with one.open_socket(4, socket.SOCK_RAW, ICMP) as caller:
        caller.sendto(struct.pack(">BBHHH", 0, 0, 0xFFFD, 1, 1), (str(two.address(4)), 0))  # an answer to nothing
        assert ward.wait_for_drop(one.address(4)).reason == "weft/invalid"


@pytest.mark.parametrize(("family", "control"), [(4, ICMP), (6, ICMPV6)])
def test_the_node_itself_is_spoken_to_under_the_rules_of_who_speaks(
    ward: PolicyTestbed, family: int, control: int
) -> None:
    one = ward.pod(1)
    gateway = "10.0.0.254" if family == 4 else "fd00::fe"
    give_address(ward.space.namespace, gateway, device="lo", family=family)
    with ward.space.namespace.open_socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as ear:
        ear.bind((gateway, PORT))
        with one.open_socket(family, socket.SOCK_DGRAM) as caller:
            caller.sendto(b"?", (gateway, PORT))
            assert ward.fate(ear, one.address(family)) == 0
            ear.recv(1)
            ear.sendto(b"!", caller.getsockname()[:2])
            assert ward.fate(caller, parse_address(gateway, field="gateway")) == 0
            caller.recv(1)
            ward.put(row(Direction.EGRESS, one, None, DENY))
            caller.sendto(b"?", (gateway, PORT))
            assert ward.fate(ear, one.address(family)) == DENY


def test_a_drop_tells_everything(ward: PolicyTestbed) -> None:
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.INGRESS, two, one, DENY), row(Direction.INGRESS, two, None, ALLOW))
    before = time.time()
    for family in (4, 6):
        for protocol, kind in ((TCP, socket.SOCK_STREAM), (UDP, socket.SOCK_DGRAM)):
            with one.open_socket(family, kind, port=1234) as caller:
                caller.connect_ex((str(two.address(family)), PORT))
                if kind == socket.SOCK_DGRAM:
                    caller.send(b"?")
                drop = ward.wait_for_drop()
            assert (drop.tenant, drop.outcome, drop.reason) == (TENANT, DENY, "")
            assert (drop.source, drop.target) == (one.address(family), two.address(family))
            assert (drop.protocol, drop.source_port, drop.target_port) == (protocol, 1234, PORT)
            assert (drop.in_iface, drop.out_iface) == ("wp1", "wp2")
            assert before - 1 <= drop.at <= time.time() + 1


def test_a_flood_is_counted_in_full_and_told_in_samples(ward: PolicyTestbed) -> None:
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.EGRESS, one, None, DENY))
    with one.open_socket(4, socket.SOCK_DGRAM) as caller:
        for _ in range(3000):
            caller.sendto(b"?", (str(two.address(4)), PORT))
    ward.wait_for_drop(one.address(4))
    deadline = time.monotonic() + DEADLINE
    while ward.count(DENY) < 3000 and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert ward.count(DENY) == 3000
    told = 1 + len(ward.told)
    while more := ward.datapath.drops():
        told += len(more)
    assert 1 < told < 3000


def test_drops_are_heard_by_one_at_a_time_and_again_after_it_has_gone(ward: PolicyTestbed) -> None:
    """An agent that is started again hears them too."""
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.EGRESS, one, None, DENY))
    ward.restart()
    assert ward.ask(one, two, UDP, PORT) == DENY
