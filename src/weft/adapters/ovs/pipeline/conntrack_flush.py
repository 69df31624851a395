"""Which conntrack entries to flush when an address changes its owner (pure).

Conntrack entries outlive the endpoint that made them. Policy goes by the addresses of the connection, so replies of an
old connection would reach a new endpoint with the same address. To flush by address OVS walks the whole table, which
is slow with very many connections. So entries of remote endpoints are flushed only when the address is used again;
entries of VIPs and gateways, which are exempt from policy, at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Port, StateItem
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Vip
from weft.domain.policy.policymap.policy_state import IpIdentity

TenantAddress = tuple[TenantName, Address]
_POLICY_EXEMPT = (Gateway, Vip)


class StaleConntrack:
    """Addresses without an owner that may still have conntrack entries."""

    def __init__(self) -> None:
        self._stale: set[TenantAddress] = set()

    def update(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> set[TenantAddress]:
        """Record a change of state items; the addresses to flush once the flows have changed."""
        dropped, added = [*drop], tenant_addresses(put)
        self._stale |= tenant_addresses(dropped) - added
        return self._stale & (added | tenant_addresses(item for item in dropped if isinstance(item, _POLICY_EXEMPT)))

    def mark_flushed(self, addresses: Set[TenantAddress]) -> None:
        """Forget addresses whose entries have been flushed. Until then `update` returns them again."""
        self._stale -= addresses

    def forget_tenants(self, tenants: Set[TenantName]) -> None:
        """Forget the addresses of deleted tenants, whose conntrack zones have been flushed."""
        self._stale = {(tenant, address) for tenant, address in self._stale if tenant not in tenants}


def tenant_addresses(items: Iterable[StateItem]) -> set[TenantAddress]:
    """The addresses that state items assign to an owner."""
    addresses: set[TenantAddress] = set()
    for item in items:
        if isinstance(item, Gateway | Vip | IpIdentity):
            addresses.add((item.tenant, item.address))
        elif isinstance(item, Port | RemoteMac):
            addresses.update((item.tenant, address) for address in item.addresses)
    return addresses
