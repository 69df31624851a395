"""Encodes DNS messages: names, records, queries and answers."""

from __future__ import annotations

import socket
import struct

from weft.dns.wire import (
    CD,
    DO,
    EDNS_UDP_SIZE,
    HEADER,
    HEADER_SIZE,
    IN,
    MAX_LABEL_LENGTH,
    MAX_NAME_LENGTH,
    OPCODE_MASK,
    QR,
    QTYPE_QCLASS,
    RA,
    RCODE_MASK,
    RD,
    RR_FIXED,
    TC,
    Question,
    Rcode,
    Type,
)
from weft.domain.dns.names import Record
from weft.domain.errors import Invalid

# A compression pointer to offset 12: the name of the question, which stands right behind the header.
_OWNER = b"\xc0\x0c"
# The number of the option EDE.
_EXTENDED_ERROR = 15
_LENGTHS = {length: bytes((length,)) for length in range(1, MAX_LABEL_LENGTH + 1)}


def encode_name(name: str) -> bytes:
    """A name in wire format and lower case; `Invalid` when a label is empty or too long, or the name is too long."""
    try:
        labels = name.encode("ascii").lower().split(b".") if name else []
        encoded = b"".join([_LENGTHS[len(label)] + label for label in labels]) + b"\0"
    except (KeyError, UnicodeEncodeError) as error:
        raise Invalid(
            f"{name[:80]!r} is not a name: its labels must be 1 to {MAX_LABEL_LENGTH} ASCII characters long"
        ) from error
    if len(encoded) > MAX_NAME_LENGTH:
        raise Invalid(f"{name[:80]!r} is not a name: it is too long")
    return encoded


def question_key(name: bytes, kind: int) -> bytes:
    """The question section for an encoded name and a type."""
    return name + QTYPE_QCLASS.pack(kind, IN)


def encode_record(record: Record, *, ttl: int) -> bytes:
    """The record as answer to a question about its name; `Invalid` when its data does not fit its type."""
    kind = Type[record.type]
    return _OWNER + encode_rr(kind, _data_of(record), ttl=ttl)


def encode_rr(kind: int, data: bytes, *, ttl: int) -> bytes:
    """A record without its owner name."""
    return RR_FIXED.pack(kind, IN, ttl, len(data)) + data


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


def cname_target(record: bytes) -> bytes:
    """The target of an encoded CNAME record."""
    return record[len(_OWNER) + RR_FIXED.size :]


def srv_target(record: bytes) -> bytes:
    """The target of an encoded SRV record."""
    return cname_target(record)[6:]  # behind priority, weight and port


def with_owner(name: bytes, record: bytes) -> bytes:
    """An encoded record with another owner than the name in the question."""
    return name + record[len(_OWNER) :]


def opt_record(*, code: int = 0, dnssec: bool = False, size: int = EDNS_UDP_SIZE, options: bytes = b"") -> bytes:
    """Our OPT record."""
    # Class has the UDP size; TTL has the upper 8 bits of the rcode, the version 0 and the flags (RFC 6891 6.1.3).
    flags = code >> 4 << 24 | (DO if dnssec else 0)
    return b"\0" + RR_FIXED.pack(Type.OPT, size, flags, len(options)) + options


def _extended_error(reason: str) -> bytes:
    """The EDNS option that tells people why a query failed (RFC 8914); `dig` shows it. Code 0: other."""
    text = reason.encode()
    return struct.pack("!3H", _EXTENDED_ERROR, 2 + len(text), 0) + text


def encode_question(question: Question, *, msg_id: int) -> bytes:
    """The query to an upstream: with an id of our own, and only the flags that concern the answer."""
    edns = question.edns
    flags = question.flags & (RD | CD)
    head = HEADER.pack(msg_id, flags, 1, 0, 0, edns is not None)
    return head + question.wire_question + (opt_record(size=question.max_size, dnssec=edns.dnssec) if edns else b"")


def adapt_answer(data: bytes, question: Question) -> bytes:
    """A checked answer for a client whose query differs in id and letter case only."""
    # Letter case goes back as it came: clients use it against forgery (draft-vixie-dnsext-dns0x20).
    return (
        question.id.to_bytes(2)
        + data[2:HEADER_SIZE]
        + question.wire_question
        + data[HEADER_SIZE + len(question.wire_question) :]
    )


def encode_answer(
    question: Question,
    *,
    code: Rcode = Rcode.NOERROR,
    flags: int = 0,
    answers: tuple[bytes, ...] = (),
    authority: tuple[bytes, ...] = (),
    additional: tuple[bytes, ...] = (),
    reason: str = "",
    max_size: int,
) -> bytes:
    """An answer of at most `max_size` bytes. Additional records go first; then answers are cut, and TC is set."""
    edns = question.edns
    options = _extended_error(reason) if reason else b""
    opt = opt_record(code=code, dnssec=edns.dnssec, options=options) if edns else b""
    free = max_size - HEADER_SIZE - len(question.wire_question) - len(opt)
    free -= sum(map(len, answers)) + sum(map(len, authority))
    flags |= QR | RA | question.flags & (OPCODE_MASK | RD | CD) | code & RCODE_MASK
    if free < sum(map(len, additional)):
        additional = ()
    # Truncation drops whole records: half a record would make the message malformed.
    kept = len(answers)
    while free < 0 and kept:
        flags |= TC
        kept -= 1
        free += len(answers[kept])
    answers = answers[:kept]
    counts = 1, len(answers), len(authority), len(additional) + (edns is not None)
    head = HEADER.pack(question.id, flags, *counts)
    return b"".join((head, question.wire_question, *answers, *authority, *additional, opt))


def encode_error(data: bytes, code: Rcode) -> bytes:
    """An answer to a message whose question cannot be read: the header alone."""
    msg_id, flags = QTYPE_QCLASS.unpack_from(data)  # two 16-bit fields, as in the question
    return HEADER.pack(msg_id, QR | flags & (OPCODE_MASK | RD) | code, 0, 0, 0, 0)
