"""Policy and established connections: they pass exactly as long as policy allows them (CVEs about stale state)."""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.modes import BOTH_MODES
from tests.support.policy_testbed import Pod, PolicyTestbed, policy_entry

from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY
from weft.lab.waiting import DEADLINE

pytestmark = BOTH_MODES

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
PORT = 8080


@contextmanager
def talk(one: Pod, two: Pod, family: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """An open TCP connection from one to two, both ends."""
    with (
        two.open_socket(family, socket.SOCK_STREAM, port=PORT) as listener,
        one.open_socket(family, socket.SOCK_STREAM) as caller,
    ):
        listener.listen()
        assert caller.connect_ex(listener.getsockname()[:2]) in (0, errno.EINPROGRESS)
        assert select.select([listener], [], [], DEADLINE)[0]
        answerer, _ = listener.accept()
        with answerer:
            answerer.setblocking(False)
            assert select.select([], [caller], [], DEADLINE)[1]
            yield caller, answerer


def receives(listener: socket.socket) -> bytes:
    """Receive from a socket, which must be soon."""
    assert select.select([listener], [], [], DEADLINE)[0]
    return listener.recv(1 << 16)


@pytest.mark.parametrize("family", [4, 6])
def test_rules_apply_to_live_connections(testbed: PolicyTestbed, family: int) -> None:
    """Neither end receives data; TCP retransmits, and continues when it is allowed again."""
    one, two = testbed.pod(1), testbed.pod(2)
    guard = policy_entry(Direction.INGRESS, two, None, DENY)
    permission = policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=TCP, ports=(PORT, PORT))
    testbed.put(guard, permission)
    with talk(one, two, family) as (caller, answerer):
        caller.send(b"question")
        assert receives(answerer) == b"question"
        testbed.drop(permission)
        caller.send(b"more")
        assert testbed.packet_result(answerer, one.address(family)) == DENY
        answerer.send(b"answer")
        assert testbed.packet_result(caller, two.address(family)) == DENY
        testbed.put(permission)
        assert receives(answerer) == b"more"
        assert receives(caller) == b"answer"


@pytest.mark.parametrize("family", [4, 6])
def test_replies_need_no_rule(testbed: PolicyTestbed, family: int) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(
        policy_entry(Direction.INGRESS, one, None, DENY),
        policy_entry(Direction.EGRESS, two, None, DENY),
    )
    with talk(one, two, family) as (caller, answerer):
        answerer.send(b"answer")
        assert receives(caller) == b"answer"
    assert testbed.probe(two, one, TCP, PORT, family=family) == DENY


@pytest.mark.parametrize("family", [4, 6])
def test_one_way_replies_stop_when_the_rule_is_removed(testbed: PolicyTestbed, family: int) -> None:
    """UDP from a server that keeps sending to a client that does not."""
    one, two = testbed.pod(1), testbed.pod(2)
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        client.sendto(b"subscribe", server.getsockname()[:2])
        assert receives(server) == b"subscribe"
        server.sendto(b"news", client.getsockname()[:2])
        assert receives(client) == b"news"
        testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
        server.sendto(b"more news", client.getsockname()[:2])
        assert testbed.packet_result(client, two.address(family)) == DENY


@pytest.mark.parametrize(("family", "control"), [(4, ICMP), (6, ICMPV6)])
def test_icmp_errors_belong_to_their_connection(testbed: PolicyTestbed, family: int, control: int) -> None:
    """Also if ICMP itself is denied."""
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.EGRESS, two, None, DENY), policy_entry(Direction.INGRESS, one, None, DENY))
    assert testbed.probe(two, one, control, family=family) == DENY
    with one.open_socket(family, socket.SOCK_DGRAM) as caller:
        caller.connect((str(two.address(family)), 9))  # no process listens there
        caller.send(b"?")
        assert select.select([caller], [], [], DEADLINE)[0]
        with pytest.raises(ConnectionRefusedError):
            caller.recv(1)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("size", [4000, 60_000])
def test_fragments_are_reassembled_before_policy(testbed: PolicyTestbed, family: int, size: int) -> None:
    """Only the first fragment has ports; none passes without it, and all pass if the datagram is allowed."""
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(
        policy_entry(Direction.INGRESS, two, None, DENY),
        policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=UDP, ports=(PORT, PORT)),
    )
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as open_door,
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT + 1) as closed_door,
        one.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        content = bytes(size)
        caller.sendto(content, closed_door.getsockname()[:2])
        assert testbed.packet_result(closed_door, one.address(family)) == DENY
        caller.sendto(content, open_door.getsockname()[:2])
        assert receives(open_door) == content


