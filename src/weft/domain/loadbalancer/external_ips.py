"""The external IP policy: at which external addresses the services of a tenant may be reached.

Without it, any user who may create a Service could hijack any address, even that of cluster DNS or of a node
(CVE-2020-8554, CVE-2026-32254, CVE-2026-53935). So the operator assigns ranges to each tenant, ranges of two tenants
never overlap, and addresses already in use in the cluster are excluded.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from weft.domain import kinds
from weft.domain.addresses import Address, Range, parse_address, parse_prefix_or_range, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.ids import TenantName
from weft.domain.ipam import ipam

# Special-purpose addresses (RFC 6890), and the ULA prefix of Weft's own addresses. They never route to a service.
_SPECIAL_PURPOSE = {
    "0.0.0.0/8": "is in 0.0.0.0/8",
    "127.0.0.0/8": "is loopback",
    "169.254.0.0/16": "is link-local",
    "224.0.0.0/3": "is multicast or reserved",
    "::/127": "is loopback",
    "fe80::/10": "is link-local",
    "ff00::/8": "is multicast",
    "fd77:6566:7400::/48": "is reserved by Weft",
}
_FIXED = tuple((parse_prefix_or_range(text, field="reserved"), reason) for text, reason in _SPECIAL_PURPOSE.items())


class ExternalIpPolicy(msgspec.Struct, frozen=True):
    """The ranges that a tenant may use, and those that no tenant may use, with the reason."""

    allowed: tuple[Range, ...] = ()
    reserved: tuple[tuple[Range, str], ...] = _FIXED

    def fault(self, address: Address, cluster_ips: Container[Address] = ()) -> str:
        """Return why a service may not have this external address; empty if it may."""
        if not any(allowed.holds(address) for allowed in self.allowed):
            return "is not in externalRanges of the tenant"
        # A cluster IP may also be in a reserved range; this reason is the more specific one.
        if address in cluster_ips:
            return "is the cluster IP of a service"
        return next((reason for reserved, reason in self.reserved if reserved.holds(address)), "")


def external_ip_policy(cluster: Cluster, tenant: TenantName) -> ExternalIpPolicy:
    """Return the policy of a tenant in the current cluster state."""
    stored = cluster.get(kinds.TENANT, tenant)
    texts = stored.value.external_ranges if stored else ()
    allowed = tuple(parse_prefix_or_range(text, field="externalRanges") for text in texts)
    # Without allowed ranges every address is refused anyway, so the scan over nodes and networks is skipped.
    return ExternalIpPolicy(allowed=allowed, reserved=(*_FIXED, *_in_use(cluster)) if allowed else _FIXED)


def _in_use(cluster: Cluster) -> Iterator[tuple[Range, str]]:
    """Yield the ranges that the cluster itself uses."""
    yield parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").whole, "is in pvtSubnet"
    for node in cluster.all(kinds.NODE):
        for text in {node.vtep_ip, node.ctrl_ip} - {""}:
            address = parse_address(text, field="vtepIp")
            yield Range(address.family, address.number, address.number), f"is an address of node {node.name}"
    for network in cluster.all(kinds.NETWORK):
        for family in (4, 6):
            if subnet := ipam.subnet_of(network, family):
                yield subnet.whole, f"is in network {network.name} of tenant {network.tenant}"
