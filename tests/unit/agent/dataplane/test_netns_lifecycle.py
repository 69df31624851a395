"""Who else is in tenants' spaces hears of them in the right order: there first, gone last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set

import pytest
from tests.support.fake_cluster import DEFAULT
from tests.support.fake_datapath import PaperDatapath, PaperNode, paper_node

from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem, TenantNetns
from weft.domain.ids import TenantName
from weft.ports.datapath import DriftReport


class Watch:
    """Writes down what it hears, between what the datapath is told."""

    def __init__(self, datapath: PaperDatapath) -> None:
        self.story: list[str] = []
        self._datapath = datapath
        datapath.apply = self._apply  # type: ignore[method-assign]

    def _apply(self, difference: object) -> None:
        assert isinstance(difference, Difference)
        self.story += [f"made {part.tenant}" for part in _spaces(difference.put)]
        self.story += [f"removed {part.tenant}" for part in _spaces(difference.drop)]

    async def leave(self, *, but: Set[TenantName]) -> None:
        self.story.append(f"leave all but {sorted(but)}")

    def enter(self, tenants: Set[TenantName], *, anew: bool = False) -> None:
        self.story.append(f"enter {sorted(tenants)}{' anew' if anew else ''}")

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        self.story.append(f"admit {endpoint.endpoint_id}")

    def dismiss(self, endpoint: model.Endpoint) -> None:
        self.story.append(f"dismiss {endpoint.endpoint_id}")


def _spaces(parts: tuple[StateItem, ...]) -> list[TenantNetns]:
    return [part for part in parts if isinstance(part, TenantNetns)]


@pytest.fixture
async def node() -> AsyncIterator[PaperNode]:
    async with paper_node() as node:
        yield node


async def test_a_space_is_entered_when_it_is_there_and_left_before_it_goes(node: PaperNode) -> None:
    watch = node.reconciler.spaces = Watch(node.datapath)
    await node.call("ADD", "c1")
    assert watch.story == [
        f"leave all but ['{DEFAULT}']", f"made {DEFAULT}", f"enter ['{DEFAULT}']", "admit c1",
    ]  # fmt: skip
    watch.story.clear()
    await node.call("DEL", "c1")
    node.reconciler.mark_dirty()
    await node.reconciler.converge()
    assert watch.story == ["dismiss c1", "leave all but []", "enter []"]


async def test_a_space_that_was_mended_may_be_another(node: PaperNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.call("ADD", "c1")
    watch = node.reconciler.spaces = Watch(node.datapath)
    await node.reconciler.converge()
    monkeypatch.setattr(node.datapath, "converge", lambda _: DriftReport(repaired=("the space is another",)))
    await node.reconciler.converge()
    assert [each for each in watch.story if "enter" in each] == [f"enter ['{DEFAULT}']", f"enter ['{DEFAULT}'] anew"]
