"""The use cases of CNI on a node on paper: what the real kernel does not do at a word."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter

import pytest
from tests.support.fake_datapath import PaperNode, paper_node

from weft.cni.errors import CniError, Code
from weft.domain import kinds
from weft.domain.errors import Unavailable
from weft.domain.store_types import Delete
from weft.lab.waiting import DEADLINE, soon, until


def stored(node: PaperNode) -> set[str]:
    return {endpoint.endpoint_id for endpoint in node.cluster.all(kinds.ENDPOINT)}


async def test_an_add_that_is_cancelled_is_finished_and_then_undone() -> None:
    """C-047: at whatever point, nothing is left of it in kernel, ledger and store, and the next ADD works."""
    async with paper_node() as node:
        node.datapath.may_plug.clear()
        adding = asyncio.create_task(node.call("ADD", "a"))
        assert await asyncio.to_thread(node.datapath.plugging.wait, DEADLINE)
        adding.cancel()
        node.datapath.may_plug.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert (node.datapath.plugged, list(node.journal), stored(node)) == ({}, [], set())
        assert json.loads(await node.call("ADD", "a"))["ips"]


async def test_an_add_whose_endpoint_is_deleted_meanwhile_is_not_answered_with_success() -> None:
    """One that asks for its address: the store knows it before it is wired."""
    async with paper_node() as node:
        node.datapath.may_plug.clear()
        adding = asyncio.create_task(node.call("ADD", "a", b',"runtimeConfig":{"ips":["10.1.0.9"]}'))
        await until(lambda: stored(node) == {"a"})
        await node.store.commit([], [Delete(kinds.ENDPOINT.store_key("default", "default-net", "a"))])
        await until(lambda: stored(node) == set())
        node.datapath.may_plug.set()
        with pytest.raises(Unavailable, match="taken back"):
            await adding
        assert (node.datapath.plugged, list(node.journal)) == ({}, [])


async def test_gc_goes_on_after_an_error_and_reports_all_of_them() -> None:
    """C-098."""
    async with paper_node() as node:
        for name in "abcd":
            await node.call("ADD", name)
        node.datapath.refused = {"a", "c"}
        with pytest.raises(CniError, match="2 attachments") as told:
            await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        assert "a: " in told.value.details
        assert "c: " in told.value.details
        assert {each.container for each in node.datapath.plugged} == {"a", "c"}
        node.datapath.refused = set()
        await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        assert (node.datapath.plugged, stored(node)) == ({}, set())


async def test_a_gc_that_comes_late_does_not_touch_a_newer_attachment() -> None:
    """C-099: a runtime never runs it beside ADD and DEL; if one does all the same, what is new is left alone."""
    async with paper_node() as node:
        await node.call("ADD", "a")
        deleting = asyncio.create_task(node.call("DEL", "a"))
        adding = asyncio.create_task(node.call("ADD", "a"))
        await asyncio.sleep(0)
        await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        await asyncio.gather(deleting, adding)
        await until(lambda: stored(node) == {each.container for each in node.datapath.plugged})
        assert {note.endpoint.endpoint_id for note in node.journal} == stored(node)


async def test_status_says_what_is_wrong_and_whom_it_concerns() -> None:
    """C-090, C-091: 50 while only ADD cannot be served, 51 where attached pods may suffer too."""
    async with paper_node() as node:
        assert await node.call("STATUS") == b""
        node.attachments.ready.clear()
        with pytest.raises(CniError, match="restoring") as told:
            await node.call("STATUS")
        assert told.value.code == Code.UNAVAILABLE
        node.attachments.ready.set()
        node.reconciler.fault = "no room for routes"
        with pytest.raises(CniError, match="no room for routes") as told:
            await node.call("STATUS")
        assert told.value.code == Code.UNAVAILABLE_AND_LIMITED


async def test_what_the_store_takes_back_is_taken_off_at_the_news() -> None:
    """No clock is waited for: the very news of it says that there is something to do."""
    async with paper_node() as node:
        await node.call("ADD", "a")
        await node.call("ADD", "b")
        await until(lambda: stored(node) == {"a", "b"} and all(note.published for note in node.journal))
        assert not node.evictions.news.is_set()
        await node.store.commit([], [Delete(kinds.ENDPOINT.store_key("default", "default-net", "a"))])
        await soon(node.evictions.news.wait())
        await node.attachments.evict()
        assert {each.container for each in node.datapath.plugged} == {"b"}
        await node.call("DEL", "a")
        assert {note.endpoint.endpoint_id for note in node.journal} == {"b"}


async def test_one_that_cannot_be_taken_off_does_not_keep_the_others() -> None:
    async with paper_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await until(lambda: stored(node) == {"a", "b"} and all(note.published for note in node.journal))
        gone = [kinds.ENDPOINT.store_key("default", "default-net", name) for name in "ab"]
        await node.store.commit([], [Delete(key) for key in gone])
        await soon(node.evictions.news.wait())
        node.datapath.refused = {"a"}
        with pytest.raises(Exception, match="a is stuck"):
            await node.attachments.evict()
        assert {each.container for each in node.datapath.plugged} == {"a"}


@pytest.mark.parametrize("pods", [1_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_nothing_is_kept_of_pods_that_came_and_went(pods: int) -> None:
    """A node that has seen many pods is no larger than a fresh one: no lock and no note of them is left."""
    async with paper_node() as node:
        await node.call("ADD", "first")
        await node.call("DEL", "first")
        before = _ours()
        for number in range(pods):
            await node.call("ADD", f"pod-{number}")
            await node.call("DEL", f"pod-{number}")
        grown = {kind: count - before[kind] for kind, count in _ours().items() if count > before[kind] + 100}
        assert grown == {}


def _ours() -> Counter[str]:
    """How many objects there are of each kind of asyncio's and of the agent's."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith(("asyncio.", "weft.agent.")))
