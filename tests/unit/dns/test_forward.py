"""Forwarding over real sockets on loopback: only valid answers are accepted, and every query ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from weft.dns import forward
from weft.dns.forward import Forwarder
from weft.dns.upstream import Upstream, Upstreams
from weft.dns.wire import Question, read_question
from weft.domain.errors import Unavailable
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon, until

Answers = Callable[[bytes], list[bytes]]


def make_question(name: str = "www.example.org", **options: object) -> Question:
    return read_question(dns.message.make_query(name, "A", **options).to_wire())  # type: ignore[arg-type]


def response(query: bytes, *, address: str = "192.0.2.1", count: int = 1, code: int = 0) -> dns.message.Message:
    read = dns.message.from_wire(query)
    made = dns.message.make_response(read)
    made.set_rcode(dns.rcode.Rcode(code))
    addresses = [address, *(f"192.0.3.{number}" for number in range(count - 1))]
    if not code:
        made.answer.append(dns.rrset.from_text(read.question[0].name, 60, "IN", "A", *addresses))
    return made


def honest(query: bytes) -> list[bytes]:
    return [response(query).to_wire()]


class Resolver(asyncio.DatagramProtocol):
    """An upstream resolver that sends the answers of the test; over TCP the first of them."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.seen: list[tuple[bytes, int]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.seen.append((data, addr[1]))
        for answer in self.answers(data):
            self.transport.sendto(answer, addr)

    async def serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        self.seen.append((data, 0))
        for answer in self.answers(data)[:1]:
            writer.write(len(answer).to_bytes(2) + answer)
        writer.close()


@asynccontextmanager
async def resolvers(*each: Answers) -> AsyncIterator[tuple[Forwarder, list[Resolver]]]:
    """A forwarder with these upstreams."""
    loop = asyncio.get_running_loop()
    found: list[Resolver] = []
    named: list[Upstream] = []
    async with AsyncExitStack() as stack:
        for answers in each:
            resolver, port = Resolver(answers), free_port()
            transport, _ = await loop.create_datagram_endpoint(
                lambda resolver=resolver: resolver,  # type: ignore[misc]
                local_addr=("127.0.0.1", port),
            )
            stack.callback(transport.close)
            await stack.enter_async_context(await asyncio.start_server(resolver.serve_tcp, "127.0.0.1", port))
            found.append(resolver)
            named.append(Upstream("127.0.0.1", port))
        yield Forwarder(Upstreams(tuple(named), file=Path("none"))), found


def addresses_in(answer: bytes) -> list[str]:
    return [record.to_text() for rrset in dns.message.from_wire(answer).answer for record in rrset]


@pytest.mark.parametrize("over_tcp", [False, True])
async def test_an_answer_is_returned_with_the_clients_id_and_case_r10(over_tcp: bool) -> None:
    question = make_question("wWw.Example.org")
    async with resolvers(honest) as (forwarder, _):
        answer = await soon(forwarder.resolve(question, over_tcp=over_tcp))
    assert addresses_in(answer) == ["192.0.2.1"]
    assert answer[:2] == question.id.to_bytes(2)
    assert question.wire_question in answer


async def test_ids_and_source_ports_are_random() -> None:
    """Kaminsky's lesson: both are random for every query."""
    async with resolvers(honest) as (forwarder, (resolver,)):
        for number in range(40):
            await soon(forwarder.resolve(make_question(f"a{number}.example.org"), over_tcp=False))
    assert len({data[:2] for data, _ in resolver.seen}) > 30
    assert len({port for _, port in resolver.seen}) > 30
    steps = {b - a for (_, a), (_, b) in zip(resolver.seen, resolver.seen[1:], strict=False)}
    assert len(steps) > 20


async def test_forged_answers_are_ignored() -> None:
    def attacked(query: bytes) -> list[bytes]:
        forged = response(query, address="198.51.100.66").to_wire()
        other = dns.message.make_query("www.example.net", "A", id=int.from_bytes(query[:2])).to_wire()
        return [
            bytes([forged[0] ^ 0xFF]) + forged[1:],
            response(other, address="198.51.100.66").to_wire(),
            forged[:-2],
            b"",
            query,
            response(query).to_wire(),
        ]

    async with resolvers(attacked) as (forwarder, _):
        assert addresses_in(await soon(forwarder.resolve(make_question(), over_tcp=False))) == ["192.0.2.1"]


