"""Policy and connections: what was opened lives exactly as long as it may be opened (CVE rows about stale state)."""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.modes import BOTH_MODES
from tests.support.policy_testbed import Pod, PolicyTestbed, row

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
        two.open_socket(family, socket.SOCK_STREAM, port=PORT) as ear,
        one.open_socket(family, socket.SOCK_STREAM) as caller,
    ):
        ear.listen()
        assert caller.connect_ex(ear.getsockname()[:2]) in (0, errno.EINPROGRESS)
        assert select.select([ear], [], [], DEADLINE)[0]
        answerer, _ = ear.accept()
        with answerer:
            answerer.setblocking(False)
            assert select.select([], [caller], [], DEADLINE)[1]
            yield caller, answerer


def hears(listener: socket.socket) -> bytes:
    """What comes to a socket, which must be soon."""
    assert select.select([listener], [], [], DEADLINE)[0]
    return listener.recv(1 << 16)


@pytest.mark.parametrize("family", [4, 6])
def test_a_rule_that_goes_cuts_a_live_connection_and_one_that_comes_mends_it(ward: PolicyTestbed, family: int) -> None:
    """Neither end gets anything through; TCP tries again and goes on when it may."""
    one, two = ward.pod(1), ward.pod(2)
    guard = row(Direction.INGRESS, two, None, DENY)
    permission = row(Direction.INGRESS, two, one, ALLOW, protocol=TCP, ports=(PORT, PORT))
    ward.put(guard, permission)
    with talk(one, two, family) as (caller, answerer):
        caller.send(b"question")
        assert hears(answerer) == b"question"
        ward.drop(permission)
        caller.send(b"more")
        assert ward.fate(answerer, one.address(family)) == DENY
        answerer.send(b"answer")
        assert ward.fate(caller, two.address(family)) == DENY
        ward.put(permission)
        assert hears(answerer) == b"more"
        assert hears(caller) == b"answer"


@pytest.mark.parametrize("family", [4, 6])
def test_answers_need_no_rule_of_their_own(ward: PolicyTestbed, family: int) -> None:
    one, two = ward.pod(1), ward.pod(2)
    ward.put(
        row(Direction.INGRESS, one, None, DENY),
        row(Direction.EGRESS, two, None, DENY),
    )
    with talk(one, two, family) as (caller, answerer):
        answerer.send(b"answer")
        assert hears(caller) == b"answer"
    assert ward.ask(two, one, TCP, PORT, family=family) == DENY


@pytest.mark.parametrize("family", [4, 6])
def test_answers_alone_end_with_the_permission_too(ward: PolicyTestbed, family: int) -> None:
    """UDP from a server that goes on sending, to a client that says nothing any more."""
    one, two = ward.pod(1), ward.pod(2)
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        client.sendto(b"subscribe", server.getsockname()[:2])
        assert hears(server) == b"subscribe"
        server.sendto(b"news", client.getsockname()[:2])
        assert hears(client) == b"news"
        ward.put(row(Direction.EGRESS, one, None, DENY))
        server.sendto(b"more news", client.getsockname()[:2])
        assert ward.fate(client, two.address(family)) == DENY


@pytest.mark.parametrize(("family", "control"), [(4, ICMP), (6, ICMPV6)])
def test_errors_about_a_connection_belong_to_it(ward: PolicyTestbed, family: int, control: int) -> None:
    """Also where ICMP as such is refused."""
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.EGRESS, two, None, DENY), row(Direction.INGRESS, one, None, DENY))
    assert ward.ask(two, one, control, family=family) == DENY
    with one.open_socket(family, socket.SOCK_DGRAM) as caller:
        caller.connect((str(two.address(family)), 9))  # nobody listens there
        caller.send(b"?")
        assert select.select([caller], [], [], DEADLINE)[0]
        with pytest.raises(ConnectionRefusedError):
            caller.recv(1)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("size", [4000, 60_000])
def test_fragments_are_judged_as_the_whole_they_are(ward: PolicyTestbed, family: int, size: int) -> None:
    """Only the first fragment has ports; none passes without it, and none is refused where the whole may pass."""
    one, two = ward.pod(1), ward.pod(2)
    ward.put(
        row(Direction.INGRESS, two, None, DENY),
        row(Direction.INGRESS, two, one, ALLOW, protocol=UDP, ports=(PORT, PORT)),
    )
    with (
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as open_door,
        two.open_socket(family, socket.SOCK_DGRAM, port=PORT + 1) as closed_door,
        one.open_socket(family, socket.SOCK_DGRAM) as caller,
    ):
        content = bytes(size)
        caller.sendto(content, closed_door.getsockname()[:2])
        assert ward.fate(closed_door, one.address(family)) == DENY
        caller.sendto(content, open_door.getsockname()[:2])
        assert hears(open_door) == content


