"""(cluster, node, tenants, guests) -> how this node's host and its tenants reach each other, and the world (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address, Range, Subnet, parse_address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import wire_number
from weft.domain.desired.state import is_used
from weft.domain.host_access.nodeport_vips import FIRST_DOOR
from weft.domain.host_access.state import (
    HostLink,
    HostPart,
    HostPort,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.ids import EndpointKey, NodeName, TenantName
from weft.domain.ipam import ipam

# fd77:6566:7400::a.b.c.d is the host whose tunnels end at a.b.c.d.
_HOSTS_V6 = 0xFD77_6566_7400_0000 << 64
_PRIVATE_V6 = 0xFD77_6566_7400_0001 << 64
# How many private v4 addresses there are; the first and the last are given to nobody.
_PRIVATE_NUMBERS = FIRST_DOOR

_Named = TenantName | EndpointKey


class PublishedPort(msgspec.Struct, frozen=True):
    """A port of the host that was asked for: of every address of the host, of all of a family (0), or of one."""

    protocol: int
    port: int
    target_port: int
    address: Address | None = None

    def meets(self, other: PublishedPort) -> bool:
        """Whether there is an address of which both are ports."""
        mine, theirs = self.address, other.address
        if mine is None or theirs is None:
            return True
        return mine.family == theirs.family and (mine == theirs or 0 in (mine.number, theirs.number))


class HostReachableEndpoint(msgspec.Struct, frozen=True):
    """A workload of this node, and the ports of the host that lead to it."""

    endpoint: model.Endpoint
    ports: tuple[PublishedPort, ...] = ()


def host_addresses(node: model.Node) -> tuple[Address, ...]:
    """As whom a node's host speaks to workloads: the end of its tunnels, and a v6 address made from that."""
    if not node.vtep_ip:
        return ()
    vtep = parse_address(node.vtep_ip, field="vtepIp")
    return (vtep,) if vtep.family == 6 else (vtep, Address(6, _HOSTS_V6 | vtep.number))


def host_view(
    cluster: Cluster, node: NodeName, tenants: Iterable[TenantName], guests: Collection[HostReachableEndpoint]
) -> frozenset[HostPart]:
    """Everything about host access on this node, on which these tenants and workloads are."""
    subnets = {tenant: [*_subnets(cluster, tenant)] for tenant in sorted(tenants)}
    present = [guest for guest in guests if guest.endpoint.tenant in subnets]
    disguised = {tenant for tenant in subnets if _is_disguised(tenant, subnets)}
    names: set[_Named] = {*disguised}
    names |= {guest.endpoint.key for guest in present if guest.endpoint.tenant in disguised}
    privates = _privates(cluster, names)
    found: set[HostPart] = set()
    for tenant in subnets:
        found.update(_tenant_view(cluster, node, tenant, subnets))
        found.update(TenantSnat(tenant, address) for address in privates.get(tenant, ()))
    for guest in present:
        found.update(_guest_view(guest, privates.get(guest.endpoint.key, ())))
    return frozenset(found)


def _tenant_view(
    cluster: Cluster, node: NodeName, tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]
) -> Iterator[HostPart]:
    own = cluster.get(kinds.NODE, node)
    yield HostLink(tenant, host_addresses(own.value) if own else ())
    hosts = [address for each in cluster.all(kinds.NODE) for address in host_addresses(each)]
    others = [*_of_others(tenant, subnets)]
    infra = {*_subnets(cluster, tenant, nw_type="infra")}  # the host has an interface of its own there
    for subnet in subnets[tenant]:
        whole = subnet.whole
        foreign = any(whole.overlaps(other) for other in others) or any(map(whole.holds, hosts))
        yield TenantSubnet(tenant, subnet, routed=not foreign and subnet not in infra)
    yield from _homewards(cluster, node, tenant)


def _homewards(cluster: Cluster, node: NodeName, tenant: TenantName) -> Iterator[RemoteHostReturnRoute]:
    """Every overlay leads to every node: the first that is there will do, and without one the uplinks."""
    numbers = [
        wire_number(network.tags)
        for network in cluster.networks(tenant)
        if network.tags and is_used(cluster, network.key)
    ]
    for other in cluster.all(kinds.NODE) if numbers else ():
        if other.name != node:
            for address in host_addresses(other):
                yield RemoteHostReturnRoute(tenant, min(numbers), other.vtep_ip, address)


def _guest_view(guest: HostReachableEndpoint, privates: Iterable[Address]) -> Iterator[HostPart]:
    tenant = guest.endpoint.tenant
    known = {address.family: address for address in guest.endpoint.addresses}
    for address in privates:
        if workload := known.get(address.family):
            yield OverlapDnat(tenant, address, workload)
            known[address.family] = address
    for port in guest.ports:
        for family, target in known.items():
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


def _of_others(tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]) -> Iterator[Range]:
    return (each.whole for other, listed in subnets.items() if other != tenant for each in listed)


def _is_disguised(tenant: TenantName, subnets: Mapping[TenantName, list[Subnet]]) -> bool:
    """Whether addresses of a tenant mean others too on this node."""
    others = [*_of_others(tenant, subnets)]
    return any(subnet.whole.overlaps(other) for subnet in subnets[tenant] for other in others)


def _privates(cluster: Cluster, names: Collection[_Named]) -> dict[_Named, tuple[Address, Address]]:
    """A private address of each family for each name, made from the name: the same after every restart (W30).

    Where two names come to the same v4 address the later one gets the next that is free.
    """
    base = parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").base
    taken: set[int] = set()
    found: dict[_Named, tuple[Address, Address]] = {}
    for name in sorted(names, key=str):
        digest = int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:8], "big")
        number = digest % (_PRIVATE_NUMBERS - 2) + 1
        while number in taken:
            number = number % (_PRIVATE_NUMBERS - 2) + 1
        taken.add(number)
        found[name] = Address(4, base + number), Address(6, _PRIVATE_V6 | digest)
    return found
