"""A question that cannot be answered here alone: what to ask outside, and how its answer becomes ours."""

from __future__ import annotations

from typing import NamedTuple

from weft.dns.encode import encode_answer, encode_data
from weft.dns.wire import HEADER, TC, Code, Question, read_addresses


class Outside(NamedTuple):
    """`ask` is the question itself; or, where `aliases` lead from it to the outside, that about what they lead to."""

    question: Question
    ask: Question
    aliases: tuple[bytes, ...] = ()

    def complete(self, answer: bytes, *, room: int) -> bytes:
        """The answer to the question, from that to what was asked; `Malformed` when it cannot be read."""
        if not self.aliases:
            return answer
        _, flags, *_ = HEADER.unpack_from(answer)
        found = read_addresses(answer, self.ask)
        records = (owner + encode_data(kind, data, ttl=ttl) for owner, kind, ttl, data in found)
        return encode_answer(
            self.question, code=_code(flags), flags=flags & TC, answers=(*self.aliases, *records), room=room
        )


def _code(flags: int) -> Code:
    return next((code for code in (Code.NOERROR, Code.NXDOMAIN) if code == flags & 0xF), Code.SERVFAIL)
