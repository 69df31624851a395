"""DNS messages (RFC 1035, 6891) as they come: questions are read, answers of others are checked.

Whatever comes in was sent by somebody who may mean ill: every reader ends in bounded time with a value or `Malformed`.
dnspython is the judge in the tests.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from weft.domain.errors import Malformed

HEADER_SIZE = 12
QR, TC, RD, RA, CD = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
AA = 0x0400
OPCODE = 0x7800
CODE = 0x000F
DNSSEC_OK = 0x8000
# What we send by UDP at most, and say so: it passes every path without being cut into fragments.
LARGEST_DATAGRAM = 1232
SMALLEST_DATAGRAM = 512
LARGEST_MESSAGE = 65_535
IN = 1

HEADER = struct.Struct("!6H")
TAIL = struct.Struct("!HH")
RECORD = struct.Struct("!HHIH")
LONGEST_NAME, LONGEST_LABEL = 255, 63
_POINTER = 0xC0


class Type(IntEnum):
    """Types of records that we know by name. What lies from 128 to 255 asks for something else than records."""

    A = 1
    CNAME = 5
    SOA = 6
    PTR = 12
    AAAA = 28
    SRV = 33
    OPT = 41

    @staticmethod
    def is_meta(number: int) -> bool:
        """ANY, transfers, signatures: nothing that can be looked up."""
        return 128 <= number <= 255 or number == Type.OPT


class Code(IntEnum):
    """How an answer ends. What is above 15 has its upper part in the OPT record."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


_ADDRESS_SIZES: dict[int, int] = {Type.A: 4, Type.AAAA: 16}


class Edns(NamedTuple):
    """What a questioner says of itself in an OPT record."""

    size: int
    version: int
    dnssec: bool


class Question(NamedTuple):
    """One question that was read. `asked` is its name, type and class as they came; `name` is in lower case."""

    id: int
    flags: int
    asked: bytes
    name: bytes
    type: int
    cls: int
    edns: Edns | None

    @property
    def room(self) -> int:
        """How much the questioner takes by UDP."""
        if self.edns is None:
            return SMALLEST_DATAGRAM
        return min(max(self.edns.size, SMALLEST_DATAGRAM), LARGEST_DATAGRAM)


def read_question(data: bytes) -> Question:
    """The question in a message, or `Malformed`. The caller has looked at the kind of the message."""
    if len(data) < HEADER_SIZE:
        raise Malformed("shorter than a header")
    number, flags, questions, answers, authorities, additionals = HEADER.unpack_from(data)
    if questions != 1:
        raise Malformed(f"{questions} questions")
    end = _end_of_name(data, HEADER_SIZE, pointers=False)
    if end + TAIL.size > len(data):
        raise Malformed("ends within the question")
    kind, cls = TAIL.unpack_from(data, end)
    asked = data[HEADER_SIZE : end + TAIL.size]
    edns = _read_edns(data, end + TAIL.size, before=answers + authorities, count=additionals)
    return Question(number, flags, asked, asked[: -TAIL.size].lower(), kind, cls, edns)


def _read_edns(data: bytes, at: int, *, before: int, count: int) -> Edns | None:
    found: Edns | None = None
    for number in range(before + count):
        start = at
        at, kind, cls, ttl = _skip_record(data, at)
        if number >= before and kind == Type.OPT:
            if found or data[start]:
                raise Malformed("a second OPT record, or one with a name")
            found = Edns(cls, ttl >> 16 & 0xFF, bool(ttl & DNSSEC_OK))
    if at != len(data):
        raise Malformed("something follows the message")
    return found


def _skip_record(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Where the record that begins here ends, and its type, class and TTL."""
    at = _end_of_name(data, at, pointers=True)
    if at + RECORD.size > len(data):
        raise Malformed("ends within a record")
    kind, cls, ttl, length = RECORD.unpack_from(data, at)
    at += RECORD.size + length
    if at > len(data):
        raise Malformed("ends within a record's data")
    return at, kind, cls, ttl


def _end_of_name(data: bytes, at: int, *, pointers: bool) -> int:
    """Where the name that begins here ends. A pointer ends it and must lead back, but is not followed."""
    start = at
    while True:
        if at >= len(data):
            raise Malformed("ends within a name")
        length = data[at]
        if length == 0:
            at += 1
            break
        if length > LONGEST_LABEL:
            if not pointers:
                raise Malformed("a label of unknown form")
            _pointer(data, at, before=start)
            at += 2
            break
        at += 1 + length
    if at - start > LONGEST_NAME:
        raise Malformed("a name longer than 255 bytes")
    return at


def read_name(data: bytes, at: int) -> bytes:
    """The name that begins here, whole and in lower case. Each pointer leads further back, so there is an end to it."""
    labels: list[bytes] = []
    size, start = 1, at
    while True:
        length = data[at : at + 1]
        if not length:
            raise Malformed("ends within a name")
        if length == b"\0":
            return (b"".join(labels) + length).lower()
        if length[0] > LONGEST_LABEL:
            start = at = _pointer(data, at, before=start)
            continue
        end = at + 1 + length[0]
        labels.append(data[at:end])
        size += end - at
        if end > len(data) or size > LONGEST_NAME:
            raise Malformed("a name that ends nowhere, or is longer than 255 bytes")
        at = end


def _pointer(data: bytes, at: int, *, before: int) -> int:
    """Where a pointer leads: back, to before the name or the part of a name that it ends."""
    if data[at] < _POINTER or at + 1 >= len(data):
        raise Malformed("a label of unknown form")
    target = (data[at] & ~_POINTER) << 8 | data[at + 1]
    if target >= before:
        raise Malformed("a pointer that does not lead back")
    return target


def labels_of(name: bytes) -> list[bytes]:
    """The labels of a name that was read, in order."""
    labels, at = [], 0
    while length := name[at]:
        labels.append(name[at + 1 : at + 1 + length])
        at += 1 + length
    return labels


class Found(NamedTuple):
    """A record of an answer, without anything that points into its message."""

    owner: bytes
    type: int
    ttl: int
    data: bytes


def read_addresses(data: bytes, question: Question) -> list[Found]:
    """The addresses and other names in an answer that was checked, in their order; the rest is passed over."""
    at = HEADER_SIZE + len(question.asked)
    found: list[Found] = []
    for _ in range(HEADER.unpack_from(data)[3]):
        owner = read_name(data, at)
        end, kind, cls, ttl = _skip_record(data, at)
        begin = _end_of_name(data, at, pointers=True) + RECORD.size
        at = end
        if cls == IN and kind == Type.CNAME:
            found.append(Found(owner, kind, ttl, read_name(data, begin)))
        elif cls == IN and end - begin == _ADDRESS_SIZES.get(kind):
            found.append(Found(owner, kind, ttl, data[begin:end]))
    return found


def check_answer(data: bytes, *, number: int, question: Question) -> int:
    """How a message ends that is an answer to the question as we sent it; `Malformed` for anything else."""
    if len(data) < HEADER_SIZE:
        raise Malformed("shorter than a header")
    got, flags, questions, *counts = HEADER.unpack_from(data)
    if got != number or flags & (QR | OPCODE) != QR or questions != 1:
        raise Malformed("not an answer to this question")
    at = HEADER_SIZE + len(question.asked)
    if data[HEADER_SIZE:at].lower() != question.asked.lower():
        raise Malformed("an answer to another question")
    for _ in range(sum(counts)):
        at, *_ = _skip_record(data, at)
    if at != len(data):
        raise Malformed("something follows the message")
    return int(flags & CODE)
