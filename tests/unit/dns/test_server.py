"""A tenant's server on loopback, with many, slow and hostile clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import dns.flags
import dns.message
import dns.rcode
import pytest

from weft.dns import server as module
from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, Statistics
from weft.dns.server import TenantServer
from weft.dns.table import Table
from weft.dns.tenant_sockets import Sockets
from weft.dns.upstream import Upstream, Upstreams
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.lab.waiting import eventually, soon, until
from weft.runtime.tasks import background

WEB = dns.message.make_query("web", "A").to_wire()
OUTSIDE = dns.message.make_query("www.example.org", "A").to_wire()


class Served:
    """A running server, and clients of it."""

    def __init__(self, sockets: Sockets, server: TenantServer, statistics: Statistics) -> None:
        self.udp, self.tcp = (each.getsockname()[:2] for each in sockets)
        self.server = server
        self.statistics = statistics

    def client(self) -> socket.socket:
        """A UDP client that accepts answers only from the address it queries."""
        client = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        client.setblocking(False)
        client.connect(self.udp)
        return client

    async def query(self, query: bytes) -> dns.message.Message:
        with self.client() as client:
            client.send(query)
            return dns.message.from_wire(await soon(asyncio.get_running_loop().sock_recv(client, 4096)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await soon(asyncio.open_connection(*self.tcp))


@asynccontextmanager
async def served(*upstreams: Upstream) -> AsyncIterator[Served]:
    sockets = Sockets(*(socket.socket(socket.AF_INET6, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)))
    for each in sockets:
        each.setblocking(False)
        each.bind(("::1", 0))
    sockets.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    sockets.tcp.listen()
    table, statistics = Table(ttl=30), Statistics()
    table.replace(Zone({"web": Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),))}))
    server = TenantServer(
        sockets,
        responder=Responder(table, domain="cluster.local", statistics=statistics),
        forwarder=Forwarder(Upstreams(upstreams, file=Path("none"))),
    )
    async with background(server.run(), name="server"):
        yield Served(sockets, server, statistics)


def frame(query: bytes) -> bytes:
    return len(query).to_bytes(2) + query


async def read_answer(reader: asyncio.StreamReader) -> dns.message.Message:
    length = int.from_bytes(await soon(reader.readexactly(2)))
    return dns.message.from_wire(await soon(reader.readexactly(length)))


async def test_many_datagrams_at_once_are_all_answered() -> None:
    loop = asyncio.get_running_loop()
    async with served() as tenant:
        with tenant.client() as client:
            for number in range(150):
                client.send(number.to_bytes(2) + WEB[2:])
            answers = [await soon(loop.sock_recv(client, 4096)) for _ in range(150)]
    assert {int.from_bytes(answer[:2]) for answer in answers} == set(range(150))


async def test_pipelined_queries_of_one_connection_are_answered_in_order() -> None:
    async with served() as tenant:
        reader, writer = await tenant.connect()
        writer.write(frame(WEB) * 3)
        for _ in range(3):
            assert (await read_answer(reader)).rcode() == dns.rcode.NOERROR
        writer.close()


async def test_a_query_in_many_segments_is_answered() -> None:
    async with served() as tenant:
        reader, writer = await tenant.connect()
        for byte in frame(WEB):
            writer.write(bytes((byte,)))
            await writer.drain()
        assert (await read_answer(reader)).rcode() == dns.rcode.NOERROR
        writer.close()


async def test_damaged_streams_do_no_harm_cve_2025_23028() -> None:
    """Damaged questions, lengths that are not true, clients that disconnect in the middle: the next one is answered."""
    chance = Random(23028)
    async with served() as tenant:
        for _ in range(150):
            _, writer = await tenant.connect()
            stream = bytearray(frame(WEB) * chance.randint(1, 3))
            for _ in range(chance.randint(1, 6)):
                stream[chance.randrange(len(stream))] = chance.randrange(256)
            writer.write(bytes(stream[: chance.randrange(len(stream) + 1)]))
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
        reader, writer = await tenant.connect()
        writer.write(frame(WEB))
        assert (await read_answer(reader)).rcode() == dns.rcode.NOERROR
        writer.close()
        assert (await tenant.query(WEB)).rcode() == dns.rcode.NOERROR


async def test_an_idle_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    async with served() as tenant:
        for start in (b"", frame(WEB)[:10]):
            reader, writer = await tenant.connect()
            writer.write(start)
            assert await soon(reader.read()) == b""
            writer.close()


async def test_tcp_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TCP_CONNECTIONS", 2)
    async with served() as tenant:
        first, second = await tenant.connect(), await tenant.connect()
        for reader, writer in (first, second):
            writer.write(frame(WEB))
            await read_answer(reader)
        reader, writer = await tenant.connect()
        assert await soon(reader.read()) == b""
        writer.close()
        first[1].close()

        async def ask_again() -> bytes:
            reader, writer = await tenant.connect()
            try:
                writer.write(frame(WEB))
                return await soon(reader.read(2))
            except ConnectionError:
                return b""
            finally:
                writer.close()

        await eventually(ask_again, bool)
        second[1].close()


async def test_without_a_reachable_upstream_the_answer_is_servfail() -> None:
    async with served() as tenant:
        assert (await tenant.query(OUTSIDE)).rcode() == dns.rcode.SERVFAIL
        reader, writer = await tenant.connect()
        writer.write(frame(OUTSIDE))
        assert (await read_answer(reader)).rcode() == dns.rcode.SERVFAIL
        writer.close()
        assert tenant.statistics == Statistics(forwarded=2, failed=2)


async def test_a_slow_upstream_delays_no_other_query_and_forwarding_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_FORWARDED", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        async with served(Upstream(*unresponsive.getsockname())) as tenant:
            with tenant.client() as waiting:
                waiting.send(OUTSIDE)
                await until(lambda: tenant.statistics.forwarded == 1)
                assert (await tenant.query(OUTSIDE)).rcode() == dns.rcode.SERVFAIL
                assert (await tenant.query(WEB)).rcode() == dns.rcode.NOERROR


async def test_a_query_that_triggers_a_bug_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CVE-2025-23028: one message must not end the process."""
    real = Responder.answer

    def answer(self: Responder, data: bytes, *, client: str, over_tcp: bool = False) -> object:
        if data == b"boom":
            raise ZeroDivisionError
        return real(self, data, client=client, over_tcp=over_tcp)

    monkeypatch.setattr(Responder, "answer", answer)
    async with served() as tenant:
        with tenant.client() as client:
            client.send(b"boom")
        reader, writer = await tenant.connect()
        writer.write(frame(b"boom"))
        assert await soon(reader.read()) == b""
        writer.close()
        assert (await tenant.query(WEB)).rcode() == dns.rcode.NOERROR
    assert [record.message for record in caplog.records if record.exc_info] == ["query failed"] * 2


async def test_connections_are_reset_when_the_server_stops() -> None:
    async with served() as tenant:
        reader, writer = await tenant.connect()
        writer.write(frame(WEB))
        await read_answer(reader)
    with pytest.raises(ConnectionError):
        await soon(reader.readexactly(1))
    writer.close()
