"""Netlink framing: encode and decode messages and attributes. Pure.

Follows `linux/netlink.h` and the kernel's `Documentation/userspace-api/netlink/intro.rst`. Integers are in host byte
order. Functions with `be` in their name use network byte order, which nf_tables and conntrack expect.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.kernel.uapi.netlink import (
    NLA_F_NESTED,
    NLA_TYPE_MASK,
    NLM_F_REQUEST,
)

NLMSGHDR = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_NESTED_ATTRIBUTE = struct.Struct("=HHHH")
_ATTRIBUTE_U8 = struct.Struct("=HHBxxx")
_ATTRIBUTE_U32 = struct.Struct("=HHI")
_ATTRIBUTE_BE32 = struct.Struct("=HH4s")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


AF_UNSPEC, AF_INET, AF_INET6, AF_BRIDGE = 0, 2, 10, 7
AF = {4: AF_INET, 6: AF_INET6}
FAMILY = {AF_INET: 4, AF_INET6: 6}

NO_ERRNOS: frozenset[int] = frozenset()


class Request(NamedTuple):
    """One message to the kernel, the text for its error, and the errnos that count as success."""

    kind: int
    flags: int
    payload: bytes
    # "add route" and so on. The error text joins `action` and `subject` only when an error occurs: formatting a
    # subject costs more than sending it.
    action: str
    subject: object
    # Errnos that mean the desired state exists already, such as EEXIST for an add or ENOENT for a delete.
    ignored_errnos: frozenset[int] = NO_ERRNOS

    def encode(self, *, sequence: int, flags: int = 0) -> bytes:
        """Return the message with its header; `flags` are added to the request's own."""
        size = NLMSGHDR.size + len(self.payload)
        return NLMSGHDR.pack(size, self.kind, self.flags | NLM_F_REQUEST | flags, sequence, 0) + self.payload

    def __str__(self) -> str:
        return f"{self.action} {self.subject}"


class Message(NamedTuple):
    """One message from the kernel."""

    kind: int
    flags: int
    sequence: int
    payload: bytes


def messages(data: bytes) -> Iterator[Message]:
    """Split one datagram into messages; `DatapathFault` when it is truncated or malformed."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < NLMSGHDR.size:
            raise DatapathFault(f"netlink: {len(data) - offset} trailing bytes after the last message")
        size, kind, flags, sequence, _ = NLMSGHDR.unpack_from(data, offset)
        if size < NLMSGHDR.size or offset + size > len(data):
            raise DatapathFault(f"netlink: message length {size} exceeds the datagram")
        yield Message(kind, flags, sequence, data[offset + NLMSGHDR.size : offset + size])
        # NLMSG_ALIGN: the next header starts at a multiple of four; the length does not include the padding.
        offset += size + 3 & ~3


def attribute(kind: int, data: bytes) -> bytes:
    """Encode bytes as one attribute, padded to a multiple of four."""
    return _ATTRIBUTE.pack(len(data) + 4, kind) + data + _PADDING[len(data) & 3]


def nest(kind: int, *attributes: bytes) -> bytes:
    """Encode attributes as one nested attribute."""
    data = b"".join(attributes)
    return _ATTRIBUTE.pack(len(data) + 4, kind | NLA_F_NESTED) + data


def nested(kind: int, inner: int, data: bytes) -> bytes:
    """Encode one attribute nested in another; faster than `nest(kind, attribute(inner, data))`."""
    padding = _PADDING[len(data) & 3]
    return (
        _NESTED_ATTRIBUTE.pack(len(data) + len(padding) + 8, kind | NLA_F_NESTED, len(data) + 4, inner) + data + padding
    )


def u8(kind: int, number: int) -> bytes:
    return _ATTRIBUTE_U8.pack(5, kind, number)


def u32(kind: int, number: int) -> bytes:
    return _ATTRIBUTE_U32.pack(8, kind, number)


def be16(kind: int, number: int) -> bytes:
    return attribute(kind, number.to_bytes(2, "big"))


def be32(kind: int, number: int) -> bytes:
    """Encode a 32-bit integer in network byte order; negative ones too, as verdict codes are."""
    return _ATTRIBUTE_BE32.pack(8, kind, (number & 0xFFFFFFFF).to_bytes(4, "big"))


def text(kind: int, string: str) -> bytes:
    """Encode a NUL-terminated string."""
    return attribute(kind, string.encode() + b"\0")


def address(kind: int, value: Address) -> bytes:
    """Encode an address: 4 or 16 bytes."""
    return attribute(kind, pack_address(value))


def mac(kind: int, value: str) -> bytes:
    """Encode a MAC given as text."""
    return attribute(kind, pack_mac(value))


def pack_address(value: Address) -> bytes:
    return value.number.to_bytes(4 if value.family == 4 else 16, "big")


def pack_mac(value: str) -> bytes:
    return bytes.fromhex(value.replace(":", ""))


def attribute_list(data: bytes, offset: int = 0) -> list[tuple[int, bytes]]:
    """Decode the attributes from an offset on, in order; `DatapathFault` when one exceeds the message."""
    # Hot path of every dump: a plain list and no generator.
    found: list[tuple[int, bytes]] = []
    end = len(data)
    while end - offset >= 4:
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        if size < 4 or offset + size > end:
            raise DatapathFault(f"netlink: attribute length {size} exceeds the message")
        found.append((kind & NLA_TYPE_MASK, data[offset + 4 : offset + size]))
        offset += size + 3 & ~3
    return found


def attributes(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Decode the attributes from an offset on into a dict; the last one of a type wins."""
    return dict(attribute_list(data, offset))


def unpack_header(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    """Decode the fixed header before the attributes; `DatapathFault` when the message is shorter."""
    if len(data) < form.size:
        raise DatapathFault(f"netlink: message of {len(data)} bytes is shorter than its {form.size} byte header")
    return form.unpack_from(data)


def to_int(data: bytes | None) -> int:
    """Decode an integer in host byte order; 0 when the attribute is absent."""
    return 0 if data is None else int.from_bytes(data, sys.byteorder)


def to_int_be(data: bytes | None) -> int:
    """Decode an integer in network byte order; 0 when the attribute is absent."""
    return 0 if data is None else int.from_bytes(data, "big")


def to_text(data: bytes | None) -> str:
    """Decode a NUL-terminated string. Names set by others may hold any bytes; they show as escapes."""
    return "" if data is None else data.rstrip(b"\0").decode(errors="backslashreplace")


def to_family(number: int) -> int:
    """Map AF_INET and AF_INET6 to 4 and 6."""
    if number not in FAMILY:
        raise DatapathFault(f"netlink: address family {number} is neither AF_INET nor AF_INET6")
    return FAMILY[number]


def to_address(data: bytes) -> Address:
    if len(data) not in (4, 16):
        raise DatapathFault(f"netlink: bad address length {len(data)}")
    return Address(4 if len(data) == 4 else 6, int.from_bytes(data, "big"))


def to_mac(data: bytes | None) -> str:
    return "" if data is None else data.hex(":")
