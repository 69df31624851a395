"""A tenant's server on loopback, with many, slow and hostile clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import pytest

from weft.dns import server as module
from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, Statistics
from weft.dns.server import MAX_QUERY, NodeShares, TenantServer
from weft.dns.shares import Limits, Shares
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
        self.udp, self.tcp = (each.getsockname()[1] for each in sockets)
        self.server = server
        self.statistics = statistics

    def client(self, source: str = "127.0.0.1") -> socket.socket:
        """A UDP client that accepts answers only from the address it queries."""
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        client.setblocking(False)
        client.bind((source, 0))
        client.connect(("127.0.0.1", self.udp))
        return client

    async def query(self, query: bytes, *, source: str = "127.0.0.1") -> dns.message.Message:
        with self.client(source) as client:
            client.send(query)
            return dns.message.from_wire(await soon(asyncio.get_running_loop().sock_recv(client, 4096)))

    async def connect(self, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await soon(asyncio.open_connection("127.0.0.1", self.tcp, local_addr=(source, 0)))


@asynccontextmanager
async def served(*upstreams: Upstream) -> AsyncIterator[Served]:
    sockets = Sockets(*(socket.socket(socket.AF_INET6, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)))
    for each in sockets:
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        each.bind(("::", 0))
    sockets.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    sockets.tcp.listen()
    table, statistics = Table(ttl=30), Statistics()
    table.replace(Zone({"web": Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),))}))
    server = TenantServer(
        sockets,
        responder=Responder(table, domain="cluster.local", statistics=statistics),
        forwarder=Forwarder(Upstreams(upstreams, file=Path("none"))),
        node=NodeShares(),
        tenant="blue",
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
    monkeypatch.setattr(module, "CONNECTIONS", Limits(room=2, client=2, reserve=0, most=2))
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
    monkeypatch.setattr(module, "FORWARDED", Limits(room=1, client=1, reserve=0, most=1))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unresponsive:
        unresponsive.bind(("127.0.0.1", 0))
        async with served(Upstream(*unresponsive.getsockname())) as tenant:
            with tenant.client() as waiting:
                waiting.send(OUTSIDE)
                await until(lambda: tenant.statistics.forwarded == 1)
                assert (await tenant.query(OUTSIDE)).rcode() == dns.rcode.SERVFAIL
                assert (await tenant.query(WEB)).rcode() == dns.rcode.NOERROR


FLOODER, OTHER = "127.0.0.2", "127.0.0.3"


class SlowZone(asyncio.DatagramProtocol):
    """An upstream that answers names of example.org at once, and all others never."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        if query.question[0].name.is_subdomain(dns.name.from_text("example.org")):
            self.transport.sendto(dns.message.make_response(query).to_wire(), addr)


@asynccontextmanager
async def served_with_slow_names() -> AsyncIterator[Served]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(SlowZone, local_addr=("127.0.0.1", 0))
    try:
        async with served(Upstream(*transport.get_extra_info("sockname"))) as tenant:
            yield tenant
    finally:
        transport.close()


async def flood_with_slow_names(tenant: Served, source: str, count: int) -> None:
    """Send as many queries, in portions that a socket's buffer holds."""

    statistics, sent = tenant.statistics, tenant.statistics.forwarded + tenant.statistics.limited

    def seen(expected: int) -> bool:
        return statistics.forwarded + statistics.limited >= expected

    with tenant.client(source) as flooder:
        for number in range(count):
            flooder.send(dns.message.make_query(f"n{number}.{source}.slow.test", "A").to_wire())
            if number % 50 == 49 or number == count - 1:
                await until(partial(seen, sent + number + 1))


async def test_M5_a_client_with_many_slow_names_takes_outside_names_from_no_other() -> None:
    async with served_with_slow_names() as tenant:
        await flood_with_slow_names(tenant, FLOODER, 300)
        assert tenant.statistics.limited > 0
        for number in range(3):
            outside = dns.message.make_query(f"www{number}.example.org", "A").to_wire()
            assert (await tenant.query(outside, source=OTHER)).rcode() == dns.rcode.NOERROR