def test_a_live_connection_is_evaluated_once_per_epoch(testbed: PolicyTestbed) -> None:
    """Allowed packets are counted once per evaluation, denied ones each time."""
    one, two, three = testbed.pod(1), testbed.pod(2), testbed.pod(3)
    testbed.put(policy_entry(Direction.INGRESS, two, None, ALLOW))
    with talk(one, two, 4) as (caller, answerer):
        for _ in range(20):
            caller.send(b"question")
            receives(answerer)
        assert testbed.count(ALLOW) == 1
        testbed.put(policy_entry(Direction.INGRESS, three, None, DENY))
        caller.send(b"question")
        receives(answerer)
        assert testbed.count(ALLOW) == 2
    for _ in range(5):
        assert testbed.probe(one, three, UDP, 53) == DENY
    assert testbed.count(DENY) == 5


@pytest.mark.parametrize("family", [4, 6])
def test_a_reused_address_inherits_no_connection(testbed: PolicyTestbed, family: int) -> None:
    """A reply to the former owner is a first packet for the new one."""
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.EGRESS, two, None, DENY))
    with two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as server:
        with one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as client:
            client.sendto(b"?", server.getsockname()[:2])
            receives(server)
            server.sendto(b"!", client.getsockname()[:2])
            assert receives(client) == b"!"
        testbed.unplug(one)
        again = testbed.pod(1)
        with again.open_socket(family, socket.SOCK_DGRAM, port=PORT) as client:
            server.sendto(b"!", client.getsockname()[:2])
            assert testbed.packet_result(client, two.address(family)) == DENY


def test_no_packet_is_lost_while_policy_changes(testbed: PolicyTestbed) -> None:
    """A stream in both directions, while unrelated rules are added and removed."""
    one, two, three = testbed.pod(1), testbed.pod(2), testbed.pod(3)
    testbed.put(
        policy_entry(Direction.INGRESS, two, None, DENY), policy_entry(Direction.INGRESS, two, one, ALLOW, protocol=UDP)
    )
    other = policy_entry(Direction.INGRESS, three, None, DENY)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM) as client,
    ):
        for number in range(200):
            client.sendto(b"?", server.getsockname()[:2])
            (testbed.drop if number % 2 else testbed.put)(other)
            assert receives(server) == b"?"
            server.sendto(b"!", client.getsockname()[:2])
            assert receives(client) == b"!"
    assert testbed.datapath.drops() == []


def test_icmp_errors_of_a_denied_connection_are_dropped(testbed: PolicyTestbed) -> None:
    """The content of an ICMP error is up to its sender: it must not bypass policy for a former connection."""
    one, two = testbed.pod(1), testbed.pod(2)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=1234) as client,
        two.open_socket(4, socket.SOCK_RAW, ICMP) as forger,
        one.open_socket(4, socket.SOCK_RAW, ICMP) as raw_socket,
    ):
        client.sendto(b"?", server.getsockname()[:2])
        receives(server)
        ends = b"".join(address.number.to_bytes(4, "big") for address in (one.address(4), two.address(4)))
        about = struct.pack(">BBHHHBBH", 0x45, 0, 29, 1, 0, 64, UDP, 0) + ends + struct.pack(">HHHH", 1234, PORT, 9, 0)
        error = with_checksum(struct.pack(">BBHI", 3, 3, 0, 0) + about)
        forger.sendto(error, (str(one.address(4)), 0))
        assert testbed.packet_result(raw_socket, two.address(4)) == 0
        receives(raw_socket)
        testbed.put(policy_entry(Direction.EGRESS, one, None, DENY))
        forger.sendto(error, (str(one.address(4)), 0))
        assert testbed.packet_result(raw_socket, two.address(4)) == DENY


def with_checksum(message: bytes) -> bytes:
    """An ICMP message whose checksum was 0."""
    total = sum(int.from_bytes(message[place : place + 2], "big") for place in range(0, len(message), 2))
    total = (total & 0xFFFF) + (total >> 16)
    return message[:2] + (~(total + (total >> 16)) & 0xFFFF).to_bytes(2, "big") + message[4:]
