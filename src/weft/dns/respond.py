"""Query -> answer, or the decision to forward it upstream. Pure, with a fast path for known names.

Authoritative names are never forwarded: single labels (containers, groups and services), the cluster domain, reverse
names in the tenant's subnets, and every name in the zone.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from weft.dns.encode import (
    cname_target,
    encode_answer,
    encode_error,
    encode_name,
    encode_rr,
    opt_record,
    question_key,
    srv_target,
    with_owner,
)
from weft.dns.table import RecordSet, Table
from weft.dns.wire import (
    AA,
    HEADER,
    HEADER_SIZE,
    IN,
    MAX_MESSAGE_SIZE,
    MIN_UDP_SIZE,
    QTYPE_QCLASS,
    RD,
    TC,
    Question,
    Rcode,
    Type,
    read_address_records,
    read_question,
)
from weft.domain.errors import Malformed

# How long clients may cache that a name does not exist: an endpoint may get it at any moment.
NEGATIVE_TTL = 5
_SOA_NUMBERS = struct.pack("!5I", 1, 7200, 1800, 86400, NEGATIVE_TTL)
_ROOT = b"\0"
# Bits of the third byte of a message: QR, opcode and RD. The fast path reads bytes, not the whole header.
_QR, _OPCODE, _RD = 0x80, 0x78, 0x01
# The four section counts of the header: a question alone, and a question with one additional record.
_QUESTION_ALONE, _QUESTION_AND_EXTRA = b"\0\1\0\0\0\0\0\0", b"\0\1\0\0\0\0\0\1"
# The size of an OPT record without options.
_EMPTY_OPT = 11
# More answers than this are unlikely to fit into the smallest datagram.
_FAST_PATH_ANSWERS = 20
# An A record whose owner is a compression pointer.
_SMALLEST_RECORD = 16
# Ends a loop of CNAMEs.
_MAX_CNAMES = 8


@dataclass(slots=True)
class Statistics:
    """Queries by result."""

    found: int = 0
    absent: int = 0
    invalid: int = 0
    refused: int = 0
    forwarded: int = 0
    failed: int = 0
    # Of the failed ones, those above a client's share; and TCP connections above it.
    limited: int = 0
    connections_limited: int = 0


class UpstreamQuery(NamedTuple):
    """A query to forward: the client's own question or, where CNAMEs lead from it out of the zone, their target."""

    question: Question
    query: Question
    cnames: tuple[bytes, ...] = ()

    def complete(self, answer: bytes, *, max_size: int) -> bytes:
        """The answer to the client's question, from the upstream's answer; `Malformed` when that cannot be read."""
        if not self.cnames:
            return answer
        _, flags, *_ = HEADER.unpack_from(answer)
        found = read_address_records(answer, self.query)
        # The upstream's records are encoded again: their compression pointers refer to its own message.
        records = (owner + encode_rr(kind, data, ttl=ttl) for owner, kind, ttl, data in found)
        return encode_answer(
            self.question, code=_rcode(flags), flags=flags & TC, answers=(*self.cnames, *records), max_size=max_size
        )


