"""Setting the system clock collects no node: unreachability is measured with the monotonic clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds, model
from weft.domain.ids import NodeName
from weft.domain.transaction import put
from weft.lab.servers.masters import Rest, running_master
from weft.lab.waiting import eventually

YEARS = 10 * 365 * 86_400.0


async def unreachable_nodes(rest: Rest) -> dict[str, float]:
    """The unreachable nodes, each with its `unreachableSince`."""
    entries = await rest.state()
    nodes = {key.partition("/")[2]: entry["o"] for key, entry in entries.items() if key.startswith("nodes/")}
    return {name: node["unreachableSince"] for name, node in nodes.items() if node.get("unreachableSince")}


@pytest.mark.parametrize("jump", [YEARS, -YEARS])
async def test_setting_the_clock_collects_no_node(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    offset = 0.0
    monkeypatch.setattr("weft.master.control.node_gc.time", SimpleNamespace(time=lambda: time.time() + offset))
    began = time.time()
    async with MemoryStore() as store, running_master("--offline-limit", "3600", store=store) as rest:
        await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("first")))])
        await eventually(lambda: unreachable_nodes(rest), lambda seen: set(seen) == {"first"})
        offset = jump
        await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("second")))])
        seen = await eventually(lambda: unreachable_nodes(rest), lambda seen: "second" in seen)
        assert set(seen) == {"first", "second"}, "the first one has been unreachable for seconds, not for years"
        assert all(abs(since - began) < 3600 for since in seen.values())


@pytest.mark.parametrize("ahead", [2 * 3600.0, YEARS])
async def test_M4_a_new_leader_whose_clock_is_ahead_collects_no_node(
    monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """M4: a leader counts silence itself, so that no difference between two machines' clocks makes a node look dead."""
    offset = 0.0
    monkeypatch.setattr("weft.master.control.node_gc.time", SimpleNamespace(time=lambda: time.time() + offset))
    async with MemoryStore() as store:
        async with running_master("--offline-limit", "3600", store=store) as rest:
            await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("first")))])
            await eventually(lambda: unreachable_nodes(rest), lambda seen: set(seen) == {"first"})
        offset = ahead
        async with running_master("--offline-limit", "3600", store=store) as rest:
            # Nodes are marked before dead ones are collected: when a second new node is marked, a whole round is over.
            await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("second")))])
            await eventually(lambda: unreachable_nodes(rest), lambda seen: "second" in seen)
            await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("third")))])
            seen = await eventually(lambda: unreachable_nodes(rest), lambda seen: "third" in seen)
            assert set(seen) == {"first", "second", "third"}


async def test_M4_the_next_leader_collects_a_dead_node_too() -> None:
    """M4: each leader counts from its own beginning, and then the limit holds."""
    async with MemoryStore() as store:
        async with running_master("--offline-limit", "3600", store=store) as rest:
            await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("first")))])
            await eventually(lambda: unreachable_nodes(rest), lambda seen: set(seen) == {"first"})
        async with running_master("--offline-limit", "0.5", store=store) as rest:
            await eventually(lambda: unreachable_nodes(rest), lambda seen: not seen)
