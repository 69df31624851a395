"""Plans host access: the desired routes and NAT between a node's host, its tenants and the world (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address, Range, Subnet, parse_address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import encap_id
from weft.domain.desired.state import has_endpoints
from weft.domain.host_access.nodeport_vips import FIRST_NODEPORT_VIP
from weft.domain.host_access.state import (
    HostAccessItem,
    HostLink,
    HostPort,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.ids import EndpointKey, NodeName, TenantName
from weft.domain.ipam import ipam

# fd77:6566:7400::a.b.c.d is the host with the VTEP a.b.c.d.
_HOSTS_V6 = 0xFD77_6566_7400_0000 << 64
_PRIVATE_V6 = 0xFD77_6566_7400_0001 << 64
# The private v4 addresses are those below the NodePort VIPs; the first and the last are not assigned.
_PRIVATE_COUNT = FIRST_NODEPORT_VIP

# What has a private address: a tenant (SNAT) or an endpoint (DNAT).
_PrivateOwner = TenantName | EndpointKey


class PublishedPort(msgspec.Struct, frozen=True):
    """A requested host port: on every host address, on all of one family (the unspecified address), or on one."""

    protocol: int
    port: int
    target_port: int
    address: Address | None = None

    def conflicts_with(self, other: PublishedPort) -> bool:
        """Return whether both ports use a common address."""
        mine, theirs = self.address, other.address
        if mine is None or theirs is None:
            return True
        return mine.family == theirs.family and (mine == theirs or 0 in (mine.number, theirs.number))


class HostReachableEndpoint(msgspec.Struct, frozen=True):
    """A workload of this node, and the host ports mapped to it."""

    endpoint: model.Endpoint
    ports: tuple[PublishedPort, ...] = ()


def host_addresses(node: model.Node) -> tuple[Address, ...]:
    """Return the source addresses of a host towards workloads: its VTEP, and a v6 address derived from it."""
    if not node.vtep_ip:
        return ()
    vtep = parse_address(node.vtep_ip, field="vtepIp")
    return (vtep,) if vtep.family == 6 else (vtep, Address(6, _HOSTS_V6 | vtep.number))


def plan_host_access(
    cluster: Cluster, node: NodeName, tenants: Iterable[TenantName], endpoints: Collection[HostReachableEndpoint]
) -> frozenset[HostAccessItem]:
    """Return the desired host access of this node, which has these tenants and workloads."""
    subnets = {tenant: [*_subnets(cluster, tenant)] for tenant in sorted(tenants)}
    local = [each for each in endpoints if each.endpoint.tenant in subnets]
    overlapping = {tenant for tenant in subnets if _overlaps(tenant, subnets)}
    owners: set[_PrivateOwner] = {*overlapping}
    owners |= {each.endpoint.key for each in local if each.endpoint.tenant in overlapping}
    private_addresses = _private_addresses(cluster, owners)
    items: set[HostAccessItem] = set()
    for tenant in subnets:
        items.update(_tenant_items(cluster, node, tenant, subnets))
        items.update(TenantSnat(tenant, address) for address in private_addresses.get(tenant, ()))
    for each in local:
        items.update(_endpoint_items(each, private_addresses.get(each.endpoint.key, ())))
    return frozenset(items)


def _tenant_items(
    cluster: Cluster, node: NodeName, tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]
) -> Iterator[HostAccessItem]:
    own = cluster.get(kinds.NODE, node)
    yield HostLink(tenant, host_addresses(own.value) if own else ())
    hosts = [address for known in cluster.all(kinds.NODE) for address in host_addresses(known)]
    others = [*_subnets_of_others(tenant, subnets)]
    # The host has an interface of its own in an infra network, and so a connected route.
    infra = {*_subnets(cluster, tenant, nw_type="infra")}
    for subnet in subnets[tenant]:
        whole = subnet.whole
        # A route would hijack the host's traffic to another tenant or to another host.
        ambiguous = any(whole.overlaps(other) for other in others) or any(map(whole.holds, hosts))
        yield TenantSubnet(tenant, subnet, routed=not ambiguous and subnet not in infra)
    yield from _remote_host_return_routes(cluster, node, tenant)


def _remote_host_return_routes(cluster: Cluster, node: NodeName, tenant: TenantName) -> Iterator[RemoteHostReturnRoute]:
    """Yield a return route to every other host, through the overlay or else through the VLAN uplinks."""
    # Any network of the tenant reaches every node. Encap ids of VLANs are above all VNIs, so the least id is an overlay
    # if there is one.
    encap_ids = [
        encap_id(network.tags)
        for network in cluster.networks(tenant)
        if network.tags and has_endpoints(cluster, network.key)
    ]
    for other in cluster.all(kinds.NODE) if encap_ids else ():
        if other.name != node:
            for address in host_addresses(other):
                yield RemoteHostReturnRoute(tenant, min(encap_ids), other.vtep_ip, address)


def _endpoint_items(reachable: HostReachableEndpoint, private_addresses: Iterable[Address]) -> Iterator[HostAccessItem]:
    tenant = reachable.endpoint.tenant
    targets = {address.family: address for address in reachable.endpoint.addresses}
    for address in private_addresses:
        if workload := targets.get(address.family):
            yield OverlapDnat(tenant, address, workload)
            # From here on the host knows the workload by the private address only.
            targets[address.family] = address
    for port in reachable.ports:
        for family, target in targets.items():
            if port.address is None or port.address.family == family:
                yield HostPort(
                    tenant=tenant,
                    family=family,
                    protocol=port.protocol,
                    port=port.port,
                    target=target,
                    target_port=port.target_port,
                    address=port.address if port.address and port.address.number else None,
                )


def _subnets(cluster: Cluster, tenant: TenantName, *, nw_type: str = "") -> Iterator[Subnet]:
    for network in cluster.networks(tenant):
        for family in (4, 6) if nw_type in ("", network.nw_type) else ():
            if subnet := ipam.subnet_of(network, family):
                yield subnet._replace(span=subnet.whole)


def _subnets_of_others(tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]) -> Iterator[Range]:
    return (subnet.whole for other, listed in subnets.items() if other != tenant for subnet in listed)


def _overlaps(tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]) -> bool:
    """Return whether a tenant's subnets overlap those of another tenant on this node."""
    others = [*_subnets_of_others(tenant, subnets)]
    return any(subnet.whole.overlaps(other) for subnet in subnets[tenant] for other in others)


def _private_addresses(
    cluster: Cluster, owners: Collection[_PrivateOwner]
) -> dict[_PrivateOwner, tuple[Address, Address]]:
    """Return a v4 and a v6 private address per owner, derived from its name: the same after every restart (W30).

    On a v4 collision the later owner gets the next free address.
    """
    base = parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").base
    taken: set[int] = set()
    addresses: dict[_PrivateOwner, tuple[Address, Address]] = {}
    for owner in sorted(owners, key=str):
        digest = int.from_bytes(hashlib.sha256(str(owner).encode()).digest()[:8], "big")
        number = digest % (_PRIVATE_COUNT - 2) + 1
        while number in taken:
            number = number % (_PRIVATE_COUNT - 2) + 1
        taken.add(number)
        addresses[owner] = Address(4, base + number), Address(6, _PRIVATE_V6 | digest)
    return addresses
