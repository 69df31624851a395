"""`?watch`: the list, `synced`, then every change, one JSON object per line (docs/reference/rest.md; W3, W24)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain.ids import StoreKey
from weft.lab.servers.masters import API, Rest, client, running_master
from weft.lab.waiting import soon
from weft.ports.store import Put


class Watch:
    """The lines of a watch, without the blank ones that only show that it lives."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def line(self) -> dict[str, Any] | None:
        """The next line; None at the end."""
        while raw := await soon(self._response.content.readline()):
            if raw.strip():
                line: dict[str, Any] = msgspec.json.decode(raw)
                return line
        return None

    async def lines(self, count: int) -> list[dict[str, Any]]:
        found = [await self.line() for _ in range(count)]
        return [line for line in found if line is not None]

    async def until_synced(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        while (line := await self.line()) and line["type"] != "synced":
            listed.append(line)
        return listed


@asynccontextmanager
async def watching(rest: Rest, plural: str, query: str = "watch") -> AsyncIterator[Watch]:
    async with rest.session.get(f"{rest.url}{API}/{plural}/?{query}") as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        yield Watch(response)


async def test_a_watch_returns_the_list_then_every_change(rest: Rest) -> None:
    await rest.put("tenants", tenantName="t1")
    async with watching(rest, "tenants") as watch:
        listed = await watch.until_synced()
        assert [line["key"] for line in listed] == ["default", "t1"]
        assert listed[1]["object"] == {"key": "t1", "tenantName": "t1"}
        await rest.put("tenants", tenantName="t2")
        await rest.put("tenants", tenantName="t2", defaultNetwork="blue")
        await rest.put("policys", tenantName="t2", policyName="p")
        await rest.delete("policys", "t2:p")
        await rest.delete("tenants", "t2")
        put, changed, deleted = await watch.lines(3)
        assert (put["type"], put["key"], put["object"]) == ("put", "t2", {"key": "t2", "tenantName": "t2"})
        assert changed["object"]["defaultNetwork"] == "blue"
        assert (deleted["type"], deleted["key"]) == ("delete", "t2")
        assert put["revision"] < changed["revision"] < deleted["revision"]


async def test_the_delete_of_a_rule_names_the_rule(rest: Rest) -> None:
    """W24: a delete event identifies its object. The rules of a deleted policy have their own events."""
    await rest.put("policys", tenantName="default", policyName="p")
    async with watching(rest, "rules") as watch:
        await watch.until_synced()
        for number in ("1", "2"):
            rule = {"policyName": "p", "ruleId": number, "direction": "in", "action": "deny"}
            (await rest.put("rules", tenantName="default", **rule)).accepted()
        (await rest.delete("policys", "default:p")).accepted()
        seen = [(line["type"], line["key"]) for line in await watch.lines(4)]
        assert seen == [
            ("put", "default:p:1"),
            ("put", "default:p:2"),
            ("delete", "default:p:1"),
            ("delete", "default:p:2"),
        ]


async def test_a_watch_resumes_from_a_revision_without_a_gap(rest: Rest) -> None:
    """W3: a client that lists, then watches from the listed revision, misses nothing in between."""
    listing = await rest.get("tenants")
    await rest.put("tenants", tenantName="t1")
    async with watching(rest, "tenants", f"watch=true&since={listing.headers['X-Revision']}") as watch:
        line = await watch.line()
        assert line is not None
        assert (line["type"], line["key"]) == ("put", "t1")
        await rest.delete("tenants", "t1")
        last = await watch.line()
        assert last is not None
        assert last["type"] == "delete"
    async with watching(rest, "tenants", f"watch=true&since={last['revision']}") as watch:
        await rest.put("tenants", tenantName="t2")
        line = await watch.line()
        assert line is not None
        assert line["key"] == "t2"


async def test_a_watch_from_a_compacted_revision_is_rejected() -> None:
    """The client must list again, which endless empty responses would not show."""
    async with MemoryStore(history=50) as store, running_master(store=store) as rest:
        for number in range(60):
            await store.commit([], [Put(StoreKey("alive/nodes/n1"), b"%d" % number)])
        async with watching(rest, "tenants", "watch&since=1") as watch:
            line = await watch.line()
            assert line is not None
            assert (line["type"], line["code"]) == ("error", "compacted")
            assert await watch.line() is None


async def test_a_watch_is_filtered(rest: Rest) -> None:
    """An object that no longer matches the filter is sent as deleted."""
    await rest.put("policys", tenantName="default", policyName="p", mode="audit")
    await rest.put("policys", tenantName="default", policyName="q")
    async with watching(rest, "policys", "watch&mode=audit") as watch:
        assert [line["key"] for line in await watch.until_synced()] == ["default:p"]
        await rest.put("policys", tenantName="default", policyName="q", mode="audit")
        await rest.put("policys", tenantName="default", policyName="p")
        seen = [(line["type"], line["key"]) for line in await watch.lines(2)]
        assert seen == [("put", "default:q"), ("delete", "default:p")]


async def test_read_only_members_are_not_shown(rest: Rest) -> None:
    network = {"networkName": "blue", "encap": "vlan", "subnet": "10.1.1.0/24"}
    await rest.put("networks", tenantName="default", **network)
    async with watching(rest, "networks") as watch:
        (listed,) = await watch.until_synced()
        assert "tags" not in listed["object"]


async def test_an_undecodable_document_does_not_end_a_watch() -> None:
    async with MemoryStore() as store, running_master(store=store) as rest:
        await store.commit([], [Put(StoreKey("tenants/odd"), b"{")])
        async with watching(rest, "tenants") as watch:
            assert [line["key"] for line in await watch.until_synced()] == ["default"]
            await store.commit([], [Put(StoreKey("tenants/default"), b"[")])
            await rest.put("tenants", tenantName="t1")
            seen = [(line["type"], line["key"]) for line in await watch.lines(2)]
            assert seen == [("delete", "default"), ("put", "t1")]


async def test_concurrent_watches_see_the_same_changes(rest: Rest) -> None:
    async def keys() -> list[str]:
        async with watching(rest, "tenants") as watch:
            seen = [line["key"] for line in await watch.until_synced()]
            while len(seen) < 6:
                seen += [line["key"] for line in await watch.lines(1)]
            return seen

    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(keys()) for _ in range(10)]
        for number in range(5):
            (await rest.put("tenants", tenantName=f"t{number}")).accepted()
    for watch in watches:
        assert watch.result() == ["default", *(f"t{number}" for number in range(5))]


@pytest.mark.parametrize("query", ["watch=maybe", "watch&since=x", "watch&since=-1", "watch&colour=red"])
async def test_a_bad_watch_is_rejected(rest: Rest, query: str) -> None:
    (await rest.get("tenants", query=query)).refused(400)


async def test_a_watch_ends_with_its_master() -> None:
    async with AsyncExitStack() as running:
        rest = await running.enter_async_context(running_master())
        async with client(rest.url) as other, watching(other, "tenants") as watch:
            await watch.until_synced()
            await soon(running.aclose())
            assert await watch.line() is None
