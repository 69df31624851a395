"""Reads DNS messages (RFC 1035, RFC 6891): queries of clients, and answers of upstream resolvers.

Input is untrusted: every reader ends in bounded time with a value or `Malformed`. The tests compare with dnspython.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from weft.domain.errors import Malformed

HEADER_SIZE = 12
# Header flags and masks of RFC 1035 4.1.1; CD is RFC 4035's.
QR, TC, RD, RA, CD = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
AA = 0x0400
OPCODE_MASK = 0x7800
RCODE_MASK = 0x000F
# The DNSSEC OK bit in the TTL field of an OPT record (RFC 3225).
DO = 0x8000
# The largest answer over UDP, also advertised in our OPT records: DNS flag day 2020's size, which avoids fragments.
EDNS_UDP_SIZE = 1232
# What every client takes over UDP, with or without EDNS.
MIN_UDP_SIZE = 512
MAX_MESSAGE_SIZE = 65_535
IN = 1

HEADER = struct.Struct("!6H")
QTYPE_QCLASS = struct.Struct("!HH")
RR_FIXED = struct.Struct("!HHIH")
MAX_NAME_LENGTH, MAX_LABEL_LENGTH = 255, 63
# The two upper bits of a length byte mark a compression pointer.
_POINTER = 0xC0
# A name has at most 127 labels, so more pointers serve only to keep us busy: 64 KiB have room for chains of thousands.
_MAX_POINTERS = 127
# Records of an upstream's answer that are read; more addresses than this help no client.
_MAX_RECORDS = 256


class Type(IntEnum):
    """Record types that we use by name."""

    A = 1
    CNAME = 5
    SOA = 6
    PTR = 12
    AAAA = 28
    SRV = 33
    OPT = 41

    @staticmethod
    def is_meta(number: int) -> bool:
        """Whether it is a QTYPE or meta type (ANY, AXFR, TSIG), which no record set has."""
        return 128 <= number <= 255 or number == Type.OPT


class Rcode(IntEnum):
    """Response codes. Those above 15 have their upper bits in the OPT record."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


_ADDRESS_SIZES: dict[int, int] = {Type.A: 4, Type.AAAA: 16}


class Edns(NamedTuple):
    """The OPT record of a query."""

    udp_size: int
    version: int
    dnssec: bool


class Question(NamedTuple):
    """A query. `wire_question` is its question section as received; `name` is in lower case."""

    id: int
    flags: int
    wire_question: bytes
    name: bytes
    type: int
    cls: int
    edns: Edns | None

    @property
    def max_size(self) -> int:
        """The largest answer that the client takes over UDP."""
        if self.edns is None:
            return MIN_UDP_SIZE
        return min(max(self.edns.udp_size, MIN_UDP_SIZE), EDNS_UDP_SIZE)


def read_question(data: bytes) -> Question:
    """The query in a message, or `Malformed`. The caller has checked QR and opcode."""
    if len(data) < HEADER_SIZE:
        raise Malformed("shorter than a header")
    msg_id, flags, questions, answers, authorities, additionals = HEADER.unpack_from(data)
    # QDCOUNT above 1 has no defined meaning (RFC 9619).
    if questions != 1:
        raise Malformed(f"{questions} questions")
    end = _end_of_name(data, HEADER_SIZE, pointers=False)
    if end + QTYPE_QCLASS.size > len(data):
        raise Malformed("ends within the question")
    kind, cls = QTYPE_QCLASS.unpack_from(data, end)
    wire_question = data[HEADER_SIZE : end + QTYPE_QCLASS.size]
    edns = _read_edns(data, end + QTYPE_QCLASS.size, before=answers + authorities, count=additionals)
    return Question(msg_id, flags, wire_question, wire_question[: -QTYPE_QCLASS.size].lower(), kind, cls, edns)


def _read_edns(data: bytes, at: int, *, before: int, count: int) -> Edns | None:
    found: Edns | None = None
    for number in range(before + count):
        start = at
        at, kind, cls, ttl = _skip_record(data, at)
        if number >= before and kind == Type.OPT:
            if found or data[start]:
                raise Malformed("a second OPT record, or one with a name")
            found = Edns(cls, ttl >> 16 & 0xFF, bool(ttl & DO))
    if at != len(data):
        raise Malformed("trailing bytes")
    return found


