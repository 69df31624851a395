"""Observers of tenant netns are notified after a netns is created and before it is removed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager

import pytest
from tests.support.fake_cluster import DEFAULT
from tests.support.fake_datapath import FakeDatapath, FakeNode, fake_node

from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem, TenantNetns
from weft.domain.ids import TenantName
from weft.ports.datapath import DriftReport


class RecordingObserver:
    """Records its notifications, and between them what the datapath applies."""

    def __init__(self, datapath: FakeDatapath) -> None:
        self.events: list[str] = []
        self._apply_to_datapath = datapath.apply
        datapath.apply = self._apply  # type: ignore[method-assign]

    def _apply(self, difference: object) -> None:
        assert isinstance(difference, Difference)
        self._apply_to_datapath(difference)
        self.events += [f"made {part.tenant}" for part in _netns_items(difference.put)]
        self.events += [f"removed {part.tenant}" for part in _netns_items(difference.drop)]

    async def leave_all_but(self, tenants: Set[TenantName]) -> None:
        self.events.append(f"leave all but {sorted(tenants)}")

    def enter(self, tenants: Set[TenantName], *, recreated: bool = False) -> None:
        self.events.append(f"enter {sorted(tenants)}{' recreated' if recreated else ''}")

    def policy_changed(self, tenant: TenantName) -> None:
        self.events.append(f"policy of {tenant}")

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        self.events.append(f"add {endpoint.endpoint_id}")

    def remove_endpoint(self, endpoint: model.Endpoint) -> None:
        self.events.append(f"remove {endpoint.endpoint_id}")


def _netns_items(parts: tuple[StateItem, ...]) -> list[TenantNetns]:
    return [part for part in parts if isinstance(part, TenantNetns)]


@asynccontextmanager
async def observed_node() -> AsyncIterator[tuple[FakeNode, RecordingObserver]]:
    observers: list[RecordingObserver] = []

    def observe(datapath: FakeDatapath) -> RecordingObserver:
        observers.append(RecordingObserver(datapath))
        return observers[0]

    async with fake_node(observe=observe) as node:
        yield node, observers[0]


async def test_observers_enter_a_netns_that_exists_and_leave_it_before_it_is_removed() -> None:
    async with observed_node() as (node, observer):
        await node.call("ADD", "c1")
        assert observer.events == [
            f"leave all but ['{DEFAULT}']", f"made {DEFAULT}", f"enter ['{DEFAULT}']", "add c1",
        ]  # fmt: skip
        observer.events.clear()
        await node.call("DEL", "c1")
        node.reconciler.mark_dirty()
        await node.reconciler.converge()
        # The read-back itself removes the netns, and so reports a repair.
        assert observer.events == ["remove c1", "leave all but []", "enter [] recreated"]


async def test_after_a_repair_a_netns_may_be_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with observed_node() as (node, observer):
        await node.call("ADD", "c1")
        observer.events.clear()
        await node.reconciler.converge()
        monkeypatch.setattr(node.datapath, "converge", lambda _, **__: DriftReport(repaired=("recreated the netns",)))
        await node.reconciler.converge()
        assert [event for event in observer.events if "enter" in event] == [
            f"enter ['{DEFAULT}']",
            f"enter ['{DEFAULT}'] recreated",
        ]
