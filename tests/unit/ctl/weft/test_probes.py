"""The packets that `weft trace --packet` sends, and how it knows them again; sockets are covered in the lab."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from weft.ctl.failures import CommandError, Usage
from weft.ctl.weft import probes
from weft.ctl.weft.mtu_probe import checksum
from weft.ctl.weft.probes import Probe, Way, open_elsewhere, open_probe
from weft.domain.errors import NotFound
from weft.domain.policy.model.protocols import ICMP, ICMPV6, SCTP, TCP, UDP

ENDS = {4: ("10.1.1.1", "10.1.1.2"), 6: ("2001:db8::1", "2001:db8::2")}
MARK = b"mark"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    mouth, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    mouth.setblocking(False)
    with mouth, far:
        yield mouth, far


def packet(version: int, protocol: int, payload: bytes, *, back: bool = False) -> bytes:
    """A packet from the first end to the second, or back."""
    source, target = (ip_address(each).packed for each in ENDS[version][:: -1 if back else 1])
    if version == 4:
        return struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0) + source + target + payload
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + source + target + payload


def probe(version: int, protocol: int, mouth: socket.socket) -> Probe:
    mark = struct.pack("!HH", 4711, 80) if protocol in (TCP, UDP) else MARK
    return Probe(Way(*ENDS[version], protocol, 80), mouth, own_port=4711, data=b"x", mark=mark)


@pytest.mark.parametrize("version", [4, 6])
def test_a_probe_is_known_again_by_its_ends_and_ports(version: int, pair: tuple[socket.socket, socket.socket]) -> None:
    sent = probe(version, TCP, pair[0])
    ports = struct.pack("!HH", 4711, 80)
    assert sent.is_on(packet(version, TCP, ports + bytes(16)))
    assert not sent.is_on(packet(version, TCP, ports + bytes(16), back=True))
    assert not sent.is_on(packet(version, UDP, ports + bytes(16)))
    assert not sent.is_on(packet(version, TCP, struct.pack("!HH", 4712, 80) + bytes(16)))
    assert not sent.is_on(packet(10 - version, TCP, ports + bytes(16)))
    assert not sent.is_on(b"\x45")


@pytest.mark.parametrize(("version", "protocol"), [(4, ICMP), (6, ICMPV6)])
def test_an_echo_request_is_known_again_by_its_mark(
    version: int, protocol: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    sent = probe(version, protocol, pair[0])
    assert sent.is_on(packet(version, protocol, bytes(4) + MARK))
    assert not sent.is_on(packet(version, protocol, bytes(4) + b"else"))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(("flags", "said"), [(0x12, "SYN-ACK"), (0x14, "RST"), (0x10, "")])
def test_answers_of_tcp_are_understood(
    version: int, flags: int, said: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    mouth, far = pair
    asked = probe(version, TCP, mouth)
    assert asked.answer() == ""
    segment = struct.pack("!HHIIBBHHH", 80, 4711, 0, 0, 0x50, flags, 0, 0, 0)
    far.send(struct.pack("!HH", 81, 4711) + segment[4:] if version == 6 else packet(4, TCP, b"short"))
    far.send(packet(4, TCP, segment) if version == 4 else segment)  # v6 comes without its header
    answer = asked.answer()
    assert answer.startswith(said)
    assert bool(answer) is bool(said)


@pytest.mark.parametrize(("version", "protocol", "kind"), [(4, ICMP, 0), (6, ICMPV6, 129)])
def test_echo_replies_are_understood(
    version: int, protocol: int, kind: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    mouth, far = pair
    asked = probe(version, protocol, mouth)
    for mark in (b"else", MARK):
        reply = struct.pack("!BBH", kind, 0, 0) + mark
        far.send(packet(4, ICMP, reply) if version == 4 else reply)
        assert asked.answer() == ("an echo reply" if mark == MARK else "")


def test_a_syn_has_a_right_checksum() -> None:
    segment = probes._syn(Way(*ENDS[4], TCP, 80), 4711)
    pseudo = b"".join(ip_address(each).packed for each in ENDS[4]) + struct.pack("!BBH", 0, TCP, len(segment))
    assert checksum(pseudo + segment) == 0
    assert struct.unpack("!HH", segment[:4]) == (4711, 80)


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(Usage, match="sctp cannot be probed"), open_probe(Way(*ENDS[4], SCTP, 80), lambda: None):
        pass


def test_faults_elsewhere_are_told_here() -> None:
    def gone() -> None:
        raise NotFound("the namespace is gone")

    with pytest.raises(NotFound, match="is gone"):
        open_elsewhere(gone, socket.socket)

    def not_allowed() -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    with pytest.raises(CommandError, match="are you root"):
        open_elsewhere(lambda: None, not_allowed)