def _skip_record(data: bytes, at: int) -> tuple[int, int, int, int]:
    """The offset behind the record at `at`, and its type, class and TTL."""
    at = _end_of_name(data, at, pointers=True)
    if at + RR_FIXED.size > len(data):
        raise Malformed("ends within a record")
    kind, cls, ttl, length = RR_FIXED.unpack_from(data, at)
    at += RR_FIXED.size + length
    if at > len(data):
        raise Malformed("ends within a record's data")
    return at, kind, cls, ttl


def _end_of_name(data: bytes, at: int, *, pointers: bool) -> int:
    """The offset behind the name at `at`. A compression pointer ends it; it must point back, and is not followed."""
    start = at
    while True:
        if at >= len(data):
            raise Malformed("ends within a name")
        length = data[at]
        if length == 0:
            at += 1
            break
        if length > MAX_LABEL_LENGTH:
            if not pointers:
                raise Malformed("a label of unknown form")
            _pointer(data, at, before=start)
            at += 2
            break
        at += 1 + length
    if at - start > MAX_NAME_LENGTH:
        raise Malformed("a name longer than 255 bytes")
    return at


def read_name(data: bytes, at: int) -> bytes:
    """The name at `at`, decompressed and in lower case."""
    labels: list[bytes] = []
    size, start, pointers = 1, at, 0
    while True:
        length = data[at : at + 1]
        if not length:
            raise Malformed("ends within a name")
        if length == b"\0":
            return (b"".join(labels) + length).lower()
        if length[0] > MAX_LABEL_LENGTH:
            # Each pointer must point before the part it ends, so a loop is impossible.
            start = at = _pointer(data, at, before=start)
            pointers += 1
            if pointers > _MAX_POINTERS:
                raise Malformed("a chain of pointers")
            continue
        end = at + 1 + length[0]
        labels.append(data[at:end])
        size += end - at
        if end > len(data) or size > MAX_NAME_LENGTH:
            raise Malformed("a name that ends nowhere, or is longer than 255 bytes")
        at = end


def _pointer(data: bytes, at: int, *, before: int) -> int:
    """The target of a compression pointer, which must be before the name, or part of a name, that it ends."""
    if data[at] < _POINTER or at + 1 >= len(data):
        raise Malformed("a label of unknown form")
    target = (data[at] & ~_POINTER) << 8 | data[at + 1]
    if target >= before:
        raise Malformed("a pointer that does not lead back")
    return target


def labels_of(name: bytes) -> list[bytes]:
    """The labels of a decompressed name, in order."""
    labels, at = [], 0
    while length := name[at]:
        labels.append(name[at + 1 : at + 1 + length])
        at += 1 + length
    return labels


class AnswerRecord(NamedTuple):
    """A record of an answer, decompressed."""

    owner: bytes
    type: int
    ttl: int
    data: bytes


def read_address_records(data: bytes, question: Question) -> list[AnswerRecord]:
    """The A, AAAA and CNAME records of a checked answer, in their order. Others are skipped."""
    at = HEADER_SIZE + len(question.wire_question)
    found: list[AnswerRecord] = []
    for _ in range(min(HEADER.unpack_from(data)[3], _MAX_RECORDS)):
        owner = read_name(data, at)
        end, kind, cls, ttl = _skip_record(data, at)
        begin = _end_of_name(data, at, pointers=True) + RR_FIXED.size
        at = end
        if cls == IN and kind == Type.CNAME:
            found.append(AnswerRecord(owner, kind, ttl, read_name(data, begin)))
        elif cls == IN and end - begin == _ADDRESS_SIZES.get(kind):
            found.append(AnswerRecord(owner, kind, ttl, data[begin:end]))
    return found


def check_answer(data: bytes, *, msg_id: int, question: Question) -> int:
    """The rcode of an answer to the query that we sent; `Malformed` for any other message."""
    if len(data) < HEADER_SIZE:
        raise Malformed("shorter than a header")
    got, flags, questions, *counts = HEADER.unpack_from(data)
    if got != msg_id or flags & (QR | OPCODE_MASK) != QR or questions != 1:
        raise Malformed("not an answer to this question")
    at = HEADER_SIZE + len(question.wire_question)
    if data[HEADER_SIZE:at].lower() != question.wire_question.lower():
        raise Malformed("an answer to another question")
    for _ in range(sum(counts)):
        at, *_ = _skip_record(data, at)
    if at != len(data):
        raise Malformed("trailing bytes")
    return int(flags & RCODE_MASK)
