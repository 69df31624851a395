"""Whoever has something of its own inside tenants' spaces: it is told when spaces come, and before they go."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from weft.domain import model
from weft.domain.ids import TenantName


class NetnsObserver(Protocol):
    """See the module. The reconciler tells it; `tenants` are always all that have a space."""

    async def leave(self, *, but: Set[TenantName]) -> None:
        """Other tenants' spaces are about to go: nothing may be left in there. Must not take long, nor raise."""
        ...

    def enter(self, tenants: Set[TenantName], *, anew: bool = False) -> None:
        """These tenants have a space now. `anew`: some may have another than before."""
        ...

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """A workload of this node has rules now. The store may not know it yet."""
        ...

    def dismiss(self, endpoint: model.Endpoint) -> None:
        """A workload of this node is being taken off. The store may never have known it."""
        ...


class NoObserver:
    """Has nothing in there."""

    async def leave(self, *, but: Set[TenantName]) -> None:
        pass

    def enter(self, tenants: Set[TenantName], *, anew: bool = False) -> None:
        pass

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        pass

    def dismiss(self, endpoint: model.Endpoint) -> None:
        pass
