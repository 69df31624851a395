"""Elements of nf_tables sets and maps, put and dropped in one transaction (`include/uapi/linux/netfilter/nf_tables.h`).

The hot path beside `nftables`: nothing is parsed and nothing else is read. A key is made of fields in the order of the
set's type: `key(interface("wp1"), pack_mac("02:…"), pack_address(pod))` for `ifname . ether_addr . ipv4_addr`.

A transaction is exact. To drop what is not there, or to put another value under a key that is there, is `Refused`
(`ENOENT`, `EEXIST`), nothing is changed, and the caller reads the set anew. To put what is there already is fine.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import CREATE, Request
from weft.kernel.netlink.socket import NetlinkSocket

INET, IPV4, NETDEV, BRIDGE, IPV6 = 1, 2, 5, 7, 10
DROP, ACCEPT, CONTINUE, JUMP, GOTO, RETURN = 0, 1, -1, -3, -4, -5

SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 16, 17
_GET_SET, _NEW, _GET, _DELETE, _GET_GENERATION = (SUBSYSTEM << 8 | number for number in (10, 12, 13, 14, 16))
_HEADER = struct.Struct(">BBH")  # family, version, subsystem
_TABLE, _SET, _ELEMENTS = 1, 2, 3
_GENERATION = 1
_ELEMENT = 1
_KEY, _DATA, _STATE = 1, 2, 7
_VALUE, _VERDICT = 1, 2
_CODE, _CHAIN = 1, 2
_COUNTED_LEAST = 56  # bytes of an element with a counter, besides its key
_STATE_DATA, _OCTETS, _PACKETS = 2, 1, 2
_NUMBER_HEADS = tuple(codec.attribute(kind, bytes(8))[:4] for kind in (_OCTETS, _PACKETS))
_INTERFACE_BYTES = 16
_GONE = frozenset({errno.ENOENT})
_LIST_BYTES = 60_000  # an attribute's length is a 16-bit number

_FRAME = _HEADER.pack(codec.AF_UNSPEC, 0, SUBSYSTEM)
_BEGIN = Request(_BATCH_BEGIN, 0, _FRAME, "change", "nf_tables")
_END = Request(_BATCH_END, 0, _FRAME, "change", "nf_tables")


class SetName(NamedTuple):
    """A set or a map of a table."""

    family: int
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


class Verdict(msgspec.Struct, frozen=True):
    """What a verdict map says about a packet; the chain goes with `JUMP` and `GOTO`."""

    code: int
    chain: str = ""


class Element(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A member of a set; of a map, when it has a value or a verdict."""

    key: bytes
    value: bytes = b""
    verdict: Verdict | None = None


def key(*fields: bytes) -> bytes:
    """A key, or a value, of one or several fields."""
    if len(fields) == 1:
        return fields[0]
    return b"".join(field + bytes(-len(field) % 4) for field in fields)


def interface(name: str) -> bytes:
    """A field of type `ifname`."""
    return name.encode().ljust(_INTERFACE_BYTES, b"\0")


def mark(number: int) -> bytes:
    """A field of type `mark`."""
    return number.to_bytes(4, sys.byteorder)


def port(number: int) -> bytes:
    """A field of type `inet_service`."""
    return number.to_bytes(2, "big")


def protocol(number: int) -> bytes:
    """A field of type `inet_proto`."""
    return number.to_bytes(1, "big")


def put_elements(target: SetName, elements: Iterable[Element]) -> list[Request]:
    """The requests for `apply_changes` that put them in."""
    return [Request(_NEW, CREATE, payload, "add elements to", target) for payload in _lists(target, elements)]


def drop_elements(target: SetName, elements: Iterable[Element]) -> list[Request]:
    """The requests for `apply_changes` that take them out, whatever their values."""
    keys = (msgspec.structs.replace(element, value=b"", verdict=None) for element in elements)
    return [Request(_DELETE, 0, payload, "delete elements of", target) for payload in _lists(target, keys)]


def apply_changes(netlink: NetlinkSocket, requests: Sequence[Request]) -> None:
    """Carry out all of the changes, in order, or none. Packets see the sets before or after, never between."""
    if requests:
        netlink.send_transaction(requests, begin=_BEGIN, end=_END)


def read_elements(netlink: NetlinkSocket, target: SetName) -> list[Element]:
    """All elements; `Refused` with `ENOENT` when there is no such set."""
    answers = netlink.dump(Request(_GET, 0, _name(target), "read elements of", target))
    return [element for answer in answers for element in parse_elements(answer)]


def parse_elements(payload: bytes) -> Iterator[Element]:
    """The elements out of one message."""
    codec.unpack_header(_HEADER, payload)
    elements = codec.attributes(payload, _HEADER.size).get(_ELEMENTS, b"")
    return (_parse_element(data) for _, data in codec.attribute_list(elements))


