"""CNI verbs on a fake datapath: failures and interleavings that a real kernel does not produce on demand."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from pathlib import Path

import pytest
from tests.support.fake_datapath import FakeNode, fake_node

from weft.agent.store.attachment_store import Stage
from weft.agent.store.node_lease import NodeLease
from weft.cni.chains import Chains
from weft.cni.errors import CniError, Code
from weft.cni.install import NAMES
from weft.cni.request import AttachmentId, Request, parse_request
from weft.domain import kinds
from weft.domain.errors import Conflict, Unavailable
from weft.domain.store_types import Delete
from weft.lab.waiting import DEADLINE, soon, until


def stored(node: FakeNode) -> set[str]:
    return {endpoint.endpoint_id for endpoint in node.cluster.all(kinds.ENDPOINT)}


def all_published(node: FakeNode) -> bool:
    return all(attachment.published for attachment in node.attachment_store)


async def test_a_cancelled_add_is_finished_and_then_undone() -> None:
    """C-047: nothing is left of it in kernel, records and store, and the next ADD works."""
    async with fake_node() as node:
        node.datapath.may_plug.clear()
        adding = asyncio.create_task(node.call("ADD", "a"))
        assert await asyncio.to_thread(node.datapath.plugging.wait, DEADLINE)
        adding.cancel()
        node.datapath.may_plug.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert (node.datapath.plugged, list(node.attachment_store), stored(node)) == ({}, [], set())
        assert json.loads(await node.call("ADD", "a"))["ips"]


async def test_an_add_fails_if_its_endpoint_is_deleted_before_the_answer() -> None:
    """With a requested address: the store has the endpoint before the datapath is configured."""
    async with fake_node() as node:
        node.datapath.may_plug.clear()
        adding = asyncio.create_task(node.call("ADD", "a", b',"runtimeConfig":{"ips":["10.1.0.9"]}'))
        await until(lambda: stored(node) == {"a"})
        await node.store.commit([], [Delete(kinds.ENDPOINT.store_key("default", "default-net", "a"))])
        await until(lambda: stored(node) == set())
        node.datapath.may_plug.set()
        with pytest.raises(Unavailable, match="deleted from the store while it was being attached"):
            await adding
        assert (node.datapath.plugged, list(node.attachment_store)) == ({}, [])


async def test_gc_goes_on_after_an_error_and_reports_all_of_them() -> None:
    """C-098."""
    async with fake_node() as node:
        for name in "abcd":
            await node.call("ADD", name)
        node.datapath.refused = {"a", "c"}
        with pytest.raises(CniError, match="2 attachments") as raised:
            await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        assert "a: " in raised.value.details
        assert "c: " in raised.value.details
        assert {plugged.container for plugged in node.datapath.plugged} == {"a", "c"}
        node.datapath.refused = set()
        await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        assert (node.datapath.plugged, stored(node)) == ({}, set())


async def test_a_late_gc_does_not_touch_a_newer_attachment() -> None:
    """C-099: a runtime must not run GC during ADD and DEL; if it does, newer attachments stay."""
    async with fake_node() as node:
        await node.call("ADD", "a")
        deleting = asyncio.create_task(node.call("DEL", "a"))
        adding = asyncio.create_task(node.call("ADD", "a"))
        await asyncio.sleep(0)
        await node.call("GC", members=b',"cni.dev/valid-attachments":[]')
        await asyncio.gather(deleting, adding)
        await until(lambda: stored(node) == {plugged.container for plugged in node.datapath.plugged})
        assert {attachment.endpoint.endpoint_id for attachment in node.attachment_store} == stored(node)


async def test_status_says_what_is_wrong_and_who_is_affected() -> None:
    """C-090, C-091: 50 while only ADD cannot be served, 51 where attached pods may suffer too."""
    async with fake_node() as node:
        assert await node.call("STATUS") == b""
        node.attachments.ready.clear()
        with pytest.raises(CniError, match="restoring") as raised:
            await node.call("STATUS")
        assert raised.value.code == Code.UNAVAILABLE
        node.attachments.ready.set()
        node.reconciler.fault = "no room for routes"
        with pytest.raises(CniError, match="no room for routes") as raised:
            await node.call("STATUS")
        assert raised.value.code == Code.UNAVAILABLE_AND_LIMITED


async def test_an_endpoint_deleted_from_the_store_is_evicted_at_once() -> None:
    """By the watch event, not by a timer."""
    async with fake_node() as node:
        await node.call("ADD", "a")
        await node.call("ADD", "b")
        await until(lambda: stored(node) == {"a", "b"} and all_published(node))
        assert not node.evictions.pending.is_set()
        await node.store.commit([], [Delete(kinds.ENDPOINT.store_key("default", "default-net", "a"))])
        await soon(node.evictions.pending.wait())
        await node.attachments.evict()
        assert {plugged.container for plugged in node.datapath.plugged} == {"b"}
        await node.call("DEL", "a")
        assert {attachment.endpoint.endpoint_id for attachment in node.attachment_store} == {"b"}


async def test_a_failed_eviction_does_not_keep_the_others_from_theirs() -> None:
    async with fake_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await until(lambda: stored(node) == {"a", "b"} and all_published(node))
        keys = [kinds.ENDPOINT.store_key("default", "default-net", name) for name in "ab"]
        await node.store.commit([], [Delete(key) for key in keys])
        await soon(node.evictions.pending.wait())
        node.datapath.refused = {"a"}
        with pytest.raises(Exception, match="a is stuck"):
            await node.attachments.evict()
        assert {plugged.container for plugged in node.datapath.plugged} == {"a"}


@pytest.mark.parametrize("pods", [1_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_deleted_pods_leave_nothing_in_memory(pods: int) -> None:
    """A node that has had many pods uses no more memory than a fresh one: no lock and no record of them is left."""
    async with fake_node() as node:
        await node.call("ADD", "first")
        await node.call("DEL", "first")
        before = _ours()
        for number in range(pods):
            await node.call("ADD", f"pod-{number}")
            await node.call("DEL", f"pod-{number}")
        grown = {kind: count - before[kind] for kind, count in _ours().items() if count > before[kind] + 100}
        assert grown == {}


def _ours() -> Counter[str]:
    """How many objects of each asyncio and agent class there are."""
    gc.collect()
    names = (f"{type(live).__module__}.{type(live).__name__}" for live in gc.get_objects())
    return Counter(name for name in names if name.startswith(("asyncio.", "weft.agent.")))


async def test_only_add_is_refused_and_only_while_the_chain_is_broken(tmp_path: Path) -> None:
    """P-51: containers that were attached before can be removed."""
    async with fake_node(chains=Chains(tmp_path, ours=NAMES)) as node:
        await node.call("ADD", "a")
        file = tmp_path / "weft.conflist"
        file.write_text(json.dumps({"name": "weft", "plugins": [{"type": "weft-cni"}, {"type": "portmap"}]}))
        with pytest.raises(CniError, match="portmap") as raised:
            await node.call("ADD", "b")
        assert raised.value.code == Code.BAD_CONFIG
        assert await node.call("DEL", "a") == b""
        assert node.datapath.plugged == {}
        file.unlink()
        assert json.loads(await node.call("ADD", "b"))["ips"]


async def test_an_add_beyond_the_offline_limit_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit passes while the datapath is configured: its address may be freed by node GC at any moment."""
    async with fake_node() as node:
        await node.call("ADD", "a")
        await until(lambda: all_published(node))
        node.datapath.may_plug.clear()
        node.datapath.plugging.clear()
        adding = asyncio.create_task(node.call("ADD", "b"))
        assert await asyncio.to_thread(node.datapath.plugging.wait, DEADLINE)
        monkeypatch.setattr(NodeLease, "may_allocate", False)
        node.datapath.may_plug.set()
        with pytest.raises(Unavailable, match="--offline-limit"):
            await adding
        assert {plugged.container for plugged in node.datapath.plugged} == {"a"}
        assert {attachment.endpoint.endpoint_id for attachment in node.attachment_store} == {"a"}


