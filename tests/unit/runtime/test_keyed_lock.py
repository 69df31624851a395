"""Turns by key, and what they cost when everyone is gone."""

from __future__ import annotations

import asyncio

from weft.runtime.keyed_lock import KeyedLock


async def test_one_at_a_time_for_each_key_in_the_order_of_coming() -> None:
    turns: KeyedLock[str] = KeyedLock()
    story: list[str] = []

    async def visit(key: str, name: str) -> None:
        async with turns[key]:
            story.append(f"{name} comes")
            await asyncio.sleep(0)
            story.append(f"{name} goes")

    await asyncio.gather(visit("a", "one"), visit("a", "two"), visit("a", "three"))
    assert story == [f"{name} {event}" for name in ("one", "two", "three") for event in ("comes", "goes")]


async def test_keys_do_not_wait_for_each_other() -> None:
    turns: KeyedLock[str] = KeyedLock()
    async with turns["a"], turns["b"]:
        assert len(turns) == 2


async def test_unused_keys_take_no_memory() -> None:
    """100,000 pods come and go on a node, each with a name of its own."""
    turns: KeyedLock[int] = KeyedLock()
    for container in range(100_000):
        async with turns[container]:
            pass
    assert len(turns) == 0


async def test_who_gives_up_waiting_leaves_the_turn_to_the_others() -> None:
    turns: KeyedLock[str] = KeyedLock()
    async with turns["a"]:
        waiting = asyncio.create_task(turns["a"].acquire())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    async with turns["a"]:
        assert len(turns) == 1