class Responder:
    """Answers for one tenant. `domain` is the cluster domain."""

    def __init__(self, table: Table, *, domain: str, statistics: Statistics) -> None:
        self.statistics = statistics
        self._table = table
        self._domain = encode_name(domain)
        authority = encode_name(f"ns.dns.{domain}") + encode_name(f"hostmaster.{domain}")
        self._soa = encode_rr(Type.SOA, authority + _SOA_NUMBERS, ttl=NEGATIVE_TTL)
        self._opts = opt_record(), opt_record(dnssec=True)

    def answer(self, data: bytes, *, client: str, over_tcp: bool = False) -> bytes | UpstreamQuery | None:
        """The answer, or the query to forward for it, or None where no answer must be sent."""
        if answer := self._fast_path(data):
            return answer
        if len(data) < HEADER_SIZE or data[2] & _QR:
            self.statistics.invalid += 1  # two servers that answer answers would go on endlessly
            return None
        if data[2] & _OPCODE:
            self.statistics.invalid += 1
            return encode_error(data, Rcode.NOTIMP)
        try:
            question = read_question(data)
        except Malformed:
            self.statistics.invalid += 1
            return encode_error(data, Rcode.FORMERR)
        return self._slow_path(question, client, over_tcp=over_tcp)

    def _fast_path(self, data: bytes) -> bytes | None:
        """The answer to a plain query for a record set of the zone that fits into the smallest datagram."""
        end = data.find(_ROOT, HEADER_SIZE) + len(_ROOT) + QTYPE_QCLASS.size
        wire_question = data[HEADER_SIZE:end]
        found = self._table.sets.get(wire_question.lower())
        if found is None or data[2] > _RD or wire_question[-3] == Type.SRV or found.answer_count > _FAST_PATH_ANSWERS:
            return None
        counts, opt = data[4:HEADER_SIZE], b""
        if counts == _QUESTION_AND_EXTRA and len(data) == end + _EMPTY_OPT:
            name, kind, _, _, version, flags, length = struct.unpack_from("!BHHBBHH", data, end)
            if name or kind != Type.OPT or version or length:
                return None
            opt = self._opts[flags >> 15]
        elif counts != _QUESTION_ALONE or len(data) != end:
            return None
        records = _sample(found)
        # QR, AA and RA are set; opcode, RD and CD are the query's.
        head = bytes((0x84 | data[2], 0x80 | data[3] & 0x10, 0, 1, 0, len(records), 0, 0, 0, counts[-1]))
        answer = b"".join((data[:2], head, wire_question, *records, opt))
        if len(answer) > MIN_UDP_SIZE:
            return None
        self.statistics.found += 1
        return answer

    def _slow_path(self, question: Question, client: str, *, over_tcp: bool) -> bytes | UpstreamQuery:
        max_size = MAX_MESSAGE_SIZE if over_tcp else question.max_size
        if question.edns and question.edns.version:
            self.statistics.invalid += 1
            return encode_answer(question, code=Rcode.BADVERS, max_size=max_size)
        if question.cls != IN or Type.is_meta(question.type):
            return self._refuse(question, max_size)
        cnames, name = self._chase_cnames(question)
        found = self._table.sets.get(question_key(name, question.type))
        if found:
            self.statistics.found += 1
            # One more than may fit, so that an answer that is cut has TC set. A set may have thousands of records.
            records = _sample(found, most=max_size // _SMALLEST_RECORD + 1)
            additional = self._targets(records, max_size) if question.type == Type.SRV else ()
            if cnames:
                records = (*cnames, *(with_owner(name, record) for record in records))
            return encode_answer(question, flags=AA, answers=records, additional=additional, max_size=max_size)
        if self._table.has_name(name):
            return self._negative_answer(question, Rcode.NOERROR, cnames, max_size)
        if self._is_authoritative(name):
            return self._negative_answer(question, Rcode.NXDOMAIN, cnames, max_size)
        denied = self._table.tcp_dns_egress_denied if over_tcp else self._table.dns_egress_denied
        if _address(client) in denied:
            transport = "TCP" if over_tcp else "UDP"
            return self._refuse(question, max_size, reason=f"egress policy denies {transport} 53 to every resolver")
        if not question.flags & RD:
            return self._refuse(question, max_size)
        if not cnames:
            return UpstreamQuery(question, question)
        return UpstreamQuery(
            question, question._replace(wire_question=question_key(name, question.type), name=name), cnames
        )

    def _chase_cnames(self, question: Question) -> tuple[tuple[bytes, ...], bytes]:
        """The CNAME records from the name in the question on, and the name at their end."""
        sets, name = self._table.sets, question.name
        cnames: list[bytes] = []
        while len(cnames) < _MAX_CNAMES and question_key(name, question.type) not in sets:
            found = sets.get(question_key(name, Type.CNAME))
            if found is None:
                break
            record = found.records[0]
            cnames.append(with_owner(name, record) if cnames else record)
            name = cname_target(record)
        return tuple(cnames), name

    def _is_authoritative(self, name: bytes) -> bool:
        """Whether a name that is not in the zone does not exist. It must not leak to the upstreams."""
        # Single-label names are containers, groups and services: forwarding them would leak internal names.
        single = len(name) <= 1 + name[0] + len(_ROOT) and name != _ROOT
        return single or name.endswith(self._domain) or self._table.owns_reverse(name)

    def _refuse(self, question: Question, max_size: int, *, reason: str = "") -> bytes:
        self.statistics.refused += 1
        return encode_answer(question, code=Rcode.REFUSED, reason=reason, max_size=max_size)

    def _negative_answer(self, question: Question, code: Rcode, cnames: tuple[bytes, ...], max_size: int) -> bytes:
        self.statistics.absent += 1
        apex = self._domain if question.name.endswith(self._domain) else _ROOT
        return encode_answer(
            question, code=code, flags=AA, answers=cnames, authority=(apex + self._soa,), max_size=max_size
        )

    def _targets(self, records: tuple[bytes, ...], max_size: int) -> tuple[bytes, ...]:
        """The addresses of the targets of SRV records, which save the client a query; none if they cannot fit."""
        found: list[bytes] = []
        size = 0
        for target in dict.fromkeys(map(srv_target, records)):
            for kind in (Type.A, Type.AAAA):
                known = self._table.sets.get(question_key(target, kind))
                for record in known.records if known else ():
                    found.append(with_owner(target, record))
                    size += len(found[-1])
                    if size > max_size:
                        return ()
        return tuple(found)


def _sample(found: RecordSet, *, most: int = _FAST_PATH_ANSWERS) -> tuple[bytes, ...]:
    """Random records in random order, so that clients spread over all of them."""
    records = found.records
    if len(records) == 1:
        return records
    return tuple(random.sample(records, min(found.answer_count, most)))


def _rcode(flags: int) -> Rcode:
    return next((code for code in (Rcode.NOERROR, Rcode.NXDOMAIN) if code == flags & 0xF), Rcode.SERVFAIL)


def _address(client: str) -> object:
    address = ip_address(client)
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
