"""A topic is something that the reconciler tells the datapath beside the node view, by differences of its own.

Each keeps what it has told, and answers in time proportional to what has changed. Whoever takes a difference hands it
to the datapath before anything else can happen: differences build on each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Protocol

from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.ids import StoreKey, TenantName

NOTHING: Difference[StateItem] = Difference((), ())


class DatapathFeature(Protocol):
    """See the module. `tenants` are always all that have workloads on this node."""

    def replace(self) -> None:
        """The cluster was read anew: nothing that was known of it holds."""
        ...

    def follow(self, key: StoreKey) -> None:
        """An object of the cluster is another, or gone."""
        ...

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What is to be told with the port of a workload of this node."""
        ...

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What is to be told when the port of a workload of this node goes."""
        ...

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        """What is new since the datapath was told last."""
        ...

    def everything(self, tenants: Set[TenantName]) -> Iterable[StateItem]:
        """All that the datapath should have, which it is told of now."""
        ...


def joined(differences: Iterable[Difference[StateItem]]) -> Difference[StateItem]:
    """Several differences as one: the first is put first and dropped last."""
    listed = list(differences)
    return Difference(
        tuple(part for each in listed for part in each.put),
        tuple(part for each in reversed(listed) for part in each.drop),
    )