def test_a_live_connection_is_judged_once_for_each_policy(ward: PolicyTestbed) -> None:
    """What passes is counted when it is judged; what is refused is counted each time."""
    one, two, three = ward.pod(1), ward.pod(2), ward.pod(3)
    ward.put(row(Direction.INGRESS, two, None, ALLOW))
    with talk(one, two, 4) as (caller, answerer):
        for _ in range(20):
            caller.send(b"question")
            hears(answerer)
        assert ward.count(ALLOW) == 1
        ward.put(row(Direction.INGRESS, three, None, DENY))
        caller.send(b"question")
        hears(answerer)
        assert ward.count(ALLOW) == 2
    for _ in range(5):
        assert ward.ask(one, three, UDP, 53) == DENY
    assert ward.count(DENY) == 5


@pytest.mark.parametrize("family", [4, 6])
def test_who_gets_an_address_inherits_no_connection(ward: PolicyTestbed, family: int) -> None:
    """An answer to the one who has left is a first packet for the one who has come."""
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.EGRESS, two, None, DENY))
    with two.open_socket(family, socket.SOCK_DGRAM, port=PORT) as server:
        with one.open_socket(family, socket.SOCK_DGRAM, port=PORT) as client:
            client.sendto(b"?", server.getsockname()[:2])
            hears(server)
            server.sendto(b"!", client.getsockname()[:2])
            assert hears(client) == b"!"
        ward.unplug(one)
        again = ward.pod(1)
        with again.open_socket(family, socket.SOCK_DGRAM, port=PORT) as client:
            server.sendto(b"!", client.getsockname()[:2])
            assert ward.fate(client, two.address(family)) == DENY


def test_no_packet_is_lost_while_policy_changes(ward: PolicyTestbed) -> None:
    """A stream in both directions, while rules come and go that do not concern it."""
    one, two, three = ward.pod(1), ward.pod(2), ward.pod(3)
    ward.put(row(Direction.INGRESS, two, None, DENY), row(Direction.INGRESS, two, one, ALLOW, protocol=UDP))
    other = row(Direction.INGRESS, three, None, DENY)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM) as client,
    ):
        for number in range(200):
            client.sendto(b"?", server.getsockname()[:2])
            (ward.drop if number % 2 else ward.put)(other)
            assert hears(server) == b"?"
            server.sendto(b"!", client.getsockname()[:2])
            assert hears(client) == b"!"
    assert ward.datapath.drops() == []


def test_errors_about_a_connection_that_may_be_no_more_are_refused(ward: PolicyTestbed) -> None:
    """ICMP errors carry what their sender likes: no way around the rules for two who once talked."""
    one, two = ward.pod(1), ward.pod(2)
    with (
        two.open_socket(4, socket.SOCK_DGRAM, port=PORT) as server,
        one.open_socket(4, socket.SOCK_DGRAM, port=1234) as client,
        two.open_socket(4, socket.SOCK_RAW, ICMP) as forger,
        one.open_socket(4, socket.SOCK_RAW, ICMP) as hearer,
    ):
        client.sendto(b"?", server.getsockname()[:2])
        hears(server)
        ends = b"".join(address.number.to_bytes(4, "big") for address in (one.address(4), two.address(4)))
        about = struct.pack(">BBHHHBBH", 0x45, 0, 29, 1, 0, 64, UDP, 0) + ends + struct.pack(">HHHH", 1234, PORT, 9, 0)
        error = with_checksum(struct.pack(">BBHI", 3, 3, 0, 0) + about)
        forger.sendto(error, (str(one.address(4)), 0))
        assert ward.fate(hearer, two.address(4)) == 0
        hears(hearer)
        ward.put(row(Direction.EGRESS, one, None, DENY))
        forger.sendto(error, (str(one.address(4)), 0))
        assert ward.fate(hearer, two.address(4)) == DENY


def with_checksum(message: bytes) -> bytes:
    """An ICMP message whose checksum was 0."""
    total = sum(int.from_bytes(message[place : place + 2], "big") for place in range(0, len(message), 2))
    total = (total & 0xFFFF) + (total >> 16)
    return message[:2] + (~(total + (total >> 16)) & 0xFFFF).to_bytes(2, "big") + message[4:]
