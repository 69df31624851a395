"""Who has left an address: whoever comes to it inherits no connection (pure).

A connection is judged by its two ends, and its answers with it: they would pass to somebody else at the same address.
To look for an address in the tracker takes the switch long where there are very many connections. So those of workloads
elsewhere are forgotten when somebody comes to their addresses; those of services, which nobody judges, at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Port, StateItem
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Vip
from weft.domain.policy.policymap.policy_state import IpIdentity

Owned = tuple[TenantName, Address]
_UNJUDGED = (Gateway, Vip)


class StaleConntrack:
    """Addresses that somebody has left, and whose connections the tracker may still have."""

    def __init__(self) -> None:
        self._left: set[Owned] = set()

    def change(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> set[Owned]:
        """Note who goes; the addresses whose connections are to be forgotten once the flows are others."""
        gone, come = [*drop], owned(put)
        self._left |= owned(gone) - come
        return self._left & (come | owned(part for part in gone if isinstance(part, _UNJUDGED)))

    def settle(self, forgotten: Set[Owned]) -> None:
        """The connections of these addresses are forgotten."""
        self._left -= forgotten

    def forget(self, tenants: Set[TenantName]) -> None:
        """Nothing is left of these tenants."""
        self._left = {each for each in self._left if each[0] not in tenants}


def owned(parts: Iterable[StateItem]) -> set[Owned]:
    """The addresses at which some parts say that somebody is."""
    found: set[Owned] = set()
    for part in parts:
        if isinstance(part, Gateway | Vip | IpIdentity):
            found.add((part.tenant, part.address))
        elif isinstance(part, Port | RemoteMac):
            found.update((part.tenant, each) for each in part.addresses)
    return found
