"""DNS messages as we send them: names, records, questions and answers."""

from __future__ import annotations

import socket
import struct

from weft.dns.wire import (
    CD,
    CODE,
    DNSSEC_OK,
    HEADER,
    HEADER_SIZE,
    IN,
    LARGEST_DATAGRAM,
    LONGEST_LABEL,
    LONGEST_NAME,
    OPCODE,
    QR,
    RA,
    RD,
    RECORD,
    TAIL,
    TC,
    Code,
    Question,
    Type,
)
from weft.domain.dns.names import Record
from weft.domain.errors import Invalid

# The name that was asked for, by a pointer to it: the question always stands right behind the header.
_OWNER = b"\xc0\x0c"
_LENGTHS = {length: bytes((length,)) for length in range(1, LONGEST_LABEL + 1)}


def encode_name(name: str) -> bytes:
    """A name as it stands in messages, in lower case; `Invalid` when a label or the whole is too long or empty."""
    labels = name.lower().encode("ascii", "replace").split(b".") if name else []
    try:
        encoded = b"".join([_LENGTHS[len(label)] + label for label in labels]) + b"\0"
    except KeyError as error:
        raise Invalid(
            f"{name[:80]!r} is not a name: its labels must be 1 to {LONGEST_LABEL} characters long"
        ) from error
    if len(encoded) > LONGEST_NAME:
        raise Invalid(f"{name[:80]!r} is not a name: it is too long")
    return encoded


def question_key(name: bytes, kind: int) -> bytes:
    """A question about a name in lower case, as it stands in messages."""
    return name + TAIL.pack(kind, IN)


def encode_record(record: Record, *, ttl: int) -> bytes:
    """The record as an answer to a question about its name; `Invalid` when its data is not what its type demands."""
    kind = Type[record.type]
    return _OWNER + encode_data(kind, _data_of(record), ttl=ttl)


def encode_data(kind: int, data: bytes, *, ttl: int) -> bytes:
    """A record without its owner."""
    return RECORD.pack(kind, IN, ttl, len(data)) + data


def _data_of(record: Record) -> bytes:
    try:
        match record.type:
            case "A":
                return socket.inet_pton(socket.AF_INET, record.data)
            case "AAAA":
                return socket.inet_pton(socket.AF_INET6, record.data)
            case "CNAME" | "PTR":
                return encode_name(record.data)
            case "SRV":
                priority, weight, port, target = record.data.split(" ")
                return struct.pack("!3H", int(priority), int(weight), int(port)) + encode_name(target)
    except (ValueError, OSError, struct.error) as error:
        raise Invalid(f"{record.data[:80]!r} is not the data of a record of type {record.type}") from error


def alias_target(record: bytes) -> bytes:
    """The name that an encoded CNAME answer points to."""
    return record[len(_OWNER) + RECORD.size :]


def srv_target(record: bytes) -> bytes:
    """The name that an encoded SRV answer points to."""
    return alias_target(record)[6:]


def with_owner(name: bytes, record: bytes) -> bytes:
    """An encoded answer, told of a name that was not asked for."""
    return name + record[len(_OWNER) :]


def opt_record(*, code: int = 0, dnssec: bool = False, size: int = LARGEST_DATAGRAM) -> bytes:
    """What we say of ourselves."""
    return b"\0" + RECORD.pack(Type.OPT, size, code >> 4 << 24 | (DNSSEC_OK if dnssec else 0), 0)


def encode_question(question: Question, *, number: int) -> bytes:
    """The same question asked anew: with a number of our own, and nothing of the questioner but what matters."""
    edns = question.edns
    flags = question.flags & (RD | CD)
    head = HEADER.pack(number, flags, 1, 0, 0, edns is not None)
    return head + question.asked + (opt_record(size=question.room, dnssec=edns.dnssec) if edns else b"")


def adapt_answer(data: bytes, question: Question) -> bytes:
    """An answer that was checked, as an answer to a question which differs in number and case of letters only."""
    return question.id.to_bytes(2) + data[2:HEADER_SIZE] + question.asked + data[HEADER_SIZE + len(question.asked) :]


def encode_answer(
    question: Question,
    *,
    code: Code = Code.NOERROR,
    flags: int = 0,
    answers: tuple[bytes, ...] = (),
    authority: tuple[bytes, ...] = (),
    additional: tuple[bytes, ...] = (),
    room: int,
) -> bytes:
    """An answer that fits into the room. Extras are left out first; answers that do not fit make it a truncated one."""
    edns = question.edns
    opt = opt_record(code=code, dnssec=edns.dnssec) if edns else b""
    free = room - HEADER_SIZE - len(question.asked) - len(opt)
    free -= sum(map(len, answers)) + sum(map(len, authority))
    flags |= QR | RA | question.flags & (OPCODE | RD | CD) | code & CODE
    if free < sum(map(len, additional)):
        additional = ()
    while free < 0 and answers:
        flags |= TC
        free += len(answers[-1])
        answers = answers[:-1]
    counts = 1, len(answers), len(authority), len(additional) + (edns is not None)
    head = HEADER.pack(question.id, flags, *counts)
    return b"".join((head, question.asked, *answers, *authority, *additional, opt))


def encode_refusal(data: bytes, code: Code) -> bytes:
    """An answer to a message whose question cannot be read: the header alone."""
    number, flags = TAIL.unpack_from(data)
    return HEADER.pack(number, QR | flags & (OPCODE | RD) | code, 0, 0, 0, 0)
