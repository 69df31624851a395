"""Netlink's framing: messages and attributes to bytes and back. Pure.

After the kernel's `include/uapi/linux/netlink.h` and `Documentation/userspace-api/netlink/intro.rst`. Numbers are in
the machine's byte order, except where a function's name says big-endian (`be`): nf_tables and conntrack use those.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault

HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED_ATTRIBUTE = struct.Struct("=HHHH")
_ATTRIBUTE_U8 = struct.Struct("=HHBxxx")
_ATTRIBUTE_U32 = struct.Struct("=HHI")
_ATTRIBUTE_BE32 = struct.Struct("=HH4s")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")

_NESTED = 0x8000
_KIND_MASK = 0x3FFF

REQUEST, ACK, DUMP = 0x1, 0x4, 0x300
REPLACE, EXCLUSIVE, CREATE, APPEND = 0x100, 0x200, 0x400, 0x800

AF_UNSPEC, AF_INET, AF_INET6, AF_BRIDGE = 0, 2, 10, 7
AF = {4: AF_INET, 6: AF_INET6}
FAMILY = {AF_INET: 4, AF_INET6: 6}

NOTHING: frozenset[int] = frozenset()


class Request(NamedTuple):
    """One message for the kernel, and what to say and to forgive when it is refused."""

    kind: int
    flags: int
    payload: bytes
    # A phrase for errors, completed by `subject`: "add route" …; put together only when needed.
    doing: str
    subject: object
    # The errnos which mean that the wanted state is there already.
    settled: frozenset[int] = NOTHING

    def encode(self, *, sequence: int, flags: int = 0) -> bytes:
        """The message as it goes over the socket, with more flags where wanted."""
        size = HEADER.size + len(self.payload)
        return HEADER.pack(size, self.kind, self.flags | REQUEST | flags, sequence, 0) + self.payload

    def __str__(self) -> str:
        return f"{self.doing} {self.subject}"


class Message(NamedTuple):
    """One message from the kernel."""

    kind: int
    flags: int
    sequence: int
    payload: bytes


def messages(data: bytes) -> Iterator[Message]:
    """The messages of one datagram; `DatapathFault` when it is cut short or nonsense."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < HEADER.size:
            raise DatapathFault(f"netlink: {len(data) - offset} bytes are left over after the last message")
        size, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        if size < HEADER.size or offset + size > len(data):
            raise DatapathFault(f"netlink: a message of {size} bytes does not fit into its datagram")
        yield Message(kind, flags, sequence, data[offset + HEADER.size : offset + size])
        offset += size + 3 & ~3


def attribute(kind: int, data: bytes) -> bytes:
    """Any bytes as an attribute, padded to four."""
    return _ATTRIBUTE.pack(len(data) + 4, kind) + data + _PADDING[len(data) & 3]


def nest(kind: int, *attributes: bytes) -> bytes:
    """Attributes inside an attribute."""
    data = b"".join(attributes)
    return _ATTRIBUTE.pack(len(data) + 4, kind | _NESTED) + data


def nested(kind: int, inner: int, data: bytes) -> bytes:
    """One attribute inside another."""
    padding = _PADDING[len(data) & 3]
    return _NESTED_ATTRIBUTE.pack(len(data) + len(padding) + 8, kind | _NESTED, len(data) + 4, inner) + data + padding


def u8(kind: int, number: int) -> bytes:
    return _ATTRIBUTE_U8.pack(5, kind, number)


def u32(kind: int, number: int) -> bytes:
    return _ATTRIBUTE_U32.pack(8, kind, number)


def be16(kind: int, number: int) -> bytes:
    return attribute(kind, number.to_bytes(2, "big"))


def be32(kind: int, number: int) -> bytes:
    """Negative numbers too (verdicts have such codes)."""
    return _ATTRIBUTE_BE32.pack(8, kind, (number & 0xFFFFFFFF).to_bytes(4, "big"))


def text(kind: int, string: str) -> bytes:
    """A string with the zero byte that ends it."""
    return attribute(kind, string.encode() + b"\0")


def address(kind: int, value: Address) -> bytes:
    """An address, 4 or 16 bytes."""
    return attribute(kind, pack_address(value))


def mac(kind: int, value: str) -> bytes:
    """A MAC in its usual text."""
    return attribute(kind, pack_mac(value))


def pack_address(value: Address) -> bytes:
    return value.number.to_bytes(4 if value.family == 4 else 16, "big")


def pack_mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))


def attribute_list(data: bytes, offset: int = 0) -> list[tuple[int, bytes]]:
    """The attributes from an offset on, in order; `DatapathFault` when one does not fit."""
    found = []
    end = len(data)
    while end - offset >= 4:
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        if size < 4 or offset + size > end:
            raise DatapathFault(f"netlink: an attribute of {size} bytes does not fit into its message")
        found.append((kind & _KIND_MASK, data[offset + 4 : offset + size]))
        offset += size + 3 & ~3
    return found


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """The attributes from an offset on, by kind."""
    return dict(attribute_list(data, offset))


def unpack_header(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    """The fixed part before a message's attributes; `DatapathFault` when the message is shorter."""
    if len(data) < form.size:
        raise DatapathFault(f"netlink: a message of {len(data)} bytes where at least {form.size} were expected")
    return form.unpack_from(data)


def to_number(data: bytes | None) -> int:
    """A number in the machine's byte order; 0 where the attribute is absent."""
    return 0 if data is None else int.from_bytes(data, sys.byteorder)


def to_big_number(data: bytes | None) -> int:
    """A big-endian number; 0 where the attribute is absent."""
    return 0 if data is None else int.from_bytes(data, "big")


def to_text(data: bytes | None) -> str:
    """A string without its end mark; foreign names may hold any bytes, which stay visible."""
    return "" if data is None else data.rstrip(b"\0").decode(errors="backslashreplace")


def to_family(number: int) -> int:
    """4 or 6, out of the kernel's number."""
    if number not in FAMILY:
        raise DatapathFault(f"netlink: address family {number} where IPv4 or IPv6 was expected")
    return FAMILY[number]


def to_address(data: bytes) -> Address:
    if len(data) not in (4, 16):
        raise DatapathFault(f"netlink: an address of {len(data)} bytes")
    return Address(4 if len(data) == 4 else 6, int.from_bytes(data, "big"))


def to_mac(data: bytes | None) -> str:
    return "" if data is None else data.hex(":")
