"""Workloads whose interfaces others take away under a running agent (R5)."""

from __future__ import annotations

from tests.support.fake_datapath import PaperNode, paper_node

from weft.cni.request import AttachmentId
from weft.domain.errors import DatapathFault, NotFound

A = AttachmentId("a", "eth0")


async def lose(node: PaperNode, *containers: str) -> None:
    """Somebody takes their interfaces away, and the agent looks at everything."""
    for container in containers:
        del node.datapath.plugged[AttachmentId(container, "eth0")]
    node.reconciler.port_lost.clear()
    await node.reconciler.converge()


async def test_what_is_lost_is_wired_again_as_often_as_it_is_lost() -> None:
    async with paper_node() as node:
        await node.call("ADD", "a")
        wiring = node.datapath.plugged[A]
        for _ in range(2):
            await lose(node, "a")
            assert node.reconciler.port_lost.is_set()
            assert await node.attachments.plug_again()
            assert node.datapath.plugged == {A: wiring}


async def test_what_fails_is_tried_again_and_the_others_do_not_wait_for_it() -> None:
    async with paper_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await lose(node, "a", "b")
        node.datapath.faults["a"] = DatapathFault("the switch is away")
        assert not await node.attachments.plug_again()
        assert {each.container for each in node.datapath.plugged} == {"b"}
        assert await node.attachments.plug_again()
        assert {each.container for each in node.datapath.plugged} == {"a", "b"}


async def test_who_cannot_be_had_again_is_left_to_the_runtime() -> None:
    """Its namespace is gone: nobody asks for it again and again, and DEL finds it."""
    async with paper_node() as node:
        await node.call("ADD", "a")
        await lose(node, "a")
        node.datapath.faults["a"] = NotFound("no such namespace")
        assert await node.attachments.plug_again()
        node.reconciler.port_lost.clear()
        await node.reconciler.converge()
        assert not node.reconciler.port_lost.is_set()
        await node.call("DEL", "a")
        assert list(node.journal) == []


async def test_who_leaves_before_it_is_wired_again_is_missed_by_nobody() -> None:
    async with paper_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await lose(node, "a", "b")
        node.datapath.faults["a"] = DatapathFault("the switch is away")
        assert not await node.attachments.plug_again()
        await node.call("DEL", "a")
        assert node.reconciler.missing == set()
        assert await node.attachments.plug_again()
        assert {each.container for each in node.datapath.plugged} == {"b"}


async def test_who_is_just_being_wired_has_lost_nothing() -> None:
    """An ADD makes a doubtful agent look at everything while its own port is noted, and not there yet."""
    async with paper_node() as node:
        await node.call("ADD", "there")
        node.reconciler.port_lost.clear()
        node.reconciler.mark_dirty()
        await node.call("ADD", "a")
        assert (node.reconciler.missing, node.reconciler.port_lost.is_set()) == (set(), False)
        assert {each.container for each in node.datapath.plugged} == {"there", "a"}
