"""An upstream DNS resolver for tests: it answers every name and records the queries."""

from __future__ import annotations

import asyncio
from typing import cast

import dns.message
import dns.rrset

ANSWER = "192.0.2.99"


class Resolver(asyncio.DatagramProtocol):
    """A protocol for `create_datagram_endpoint`. Names below `slow` get no answer."""

    def __init__(self, *, slow: str = "") -> None:
        self.queries: list[str] = []
        self._slow = slow

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        name = query.question[0].name
        self.queries.append(name.to_text())
        if self._slow and name.to_text().endswith(self._slow):
            return
        answer = dns.message.make_response(query)
        answer.answer.append(dns.rrset.from_text(name, 60, "IN", "A", ANSWER))
        self.transport.sendto(answer.to_wire(), addr)
