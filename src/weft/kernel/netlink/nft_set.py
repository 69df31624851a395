"""Elements of nf_tables sets and maps: add and delete in one transaction, read back (`linux/netfilter/nf_tables.h`).

The fast path beside `nftables`: no text is parsed and no cache is read. A key concatenates fields in the order of the
set's type: `key(interface("wp1"), pack_mac("02:…"), pack_address(pod))` for `ifname . ether_addr . ipv4_addr`.

A transaction is exact: deleting an element that does not exist (`ENOENT`) or adding another value under an existing
key (`EEXIST`) raises `NetlinkError` and changes nothing; the caller then reads the set again. Adding an element that
exists with the same value succeeds.
"""

from __future__ import annotations

import errno
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.netlink import NLM_F_CREATE
from weft.kernel.uapi.nf_tables import (
    NFNL_MSG_BATCH_BEGIN,
    NFNL_MSG_BATCH_END,
    NFNL_SUBSYS_NFTABLES,
    NFT_MSG_DELSETELEM,
    NFT_MSG_GETGEN,
    NFT_MSG_GETSET,
    NFT_MSG_GETSETELEM,
    NFT_MSG_NEWSETELEM,
    NFTA_COUNTER_BYTES,
    NFTA_COUNTER_PACKETS,
    NFTA_DATA_VALUE,
    NFTA_DATA_VERDICT,
    NFTA_EXPR_DATA,
    NFTA_GEN_ID,
    NFTA_LIST_ELEM,
    NFTA_SET_ELEM_DATA,
    NFTA_SET_ELEM_EXPR,
    NFTA_SET_ELEM_KEY,
    NFTA_SET_ELEM_KEY_END,
    NFTA_SET_ELEM_LIST_ELEMENTS,
    NFTA_SET_ELEM_LIST_SET,
    NFTA_SET_ELEM_LIST_TABLE,
    NFTA_VERDICT_CHAIN,
    NFTA_VERDICT_CODE,
)

# nfnetlink message types: the subsystem in the high byte, the command in the low one.
_GET_SET, _NEW_ELEMENTS, _GET_ELEMENTS, _DELETE_ELEMENTS, _GET_GENERATION = (
    NFNL_SUBSYS_NFTABLES << 8 | command
    for command in (NFT_MSG_GETSET, NFT_MSG_NEWSETELEM, NFT_MSG_GETSETELEM, NFT_MSG_DELSETELEM, NFT_MSG_GETGEN)
)
_HEADER = struct.Struct(">BBH")  # struct nfgenmsg: family, version, resource id
_COUNTER_ELEMENT_BYTES = 56  # bytes of an element with a counter, besides its key
_COUNTER_HEADERS = tuple(codec.attribute(kind, bytes(8))[:4] for kind in (NFTA_COUNTER_BYTES, NFTA_COUNTER_PACKETS))
_IFNAMSIZ = 16
_GONE = frozenset({errno.ENOENT})
# nla_len has 16 bits, so one list of elements holds at most 64 KiB.
_LIST_BYTES = 60_000

_BATCH_HEADER = _HEADER.pack(codec.AF_UNSPEC, 0, NFNL_SUBSYS_NFTABLES)
_BEGIN = Request(NFNL_MSG_BATCH_BEGIN, 0, _BATCH_HEADER, "change", "nf_tables")
_END = Request(NFNL_MSG_BATCH_END, 0, _BATCH_HEADER, "change", "nf_tables")


class SetName(NamedTuple):
    """A set or a map of a table."""

    family: int
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table} {self.name}"


class Verdict(msgspec.Struct, frozen=True):
    """The value of a verdict map's element; the chain goes with `NFT_JUMP` and `NFT_GOTO`."""

    code: int
    chain: str = ""


