"""The debugging routes of the agent, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from aiohttp import web
from tests.support.fake_cluster import DEFAULT

from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.observe import trace_api
from weft.agent.observe.drops import MAX_FOLLOWERS, STOPPING, DropLog, DropRecord, End
from weft.agent.observe.trace_api import TraceApi
from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon, until
from weft.ports.datapath import Datapath, Drop, TraceRequest
from weft.runtime.http import errors_as_json, serving
from weft.runtime.routes import register
from weft.runtime.worker_thread import WorkerThread

if TYPE_CHECKING:
    from tests.unit.agent.conftest import Policed


class Served:
    """The routes as a client sees them."""

    def __init__(self, drops: DropLog, port: int, session: aiohttp.ClientSession) -> None:
        self.drops = drops
        self.port = port
        self._session = session

    def open(self, path: str, **query: str) -> Any:
        return self._session.get(f"http://127.0.0.1:{self.port}{path}", params=query)

    async def get(self, path: str, **query: str) -> tuple[int, Any]:
        async with self.open(path, **query) as reply:
            return reply.status, await reply.json()


class TracingDatapath:
    """A datapath that traces packets, and drops those to one port."""

    def trace(self, request: TraceRequest) -> str | Drop:
        if request.target_port != 81:
            return "wpsomewhere"
        return Drop(
            tenant=request.port.tenant,
            verdict_id=0,
            reason="weft/endpoint-not-ready",
            source=request.source,
            target=request.target,
            protocol=request.protocol,
        )


@pytest.fixture
async def served(policed: Policed) -> AsyncIterator[Served]:
    drops, port = DropLog(), free_port()
    async with AsyncExitStack() as stack:
        executor = DatapathExecutor(cast("Datapath", TracingDatapath()), stack.enter_context(WorkerThread("kernel")))
        rest = TraceApi(
            policed.world.cluster,
            attachment_store=policed.attachment_store,
            policies=policed.policies,
            drops=drops,
            executor=executor,
        )
        app = web.Application(middlewares=[errors_as_json])
        register(app, rest.routes())
        await stack.enter_async_context(serving(app, (("127.0.0.1", port),), tls=None))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Served(drops, port, session)
        drops.end_all()


def record(pod: str = "lab/a", at: float = 1.0) -> DropRecord:
    end = End(address="10.1.1.1", port=1, identity="default:net:a", pod=pod)
    return DropRecord(
        at=at, tenant=DEFAULT, rule="r", reason="why", protocol=TCP, service="tcp/1", source=end, target=end
    )


async def test_recent_drops_are_listed(served: Served) -> None:
    served.drops.add([record(), record("lab/b", at=2.0)])
    status, found = await served.get("/drops")
    assert (status, [drop["at"] for drop in found]) == (200, [1.0, 2.0])
    assert set(found[0]) == {
        "at", "tenant", "rule", "reason", "protocol", "service", "source", "target", "direction", "inIface", "outIface"
    }  # fmt: skip
    assert [drop["at"] for drop in (await served.get("/drops", pod="b"))[1]] == [2.0]
    assert [drop["at"] for drop in (await served.get("/drops", since="1.5"))[1]] == [2.0]
    assert (await served.get("/drops", tenant="blue")) == (200, [])


@pytest.mark.parametrize("since", ["yesterday", "nan", "inf"])
async def test_since_must_be_a_number(served: Served, since: str) -> None:
    status, fault = await served.get("/drops", since=since)
    assert (status, fault["field"]) == (400, "since")


async def test_a_follower_gets_json_lines_until_the_agent_stops(served: Served) -> None:
    async with served.open("/drops", follow="1", pod="a") as reply:
        assert reply.content_type == "application/x-ndjson"
        assert await soon(reply.content.readline()) == b"\n"
        served.drops.add([record("lab/b"), record()])
        lines = [json.loads(await soon(reply.content.readline())) for _ in range(2)]
        assert [line["target"]["pod"] for line in lines] == ["lab/b", "lab/a"], "both have the identity of a"
        served.drops.end_all()
        last = [json.loads(line) async for line in reply.content if line.strip()]
        assert last == [{"ended": STOPPING}]
    await until(lambda: served.drops.followers == 0)


async def test_an_idle_stream_has_empty_lines(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_api, "HEARTBEAT_S", 0.01)
    async with served.open("/drops", follow="1") as reply:
        assert [await soon(reply.content.readline()) for _ in range(3)] == [b"\n"] * 3
    await until(lambda: served.drops.followers == 0)


async def test_followers_beyond_the_limit_are_refused(served: Served) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_FOLLOWERS):
            await stack.enter_async_context(served.open("/drops", follow="1"))
        status, fault = await served.get("/drops", follow="1")
        assert (status, fault["code"]) == (503, "unavailable")
        assert (await served.get("/drops"))[0] == 200


async def test_a_follower_that_does_not_read_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_api, "STALLED_S", 0.2)
    loop = asyncio.get_running_loop()
    with socket.socket() as idler:
        idler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idler.setblocking(False)
        await loop.sock_connect(idler, ("127.0.0.1", served.port))
        await loop.sock_sendall(idler, b"GET /drops?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: served.drops.followers == 1)

        def is_gone() -> bool:
            served.drops.add([record("lab/" + "a" * 1000)] * 100)
            return served.drops.followers == 0

        await until(is_gone)


@pytest.mark.parametrize(
    ("service", "version", "allowed", "protocol"),
    [("tcp/80", "", True, TCP), ("tcp/81", "", False, TCP), ("icmp", "", True, ICMP), ("icmp", "6", True, ICMPV6)],
)
async def test_a_flow_is_traced_by_the_policy_of_this_node(
    served: Served, policed: Policed, service: str, version: str, allowed: bool, protocol: int
) -> None:
    query = {"src": "guest", "dst": "lab/till", "service": service} | ({"version": version} if version else {})
    status, traced = await served.get("/trace", **query)
    assert status == 200, traced
    assert traced["explanation"]["allowed"] is allowed
    assert traced["explanation"]["decidedBy"] == ("weft/default" if allowed else "contiv/default/p/no-81")
    assert (traced["tenant"], traced["protocol"]) == ("default", protocol)
    assert traced["source"]["netns"] == "/paper/guest"
    assert traced["target"]["address"] == (policed.till.ipv6_address if version else policed.till.ip_address)
    assert traced["target"]["device"]


async def test_the_datapath_is_traced_on_request(served: Served) -> None:
    _, traced = await served.get("/trace", src="guest", dst="lab/till", service="tcp/80", datapath="1")
    assert traced["datapath"] == {"passes": True, "by": "wpsomewhere", "reason": ""}
    _, traced = await served.get("/trace", src="guest", dst="lab/till", service="tcp/81", datapath="1")
    assert (traced["datapath"]["passes"], traced["datapath"]["by"]) == (False, "weft/endpoint-not-ready")
    _, traced = await served.get("/trace", src="guest", dst="lab/till", service="tcp/80")
    assert traced["datapath"] is None


async def test_an_address_implies_its_ip_version(served: Served, policed: Policed) -> None:
    _, traced = await served.get("/trace", src="guest", dst=policed.till.ipv6_address, service="tcp/80")
    assert traced["explanation"]["version"] == 6
    assert traced["source"]["address"] == policed.guest.ipv6_address
    _, remote = await served.get("/trace", src="guest", dst="away", service="tcp/80")
    assert (remote["target"]["identity"], remote["target"]["netns"]) == ("default:blue:away", "")


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ({"src": "guest", "dst": "till"}, 400, "service"),
        ({"src": "guest", "dst": "till", "service": "tcp/80", "version": "5"}, 400, "version"),
        ({"src": "guest", "dst": "till", "service": "tcp"}, 422, "port"),
        ({"src": "away", "dst": "till", "service": "tcp/80"}, 404, "src"),
        ({"src": "absent", "dst": "till", "service": "tcp/80"}, 404, "src"),
        ({"src": "guest", "dst": "absent", "service": "tcp/80"}, 404, "dst"),
    ],
)
async def test_an_invalid_trace_is_rejected(served: Served, query: dict[str, str], status: int, field: str) -> None:
    answered, fault = await served.get("/trace", **query)
    assert (answered, fault["field"]) == (status, field), fault
