"""Question -> answer, or the decision to ask outside: pure, and quick for what is known.

What is ours never leaves: single labels (names of containers, groups and services), the cluster's domain, reverse names
in the tenant's subnets, and every name that is known here in any way. What is asked in one case of letters is answered
in the same, for the question is sent back as it came.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from weft.dns.encode import (
    alias_target,
    encode_answer,
    encode_data,
    encode_name,
    encode_refusal,
    opt_record,
    question_key,
    srv_target,
    with_owner,
)
from weft.dns.table import RecordSet, Table
from weft.dns.upstream_query import Outside
from weft.dns.wire import (
    AA,
    HEADER_SIZE,
    IN,
    LARGEST_MESSAGE,
    RD,
    SMALLEST_DATAGRAM,
    TAIL,
    Code,
    Question,
    Type,
    read_question,
)
from weft.domain.errors import Malformed

# How long others may believe that a name is not there: it may come at any moment.
NEGATIVE_TTL = 5
_SOA_NUMBERS = struct.pack("!5I", 1, 7200, 1800, 86400, NEGATIVE_TTL)
_ROOT = b"\0"
# What the third byte of a message tells.
_ANSWERING, _OPCODE, _RECURSION = 0x80, 0x78, 0x01
_QUESTION_ALONE, _QUESTION_AND_EXTRA = b"\0\1\0\0\0\0\0\0", b"\0\1\0\0\0\0\0\1"
_EMPTY_OPT = 11
# Answers that are likely to fit into the smallest datagram.
_QUICK_COUNT = 20
_MOST_ALIASES = 8


@dataclass(slots=True)
class Statistics:
    """What became of the questions so far."""

    found: int = 0
    absent: int = 0
    invalid: int = 0
    refused: int = 0
    forwarded: int = 0
    failed: int = 0


class Responder:
    """Answers for one tenant. `domain` is the cluster's."""

    def __init__(self, table: Table, *, domain: str, statistics: Statistics) -> None:
        self.statistics = statistics
        self._table = table
        self._domain = encode_name(domain)
        authority = encode_name(f"ns.dns.{domain}") + encode_name(f"hostmaster.{domain}")
        self._soa = encode_data(Type.SOA, authority + _SOA_NUMBERS, ttl=NEGATIVE_TTL)
        self._opts = opt_record(), opt_record(dnssec=True)

    def answer(self, data: bytes, *, client: str, over_tcp: bool = False) -> bytes | Outside | None:
        """The answer; or what to ask outside for it; or None where silence is right."""
        if answer := self._answer_quickly(data):
            return answer
        if len(data) < HEADER_SIZE or data[2] & _ANSWERING:
            self.statistics.invalid += 1  # to answer an answer would go on for ever
            return None
        if data[2] & _OPCODE:
            self.statistics.invalid += 1
            return encode_refusal(data, Code.NOTIMP)
        try:
            question = read_question(data)
        except Malformed:
            self.statistics.invalid += 1
            return encode_refusal(data, Code.FORMERR)
        return self._answer_with_care(question, client, LARGEST_MESSAGE if over_tcp else question.room)

    def _answer_quickly(self, data: bytes) -> bytes | None:
        """The answer to a question of the usual form about a name that is known and needs little room."""
        end = data.find(_ROOT, HEADER_SIZE) + len(_ROOT) + TAIL.size
        asked = data[HEADER_SIZE:end]
        found = self._table.sets.get(asked.lower())
        if found is None or data[2] > _RECURSION or asked[-3] == Type.SRV or found.told > _QUICK_COUNT:
            return None
        counts, opt = data[4:HEADER_SIZE], b""
        if counts == _QUESTION_AND_EXTRA and len(data) == end + _EMPTY_OPT:
            name, kind, _, _, version, flags, length = struct.unpack_from("!BHHBBHH", data, end)
            if name or kind != Type.OPT or version or length:
                return None
            opt = self._opts[flags >> 15]
        elif counts != _QUESTION_ALONE or len(data) != end:
            return None
        records = _choose(found)
        head = bytes((0x84 | data[2], 0x80 | data[3] & 0x10, 0, 1, 0, len(records), 0, 0, 0, counts[-1]))
        answer = b"".join((data[:2], head, asked, *records, opt))
        if len(answer) > SMALLEST_DATAGRAM:
            return None
        self.statistics.found += 1
        return answer

    def _answer_with_care(self, question: Question, client: str, room: int) -> bytes | Outside:
        if question.edns and question.edns.version:
            self.statistics.invalid += 1
            return encode_answer(question, code=Code.BADVERS, room=room)
        if question.cls != IN or Type.is_meta(question.type):
            return self._refuse(question, room)
        aliases, name = self._follow(question)
        found = self._table.sets.get(question_key(name, question.type))
        if found:
            self.statistics.found += 1
            records = _choose(found)
            additional = self._targets(records) if question.type == Type.SRV else ()
            if aliases:
                records = (*aliases, *(with_owner(name, record) for record in records))
            return encode_answer(question, flags=AA, answers=records, additional=additional, room=room)
        if self._table.knows(name):
            return self._deny(question, Code.NOERROR, aliases, room)
        if self._is_ours(name):
            return self._deny(question, Code.NXDOMAIN, aliases, room)
        if not question.flags & RD or _address(client) in self._table.dns_egress_denied:
            return self._refuse(question, room)
        if not aliases:
            return Outside(question, question)
        return Outside(question, question._replace(asked=question_key(name, question.type), name=name), aliases)

    def _follow(self, question: Question) -> tuple[tuple[bytes, ...], bytes]:
        """The aliases that lead from the name that was asked for, and the name where they end."""
        sets, name = self._table.sets, question.name
        aliases: list[bytes] = []
        while len(aliases) < _MOST_ALIASES and question_key(name, question.type) not in sets:
            alias = sets.get(question_key(name, Type.CNAME))
            if alias is None:
                break
            record = alias.records[0]
            aliases.append(with_owner(name, record) if aliases else record)
            name = alias_target(record)
        return tuple(aliases), name

    def _is_ours(self, name: bytes) -> bool:
        """Whether only we can know a name: if it is not here, it is not there."""
        single = len(name) <= 1 + name[0] + len(_ROOT) and name != _ROOT
        return single or name.endswith(self._domain) or self._table.holds_reverse(name)

    def _refuse(self, question: Question, room: int) -> bytes:
        self.statistics.refused += 1
        return encode_answer(question, code=Code.REFUSED, room=room)

    def _deny(self, question: Question, code: Code, aliases: tuple[bytes, ...], room: int) -> bytes:
        self.statistics.absent += 1
        apex = self._domain if question.name.endswith(self._domain) else _ROOT
        return encode_answer(question, code=code, flags=AA, answers=aliases, authority=(apex + self._soa,), room=room)

    def _targets(self, records: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The addresses of what SRV records point to, so that nobody has to ask again."""
        return tuple(
            with_owner(target, record)
            for target in dict.fromkeys(map(srv_target, records))
            for kind in (Type.A, Type.AAAA)
            if (found := self._table.sets.get(question_key(target, kind)))
            for record in found.records
        )


def _choose(found: RecordSet) -> tuple[bytes, ...]:
    """Some of the answers in some order, so that not everybody turns to the same one."""
    records = found.records
    if len(records) == 1:
        return records
    return tuple(random.sample(records, found.told))


def _address(client: str) -> object:
    address = ip_address(client)
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