class Element(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An element of a set; of a map, when it has a value or a verdict."""

    key: bytes
    value: bytes = b""
    # The last key of a range, in a set of concatenated intervals.
    key_end: bytes = b""
    verdict: Verdict | None = None


def key(*fields: bytes) -> bytes:
    """Encode a key or a value of one or several fields."""
    if len(fields) == 1:
        return fields[0]
    # The kernel aligns each field of a concatenation to a 32-bit register.
    return b"".join(field + bytes(-len(field) % 4) for field in fields)


def interface(name: str) -> bytes:
    """Encode a field of type `ifname`."""
    return name.encode().ljust(_IFNAMSIZ, b"\0")


def mark(number: int) -> bytes:
    """Encode a field of type `mark`: host byte order, as the only one of these types."""
    return number.to_bytes(4, sys.byteorder)


def port(number: int) -> bytes:
    """Encode a field of type `inet_service`."""
    return number.to_bytes(2, "big")


def protocol(number: int) -> bytes:
    """Encode a field of type `inet_proto`."""
    return number.to_bytes(1, "big")


def put_elements(target: SetName, elements: Iterable[Element]) -> list[Request]:
    """Return the requests for `apply_changes` that add elements."""
    return [
        Request(_NEW_ELEMENTS, NLM_F_CREATE, payload, "add elements to", target) for payload in _lists(target, elements)
    ]


def drop_elements(target: SetName, elements: Iterable[Element]) -> list[Request]:
    """Return the requests for `apply_changes` that delete elements by key, whatever their values."""
    keys = (msgspec.structs.replace(element, value=b"", verdict=None) for element in elements)
    return [Request(_DELETE_ELEMENTS, 0, payload, "delete elements of", target) for payload in _lists(target, keys)]


def apply_changes(netlink: NetlinkSocket, requests: Sequence[Request]) -> None:
    """Apply all changes in one transaction, or none. No packet sees a part of them."""
    if requests:
        netlink.send_transaction(requests, begin=_BEGIN, end=_END)


def read_elements(netlink: NetlinkSocket, target: SetName) -> list[Element]:
    """Read all elements; `NetlinkError` with `ENOENT` when there is no such set."""
    replies = netlink.dump(Request(_GET_ELEMENTS, 0, _set_header(target), "read elements of", target))
    return [element for reply in replies for element in parse_elements(reply)]


def parse_elements(payload: bytes) -> Iterator[Element]:
    """Decode the elements of one message."""
    codec.unpack_header(_HEADER, payload)
    elements = codec.attributes(payload, _HEADER.size).get(NFTA_SET_ELEM_LIST_ELEMENTS, b"")
    return (_parse_element(data) for _, data in codec.attribute_list(elements))


def has_set(netlink: NetlinkSocket, target: SetName) -> bool:
    """Whether the set or map exists."""
    return netlink.get(Request(_GET_SET, 0, _set_header(target), "read", target, _GONE)) is not None


def read_generation(netlink: NetlinkSocket) -> int:
    """Read the ruleset generation, which every transaction of any process in the namespace increases by one."""
    reply = netlink.get(Request(_GET_GENERATION, 0, _BATCH_HEADER, "read", "nf_tables generation"))
    return codec.to_int_be(codec.attributes(reply or b"", _HEADER.size).get(NFTA_GEN_ID))


class Count(NamedTuple):
    """The value of an element's counter."""

    packets: int
    octets: int


def read_counts(netlink: NetlinkSocket, target: SetName) -> dict[bytes, Count]:
    """Read the counters of a set's elements by key."""
    replies = netlink.dump(Request(_GET_ELEMENTS, 0, _set_header(target), "read counters of", target))
    return {key: count for reply in replies for key, count in parse_counts(reply)}


def parse_counts(payload: bytes) -> Iterable[tuple[bytes, Count]]:
    """Decode the keys and counters of one message."""
    codec.unpack_header(_HEADER, payload)
    elements = codec.attributes(payload, _HEADER.size).get(NFTA_SET_ELEM_LIST_ELEMENTS, b"")
    return _parse_uniform_counts(elements) or _parse_counts(elements)


def _parse_uniform_counts(elements: bytes) -> list[tuple[bytes, Count]]:
    """Decode with one struct made from the first element, ten times as fast; empty unless all have its layout."""
    size = int.from_bytes(elements[:2], sys.byteorder)
    if not _COUNTER_ELEMENT_BYTES <= size <= len(elements):
        return []
    form = struct.Struct(
        f">12s{size - _COUNTER_ELEMENT_BYTES}s24sQ4sQ"
    )  # headers, key, headers, bytes, header, packets
    if len(elements) % form.size:
        return []
    rows = list(form.iter_unpack(elements))
    first = rows[0]
    if (first[2][-4:], first[4]) != _COUNTER_HEADERS or any(
        row[::4] != first[::4] or row[2] != first[2] for row in rows
    ):
        return []
    found = [(row[1], Count(row[5], row[3])) for row in rows]
    return found if found[:1] == list(_parse_counts(elements[: form.size])) else []


def _parse_counts(elements: bytes) -> Iterator[tuple[bytes, Count]]:
    for _, data in codec.attribute_list(elements):
        found = codec.attributes(data)
        counter = codec.attributes(codec.attributes(found.get(NFTA_SET_ELEM_EXPR, b"")).get(NFTA_EXPR_DATA, b""))
        packets, octets = (codec.to_int_be(counter.get(kind)) for kind in (NFTA_COUNTER_PACKETS, NFTA_COUNTER_BYTES))
        yield _parse_value(found.get(NFTA_SET_ELEM_KEY, b"")), Count(packets, octets)


def _parse_element(data: bytes) -> Element:
    found = codec.attributes(data)
    content = codec.attributes(found.get(NFTA_SET_ELEM_DATA, b""))
    return Element(
        key=_parse_value(found.get(NFTA_SET_ELEM_KEY, b"")),
        value=content.get(NFTA_DATA_VALUE, b""),
        key_end=_parse_value(found.get(NFTA_SET_ELEM_KEY_END, b"")),
        verdict=_parse_verdict(content[NFTA_DATA_VERDICT]) if NFTA_DATA_VERDICT in content else None,
    )


def _parse_value(data: bytes) -> bytes:
    return codec.attributes(data).get(NFTA_DATA_VALUE, b"")


def _parse_verdict(data: bytes) -> Verdict:
    found = codec.attributes(data)
    code = int.from_bytes(found.get(NFTA_VERDICT_CODE, b""), "big", signed=True)
    return Verdict(code, codec.to_text(found.get(NFTA_VERDICT_CHAIN)))


def _lists(target: SetName, elements: Iterable[Element]) -> Iterator[bytes]:
    """Yield payloads with as many elements each as a message holds."""
    name = _set_header(target)
    batch: list[bytes] = []
    size = 0
    for element in elements:
        data = _encode_element(element)
        if size + len(data) > _LIST_BYTES:
            yield name + codec.nest(NFTA_SET_ELEM_LIST_ELEMENTS, *batch)
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield name + codec.nest(NFTA_SET_ELEM_LIST_ELEMENTS, *batch)


def _set_header(target: SetName) -> bytes:
    return table_header(target.family, target.table) + codec.text(NFTA_SET_ELEM_LIST_SET, target.name)


def table_header(family: int, table: str) -> bytes:
    """Encode what every message about an object of a table begins with."""
    return _HEADER.pack(family, 0, 0) + codec.text(NFTA_SET_ELEM_LIST_TABLE, table)


def _encode_element(element: Element) -> bytes:
    data = codec.nested(NFTA_SET_ELEM_KEY, NFTA_DATA_VALUE, element.key)
    if element.key_end:
        data += codec.nested(NFTA_SET_ELEM_KEY_END, NFTA_DATA_VALUE, element.key_end)
    if element.value:
        data += codec.nested(NFTA_SET_ELEM_DATA, NFTA_DATA_VALUE, element.value)
    if element.verdict is not None:
        data += codec.nest(NFTA_SET_ELEM_DATA, verdict_data(element.verdict.code, element.verdict.chain))
    return codec.nest(NFTA_LIST_ELEM, data)


def verdict_data(code: int, chain: str = "") -> bytes:
    """Encode a verdict as the value of an element or of an expression."""
    return codec.nest(
        NFTA_DATA_VERDICT, codec.be32(NFTA_VERDICT_CODE, code), codec.text(NFTA_VERDICT_CHAIN, chain) if chain else b""
    )