async def test_answers_from_other_ports_are_ignored() -> None:
    """The socket is connected: a right answer from another port does not even arrive."""

    def from_elsewhere(query: bytes) -> list[bytes]:
        _, port = resolver.seen[-1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as attacker:
            attacker.sendto(response(query, address="198.51.100.66").to_wire(), ("127.0.0.1", port))
        return honest(query)

    async with resolvers(from_elsewhere) as (forwarder, (resolver,)):
        assert addresses_in(await soon(forwarder.resolve(make_question(), over_tcp=False))) == ["192.0.2.1"]


@pytest.mark.parametrize("over_tcp", [False, True])
async def test_the_next_upstream_is_tried_when_one_fails(over_tcp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FORWARD_TIMEOUT_S", 2.0)

    def failing(query: bytes) -> list[bytes]:
        return [response(query, code=dns.rcode.SERVFAIL).to_wire()]

    def unresponsive(_: bytes) -> list[bytes]:
        return []

    async with resolvers(failing, unresponsive, honest) as (forwarder, _):
        assert addresses_in(await soon(forwarder.resolve(make_question(), over_tcp=over_tcp))) == ["192.0.2.1"]


async def test_a_failure_is_returned_when_no_upstream_does_better() -> None:
    async with resolvers(lambda query: [response(query, code=dns.rcode.REFUSED).to_wire()]) as (forwarder, _):
        answer = await soon(forwarder.resolve(make_question(), over_tcp=False))
    assert dns.message.from_wire(answer).rcode() == dns.rcode.REFUSED


async def test_a_query_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FORWARD_TIMEOUT_S", 0.1)
    async with resolvers(lambda _: []) as (forwarder, _):
        with pytest.raises(Unavailable):
            await soon(forwarder.resolve(make_question(), over_tcp=False))


async def test_without_upstreams_a_query_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await soon(Forwarder(Upstreams((), file=tmp_path / "none")).resolve(make_question(), over_tcp=False))


async def test_the_same_question_is_in_flight_once() -> None:
    """A resolver that forwards to us is stopped at its first step, and a forger gets one chance, not many."""
    gate: list[bytes] = []

    def waiting(query: bytes) -> list[bytes]:
        gate.append(query)
        return []

    async with resolvers(waiting) as (forwarder, (resolver,)):
        names = ["WWW.example.org"] * 5 + ["www.Example.org"] * 5
        pending = [asyncio.ensure_future(forwarder.resolve(make_question(name), over_tcp=False)) for name in names]
        await until(lambda: bool(gate))
        resolver.transport.sendto(honest(gate[0])[0], ("127.0.0.1", resolver.seen[0][1]))
        answers = await soon(asyncio.gather(*pending))
        assert len(resolver.seen) == 1
        assert {answer[12:16] for answer in answers} == {b"\3WWW", b"\3www"}
        later = asyncio.ensure_future(forwarder.resolve(make_question(), over_tcp=False))
        await until(lambda: len(resolver.seen) == 2)
        later.cancel()
        await asyncio.wait([later])


async def test_an_answer_too_large_for_the_client_is_truncated() -> None:
    def large(query: bytes) -> list[bytes]:
        return [response(query, count=60).to_wire(max_size=65_535)]

    async with resolvers(large) as (forwarder, _):
        answer = await soon(forwarder.resolve(make_question(), over_tcp=False))
        assert dns.message.from_wire(answer).flags & dns.flags.TC
        assert len(addresses_in(await soon(forwarder.resolve(make_question(), over_tcp=True)))) == 60


async def test_a_flood_of_forged_answers_ends_and_lets_others_go_on() -> None:
    async with resolvers(lambda query: [b"\0" * 20] * 200, honest) as (forwarder, _):
        assert addresses_in(await soon(forwarder.resolve(make_question(), over_tcp=False))) == ["192.0.2.1"]


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b"\xc0\x0c" * 20, id="garbage records"),
        pytest.param(b"\xc0\x2a\0\1\0\1\0\0\0\0\0\4\1\2\3\4", id="compression loop"),
        pytest.param(b"\0" * 3900, id="huge"),
    ],
)
async def test_a_hostile_answer_is_no_answer(tail: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FORWARD_TIMEOUT_S", 0.2)

    def hostile(query: bytes) -> list[bytes]:
        return [query[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query[12:] + tail]

    async with resolvers(hostile) as (forwarder, _):
        with pytest.raises(Unavailable):
            await soon(forwarder.resolve(make_question(), over_tcp=False))
