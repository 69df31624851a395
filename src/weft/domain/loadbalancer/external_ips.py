"""At which outer addresses the services of a tenant may be asked: those that are the tenant's, and nobody else's.

Whoever may make a service could otherwise take any address of the world away from its neighbours, that of the cluster's
own names or of a node included (CVE-2020-8554, CVE-2026-32254, CVE-2026-53935). So the owner of the cluster says which
ranges a tenant has, no two tenants have the same, and what means something here already is never one of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from weft.domain import kinds
from weft.domain.addresses import Address, Range, parse_address, parse_prefix_or_range, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.ids import TenantName
from weft.domain.ipam import ipam

_NOT_OF_THE_WORLD = {
    "0.0.0.0/8": "means no host",
    "127.0.0.0/8": "is loopback",
    "169.254.0.0/16": "means something on one link only",
    "224.0.0.0/3": "is no host's address",
    "::/127": "is loopback",
    "fe80::/10": "means something on one link only",
    "ff00::/8": "is no host's address",
    "fd77:6566:7400::/48": "is Weft's own",
}
_FIXED = tuple((parse_prefix_or_range(text, field="reserved"), why) for text, why in _NOT_OF_THE_WORLD.items())


class OuterRules(msgspec.Struct, frozen=True):
    """What a tenant may have, and what nobody may, with the reason."""

    allowed: tuple[Range, ...] = ()
    reserved: tuple[tuple[Range, str], ...] = _FIXED

    def fault(self, address: Address, own: Container[Address] = ()) -> str:
        """Why a service may not be asked at an address; empty when it may. `own` are addresses of services inside."""
        if not any(each.holds(address) for each in self.allowed):
            return "is not in externalRanges of the tenant"
        if address in own:
            return "is that of a service of the cluster"
        return next((why for each, why in self.reserved if each.holds(address)), "")


def outer_rules(cluster: Cluster, tenant: TenantName) -> OuterRules:
    """The rules as the cluster has them now."""
    stored = cluster.get(kinds.TENANT, tenant)
    texts = stored.value.external_ranges if stored else ()
    allowed = tuple(parse_prefix_or_range(text, field="externalRanges") for text in texts)
    return OuterRules(allowed=allowed, reserved=(*_FIXED, *_taken(cluster)) if allowed else _FIXED)


def _taken(cluster: Cluster) -> Iterator[tuple[Range, str]]:
    """What means something here already."""
    yield parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").whole, "is in pvtSubnet"
    for node in cluster.all(kinds.NODE):
        for text in {node.vtep_ip, node.ctrl_ip} - {""}:
            address = parse_address(text, field="vtepIp")
            yield Range(address.family, address.number, address.number), f"is that of node {node.name}"
    for network in cluster.all(kinds.NETWORK):
        for family in (4, 6):
            if subnet := ipam.subnet_of(network, family):
                yield subnet.whole, f"is in network {network.name} of tenant {network.tenant}"
