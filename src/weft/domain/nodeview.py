"""(cluster, node) -> what this node's network should consist of: the one road from intent to wanted state.

The answer is a set of small frozen parts, the same whatever datapath carries them out; a datapath reads back what it
has in the same terms, so that restart, drift and a lost watch are all one difference of two sets. Only tenants with an
endpoint on this node are there at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.domain import ipam, kinds, model
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.ids import EndpointKey, NetworkKey, NodeName, TenantName


class Prefix(NamedTuple):
    """A block of addresses as routes name it."""

    family: int
    base: int
    length: int

    def __str__(self) -> str:
        return f"{Address(self.family, self.base)}/{self.length}"


class Space(msgspec.Struct, frozen=True, gc=False):
    """A tenant's own network space on this node."""

    tenant: TenantName


class Gateway(msgspec.Struct, frozen=True, gc=False):
    """An address that this node answers for in the tenant's space; the same on every node."""

    tenant: TenantName
    address: Address


class Overlay(msgspec.Struct, frozen=True, gc=False):
    """The way to other nodes for one network."""

    tenant: TenantName
    vni: int


class Peer(msgspec.Struct, frozen=True, gc=False):
    """Another node on an overlay, by the address its tunnel ends at."""

    tenant: TenantName
    vni: int
    vtep: str


class Remote(msgspec.Struct, frozen=True, gc=False):
    """Addresses that are reached through a peer."""

    tenant: TenantName
    prefix: Prefix
    vni: int
    vtep: str


class Port(msgspec.Struct, frozen=True, gc=False):
    """A workload's attachment, seen from the node: its host end, and the addresses and MAC that may come from it."""

    tenant: TenantName
    interface: str
    mac: str
    addresses: tuple[Address, ...]


Part = Space | Gateway | Overlay | Peer | Remote | Port

_RANKS: dict[type, int] = {Space: 0, Gateway: 1, Overlay: 2, Peer: 3, Remote: 4, Port: 5}


def rank(part: Part) -> int:
    """Parts of a lower rank must be there first."""
    return _RANKS[type(part)]


def host_end(key: EndpointKey) -> str:
    """The name of an endpoint's host end: fits into 15 characters, and tells ours from others'."""
    return "wp" + hashlib.sha256(str(key).encode()).hexdigest()[:11]


def node_view(cluster: Cluster, node: NodeName) -> frozenset[Part]:
    """Everything this node should have."""
    local = [endpoint for endpoint in cluster.all(kinds.ENDPOINT) if endpoint.host == node]
    parts: set[Part] = {port_of(endpoint) for endpoint in local}
    for tenant in sorted({endpoint.tenant for endpoint in local}):
        parts.update(tenant_parts(cluster, node, tenant))
    return frozenset(parts)


def tenant_parts(cluster: Cluster, node: NodeName, tenant: TenantName) -> Iterator[Part]:
    """What a tenant with an endpoint here needs, besides its ports."""
    yield Space(tenant)
    for network in cluster.networks(tenant):
        for family in (4, 6):
            gateway = ipam.gateway_of(network, family)
            if gateway:
                yield Gateway(tenant, gateway)
        if network.tags and network.tags.vni:
            yield from _overlay_parts(cluster, node, network, network.tags.vni)


def _overlay_parts(cluster: Cluster, node: NodeName, network: model.Network, vni: int) -> Iterator[Part]:
    remotes = set(remotes_of(cluster, node, network.key))
    if not remotes and not any(endpoint.host == node for endpoint in cluster.endpoints(network.key)):
        return
    yield Overlay(network.tenant, vni)
    for vtep in {vtep for _, vtep in remotes}:
        yield Peer(network.tenant, vni, vtep)
    for prefix, vtep in remotes:
        yield Remote(network.tenant, prefix, vni, vtep)


def remotes_of(cluster: Cluster, node: NodeName, key: NetworkKey) -> Iterator[tuple[Prefix, str]]:
    """Where the addresses of a network are, as seen from a node: a block by its owner, any other one by one."""
    stored = cluster.get(kinds.NETWORK, *key)
    if stored is None:
        return
    vteps = {each.name: each.vtep_ip for each in cluster.all(kinds.NODE) if each.vtep_ip}
    owned: dict[Address, str] = {}
    for block, owner in cluster.blocks.get(key, {}).items():
        if owner.value.owner:
            owned[block] = owner.value.owner
            vtep = vteps.get(NodeName(owner.value.owner))
            if vtep and owner.value.owner != node:
                yield Prefix(block.family, block.number, (32 if block.family == 4 else 128) - 6), vtep
    for endpoint in cluster.endpoints(key):
        vtep = vteps.get(NodeName(endpoint.host)) or endpoint.vtep_ip
        if endpoint.host == node or not vtep:
            continue
        for address in addresses_of(endpoint):
            in_block = ipam.has_blocks(stored.value, address.family) and owned.get(ipam.block_of(stored.value, address))
            if in_block != endpoint.host:
                yield Prefix(address.family, address.number, 32 if address.family == 4 else 128), vtep


def addresses_of(endpoint: model.Endpoint) -> tuple[Address, ...]:
    """The endpoint's addresses, v4 first."""
    texts = (endpoint.ip_address, endpoint.ipv6_address)
    return tuple(parse_address(text, field="ipAddress") for text in texts if text)


def port_of(endpoint: model.Endpoint) -> Port:
    """The endpoint's host end."""
    return Port(
        tenant=endpoint.tenant,
        interface=host_end(endpoint.key),
        mac=endpoint.mac_address,
        addresses=addresses_of(endpoint),
    )