async def test_the_record_is_written_before_the_datapath_and_the_store_follows() -> None:
    """An address of an own block: the store is not on the path of the ADD."""
    async with fake_node() as node:
        await node.call("ADD", "first")
        await until(lambda: all_published(node))
        node.datapath.may_plug.clear()
        node.datapath.plugging.clear()
        adding = asyncio.create_task(node.call("ADD", "a"))
        assert await asyncio.to_thread(node.datapath.plugging.wait, DEADLINE)
        record = node.attachment_store.find(AttachmentId("a", "eth0"))
        assert record is not None
        assert (record.stage, record.config is not None, record.published) == (Stage.CONFIGURING, True, False)
        assert stored(node) == {"first"}
        node.datapath.may_plug.set()
        await adding
        record = node.attachment_store.find(AttachmentId("a", "eth0"))
        assert record is not None
        assert record.stage is Stage.ATTACHED
        await until(lambda: stored(node) == {"first", "a"})


def request_for(verb: str, container: str, interface: str) -> Request:
    named = {
        "COMMAND": verb,
        "CONTAINERID": container,
        "IFNAME": interface,
        "NETNS": f"/paper/{container}",
        "PATH": "/",
    }
    config = b'{"cniVersion":"1.1.0","name":"weft","type":"weft-cni"}'
    return parse_request({f"CNI_{name}": value for name, value in named.items()}, config)


async def test_L1_an_interface_and_another_container_never_share_an_endpoint() -> None:
    """Interface net1 of `web` and the first interface of `web-net1` are two ports, whichever comes first."""
    attachments = [
        ("web", "eth0"),
        ("web", "net1"),
        ("web-net1", "eth0"),
        ("web-net1", "net1"),
        ("web-net1-net1", "eth0"),
    ]
    async with fake_node() as node:
        results = [json.loads(await node.attachments.serve(request_for("ADD", *each))) for each in attachments]
        addresses = {result["ips"][0]["address"] for result in results}
        assert len(addresses) == len(attachments)
        assert {*node.datapath.plugged} == {AttachmentId(*each) for each in attachments}
        await node.attachments.serve(request_for("DEL", "web", "net1"))
        assert AttachmentId("web-net1", "eth0") in node.datapath.plugged


async def test_L1_an_id_that_another_attachment_has_is_refused_and_leaves_it_alone() -> None:
    """The host itself is an endpoint with the node's name in an infra network: a container may be called like it."""
    async with fake_node() as node:
        (network,) = node.cluster.all(kinds.NETWORK)
        await node.attachments.attach_host(network)
        with pytest.raises(Conflict, match="already"):
            await node.call("ADD", "one")
        assert [attachment.stage for attachment in node.attachment_store] == [Stage.ATTACHED]
