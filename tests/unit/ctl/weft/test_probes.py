"""The probe packets of `weft trace --packet` and how it recognizes them; the lab covers the sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from weft.ctl.failures import CommandError, Usage
from weft.ctl.weft import probes
from weft.ctl.weft.mtu_probe import checksum
from weft.ctl.weft.probes import Probe, ProbeFlow, open_in_netns, open_probe
from weft.domain.errors import NotFound
from weft.domain.policy.model.protocols import ICMP, ICMPV6, SCTP, TCP, UDP

ENDS = {4: ("10.1.1.1", "10.1.1.2"), 6: ("2001:db8::1", "2001:db8::2")}
SIGNATURE = b"sign"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    sender, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    with sender, far:
        yield sender, far


def packet(version: int, protocol: int, payload: bytes, *, back: bool = False) -> bytes:
    """A packet from the first end to the second, or back."""
    source, target = (ip_address(each).packed for each in ENDS[version][:: -1 if back else 1])
    if version == 4:
        return struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0) + source + target + payload
    return struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + source + target + payload


def probe(version: int, protocol: int, sender: socket.socket) -> Probe:
    signature = struct.pack("!HH", 4711, 80) if protocol in (TCP, UDP) else SIGNATURE
    return Probe(ProbeFlow(*ENDS[version], protocol, 80), sender, source_port=4711, data=b"x", signature=signature)


@pytest.mark.parametrize("version", [4, 6])
def test_a_probe_is_recognized_by_its_addresses_and_ports(
    version: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    sent = probe(version, TCP, pair[0])
    ports = struct.pack("!HH", 4711, 80)
    assert sent.matches(packet(version, TCP, ports + bytes(16)))
    assert not sent.matches(packet(version, TCP, ports + bytes(16), back=True))
    assert not sent.matches(packet(version, UDP, ports + bytes(16)))
    assert not sent.matches(packet(version, TCP, struct.pack("!HH", 4712, 80) + bytes(16)))
    assert not sent.matches(packet(10 - version, TCP, ports + bytes(16)))
    assert not sent.matches(b"\x45")


@pytest.mark.parametrize(("version", "protocol"), [(4, ICMP), (6, ICMPV6)])
def test_an_echo_request_is_recognized_by_its_signature(
    version: int, protocol: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    sent = probe(version, protocol, pair[0])
    assert sent.matches(packet(version, protocol, bytes(4) + SIGNATURE))
    assert not sent.matches(packet(version, protocol, bytes(4) + b"else"))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(("flags", "said"), [(0x12, "SYN-ACK"), (0x14, "RST"), (0x10, "")])
def test_tcp_replies_are_parsed(version: int, flags: int, said: str, pair: tuple[socket.socket, socket.socket]) -> None:
    sender, far = pair
    sent = probe(version, TCP, sender)
    assert sent.reply() == ""
    segment = struct.pack("!HHIIBBHHH", 80, 4711, 0, 0, 0x50, flags, 0, 0, 0)
    far.send(struct.pack("!HH", 81, 4711) + segment[4:] if version == 6 else packet(4, TCP, b"short"))
    far.send(packet(4, TCP, segment) if version == 4 else segment)  # v6 comes without its header
    reply = sent.reply()
    assert reply.startswith(said)
    assert bool(reply) is bool(said)


@pytest.mark.parametrize(("version", "protocol", "kind"), [(4, ICMP, 0), (6, ICMPV6, 129)])
def test_echo_replies_are_parsed(
    version: int, protocol: int, kind: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    sender, far = pair
    sent = probe(version, protocol, sender)
    for signature in (b"else", SIGNATURE):
        message = struct.pack("!BBH", kind, 0, 0) + signature
        far.send(packet(4, ICMP, message) if version == 4 else message)
        assert sent.reply() == ("an echo reply" if signature == SIGNATURE else "")


def test_a_syn_has_a_valid_checksum() -> None:
    segment = probes._syn(ProbeFlow(*ENDS[4], TCP, 80), 4711)
    pseudo = b"".join(ip_address(each).packed for each in ENDS[4]) + struct.pack("!BBH", 0, TCP, len(segment))
    assert checksum(pseudo + segment) == 0
    assert struct.unpack("!HH", segment[:4]) == (4711, 80)


def test_an_unsupported_protocol_is_a_usage_error() -> None:
    with pytest.raises(Usage, match="sctp cannot be probed"), open_probe(ProbeFlow(*ENDS[4], SCTP, 80), lambda: None):
        pass


def test_errors_of_the_thread_are_raised_by_the_caller() -> None:
    def gone() -> None:
        raise NotFound("the namespace is gone")

    with pytest.raises(NotFound, match="is gone"):
        open_in_netns(gone, socket.socket)

    def not_allowed() -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    with pytest.raises(CommandError, match="are you root"):
        open_in_netns(lambda: None, not_allowed)
