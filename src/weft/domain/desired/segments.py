"""Bridge mode: each network is a segment of its own, on which everyone is found by MAC (docs/design/bridge.md; pure).

So is each group that has a VLAN tag of its own. Nobody routes between segments. Who is on one, and where, is known
from the store, so no MAC is ever learnt and nobody has to be asked; whether a question is answered by the node or
flooded to all is the cluster's `arpMode`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName, TenantName
from weft.domain.ipam import ipam

# Beyond every VNI: the numbers of networks whose frames have VLAN tags instead.
_FIRST_UNTUNNELLED = 1 << 25


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A network, or a group with a tag of its own, as one link, on which everyone of it is.

    Its number is that of the overlay, where it has one.
    """

    tenant: TenantName
    number: int
    # Whether questions for MACs go to everyone; else the node answers them.
    floods: bool

    def __str__(self) -> str:
        return f"segment {self.number}"


class RemoteMac(msgspec.Struct, frozen=True, gc=False):
    """A workload of another node on a segment: its frames go through that node's tunnel, or by the uplinks."""

    tenant: TenantName
    # The network's `wire_number`.
    vni: int
    vtep: str
    mac: str
    addresses: tuple[Address, ...]


def is_bridged(cluster: Cluster) -> bool:
    """Whether networks are segments; else the nodes route between them."""
    return cluster.global_settings().fwd_mode == "bridge"


def floods(cluster: Cluster) -> bool:
    """Whether questions for MACs go to everyone of a segment."""
    return cluster.global_settings().arp_mode == "flood"


def tags_of(cluster: Cluster, network: model.Network, group: str = "") -> model.NetworkTags | None:
    """What a network's frames are told by between nodes; those of a group that has a tag of its own, by that one."""
    stored = cluster.get(kinds.GROUP, network.tenant, group) if group else None
    return model.NetworkTags(vlan=stored.value.pkt_tag) if stored and stored.value.pkt_tag else network.tags


def all_tags_of(cluster: Cluster, network: model.Network) -> Iterator[model.NetworkTags]:
    """The tags of a network and, where it has VLAN tags, of its groups."""
    if network.tags:
        yield network.tags
    for group in cluster.all(kinds.GROUP, network.tenant) if network.encap == "vlan" else ():
        if group.network == network.name and group.pkt_tag:
            yield model.NetworkTags(vlan=group.pkt_tag)


def segment_number(cluster: Cluster, tags: model.NetworkTags | None) -> int:
    """The number of the segment that has these tags; 0 where nodes route."""
    return wire_number(tags) if tags and is_bridged(cluster) else 0


def wire_number(tags: model.NetworkTags) -> int:
    """What a network is called between nodes: its VNI or, beyond all of them, its VLAN tag."""
    return tags.vni or _FIRST_UNTUNNELLED + tags.vlan


def vlan_tag(number: int) -> int:
    """The VLAN tag of a network by its `wire_number`; 0 where it has a VNI."""
    return max(number - _FIRST_UNTUNNELLED, 0)


def segment_of(cluster: Cluster, tenant: TenantName, tags: model.NetworkTags | None) -> Segment | None:
    """The segment of a tenant that has these tags; nothing where nodes route."""
    number = segment_number(cluster, tags)
    return Segment(tenant, number, floods(cluster)) if number else None


def answered_addresses(cluster: Cluster, network: model.Network) -> Iterator[Address]:
    """The addresses of a network that its nodes themselves answer for: its gateways, and its services."""
    for family in (4, 6):
        if gateway := ipam.gateway_of(network, family):
            yield gateway
    for service in cluster.all(kinds.SERVICE, network.tenant):
        if service.network == network.name:
            yield from service.addresses


def station_of(cluster: Cluster, node: NodeName, endpoint: model.Endpoint) -> RemoteMac | None:
    """Where an endpoint of another node is; nothing where there is no way to it."""
    stored = cluster.get(kinds.NETWORK, *endpoint.network_key)
    other = cluster.get(kinds.NODE, endpoint.host)
    if stored is None or other is None or endpoint.host == node:
        return None
    tags, vtep = tags_of(cluster, stored.value, endpoint.group), other.value.vtep_ip
    if tags is None or not vtep or not endpoint.addresses:
        return None
    return RemoteMac(endpoint.tenant, wire_number(tags), vtep, endpoint.mac_address, endpoint.addresses)