async def test_M5_a_client_above_its_share_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORWARDED", Limits(room=8, client=1, reserve=1, most=8))
    async with served_with_slow_names() as tenant:
        await flood_with_slow_names(tenant, FLOODER, 1)
        query = dns.message.make_query("one-more.slow.test", "A", use_edns=0).to_wire()
        refused = await tenant.query(query, source=FLOODER)
        assert refused.rcode() == dns.rcode.SERVFAIL
        (why,) = refused.options
        assert "in flight" in why.to_text()
        assert tenant.statistics.limited == 1


async def test_M5_many_flooding_clients_leave_the_reserve_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORWARDED", Limits(room=8, client=4, reserve=1, most=64))
    async with served_with_slow_names() as tenant:
        for client in range(8):
            # Two clients fill the room; the other six have their reserve.
            await flood_with_slow_names(tenant, f"127.0.1.{client}", 10)
        outside = dns.message.make_query("www.example.org", "A").to_wire()
        assert (await tenant.query(outside, source=OTHER)).rcode() == dns.rcode.NOERROR


async def test_M5_a_client_with_many_silent_connections_takes_none_from_others() -> None:
    async with served() as tenant:
        held = [await tenant.connect(FLOODER) for _ in range(200)]
        await until(lambda: tenant.statistics.connections_limited == 200 - module.CONNECTIONS.client)
        reader, writer = await tenant.connect(OTHER)
        writer.write(frame(WEB))
        assert (await read_answer(reader)).rcode() == dns.rcode.NOERROR
        for _, each in [*held, (reader, writer)]:
            each.close()


def test_shares_are_counted_and_given_back() -> None:
    node = Shares(Limits(room=3, client=3, reserve=1, most=5))
    blue = Shares(Limits(room=4, client=3, reserve=1, most=6), parent=node, name="blue")
    red = Shares(Limits(room=4, client=3, reserve=1, most=6), parent=node, name="red")
    assert [blue.take("a") for _ in range(4)] == [True, True, True, False]
    assert not blue.take("b"), "the node's room for this tenant is used up"
    assert [red.take("c") for _ in range(2)] == [True, False], "the reserve of another tenant is not"
    blue.give_back("a")
    assert not blue.take("b"), "red has what became free"
    red.give_back("c")
    assert blue.take("b")


async def test_M5_a_client_that_pipelines_is_not_the_only_one_served() -> None:
    """Its socket has always data to read and room to write, so that serving it would never wait for anything."""
    async with served() as tenant:
        reader, writer = await tenant.connect(FLOODER)
        writer.write(frame(WEB))
        await read_answer(reader)
        with tenant.client(OTHER) as other:
            # Both are in the sockets' buffers when the server gets its turn.
            writer.write(frame(WEB) * 1000)
            other.send(WEB)
            assert await soon(asyncio.get_running_loop().sock_recv(other, 4096))
            assert tenant.statistics.found < 500, "the other one had to wait for all of them"
        writer.close()


async def test_a_long_question_over_tcp_is_not_even_read() -> None:
    """64 KiB with thousands of records took 3.5 ms each."""
    record = b"\0\0\1\0\1\0\0\0\0\0\0"
    long = WEB[:6] + (5000).to_bytes(2) + WEB[8:] + record * 5000
    async with served() as tenant:
        reader, writer = await tenant.connect()
        writer.write(len(long).to_bytes(2) + long[:MAX_QUERY])
        answer = await read_answer(reader)
        assert (answer.rcode(), answer.id) == (dns.rcode.FORMERR, int.from_bytes(WEB[:2]))
        assert tenant.statistics.invalid == 1
        writer.close()
        reader, writer = await tenant.connect()
        writer.write(frame(WEB))
        assert (await read_answer(reader)).rcode() == dns.rcode.NOERROR
        writer.close()


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