def has_set(netlink: NetlinkSocket, target: SetName) -> bool:
    """Whether there is such a set or map."""
    return netlink.get(Request(_GET_SET, 0, _name(target), "read", target, _GONE)) is not None


def read_generation(netlink: NetlinkSocket) -> int:
    """A number that every transaction in the namespace, whoever makes it, increases by one."""
    answer = netlink.get(Request(_GET_GENERATION, 0, _FRAME, "read", "the generation of nf_tables"))
    return codec.to_big_number(codec.attributes(answer or b"", _HEADER.size).get(_GENERATION))


class Count(NamedTuple):
    """What a counter has met."""

    packets: int
    octets: int


def read_counts(netlink: NetlinkSocket, target: SetName) -> dict[bytes, Count]:
    """What each element of a set with counters has met, by key."""
    answers = netlink.dump(Request(_GET, 0, _name(target), "read counters of", target))
    return {key: count for answer in answers for key, count in parse_counts(answer)}


def parse_counts(payload: bytes) -> Iterable[tuple[bytes, Count]]:
    """Keys and counts out of one message."""
    codec.unpack_header(_HEADER, payload)
    elements = codec.attributes(payload, _HEADER.size).get(_ELEMENTS, b"")
    return _parse_alike(elements) or _parse_counts(elements)


def _parse_alike(elements: bytes) -> list[tuple[bytes, Count]]:
    """The same by the form of the first one, ten times as fast; nothing where not all have that form."""
    size = int.from_bytes(elements[:2], sys.byteorder)
    if not _COUNTED_LEAST <= size <= len(elements):
        return []
    form = struct.Struct(f">12s{size - _COUNTED_LEAST}s24sQ4sQ")  # heads, key, heads and name, octets, head, packets
    if len(elements) % form.size:
        return []
    rows = list(form.iter_unpack(elements))
    first = rows[0]
    if (first[2][-4:], first[4]) != _NUMBER_HEADS or any(row[::4] != first[::4] or row[2] != first[2] for row in rows):
        return []
    found = [(row[1], Count(row[5], row[3])) for row in rows]
    return found if found[:1] == list(_parse_counts(elements[: form.size])) else []


def _parse_counts(elements: bytes) -> Iterator[tuple[bytes, Count]]:
    for _, data in codec.attribute_list(elements):
        found = codec.attributes(data)
        counter = codec.attributes(codec.attributes(found.get(_STATE, b"")).get(_STATE_DATA, b""))
        packets, octets = (codec.to_big_number(counter.get(kind)) for kind in (_PACKETS, _OCTETS))
        yield _parse_value(found.get(_KEY, b"")), Count(packets, octets)


def _parse_element(data: bytes) -> Element:
    found = codec.attributes(data)
    content = codec.attributes(found.get(_DATA, b""))
    return Element(
        key=_parse_value(found.get(_KEY, b"")),
        value=content.get(_VALUE, b""),
        verdict=_parse_verdict(content[_VERDICT]) if _VERDICT in content else None,
    )


def _parse_value(data: bytes) -> bytes:
    return codec.attributes(data).get(_VALUE, b"")


def _parse_verdict(data: bytes) -> Verdict:
    found = codec.attributes(data)
    code = int.from_bytes(found.get(_CODE, b""), "big", signed=True)
    return Verdict(code, codec.to_text(found.get(_CHAIN)))


def _lists(target: SetName, elements: Iterable[Element]) -> Iterator[bytes]:
    """Payloads with as many elements each as a message holds."""
    name = _name(target)
    batch: list[bytes] = []
    size = 0
    for element in elements:
        data = _encode_element(element)
        if size + len(data) > _LIST_BYTES:
            yield name + codec.nest(_ELEMENTS, *batch)
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield name + codec.nest(_ELEMENTS, *batch)


def _name(target: SetName) -> bytes:
    return table_header(target.family, target.table) + codec.text(_SET, target.name)


def table_header(family: int, table: str) -> bytes:
    """What every message about a part of a table begins with."""
    return _HEADER.pack(family, 0, 0) + codec.text(_TABLE, table)


def _encode_element(element: Element) -> bytes:
    data = codec.nested(_KEY, _VALUE, element.key)
    if element.value:
        data += codec.nested(_DATA, _VALUE, element.value)
    if element.verdict is not None:
        data += codec.nest(_DATA, verdict_data(element.verdict.code, element.verdict.chain))
    return codec.nest(_ELEMENT, data)


def verdict_data(code: int, chain: str = "") -> bytes:
    """A verdict as the value of an element or of an expression."""
    return codec.nest(_VERDICT, codec.be32(_CODE, code), codec.text(_CHAIN, chain) if chain else b"")
