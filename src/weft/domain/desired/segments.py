"""Bridge mode: each network is an L2 segment of its own (docs/design/bridge.md; pure).

So is each group with a VLAN tag of its own. There is no routing between segments. The store knows the location of
every MAC, so that FDBs are static and nothing is learned from traffic. `arpMode` of the cluster decides whether the
node answers ARP and ND requests or floods them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName, TenantName
from weft.domain.ipam import ipam

# VNIs have 24 bits: ids of VLAN networks start above all of them, so that both share one number space.
_VLAN_BASE = 1 << 25


class Segment(msgspec.Struct, frozen=True, gc=False):
    """The L2 segment of a network, or of a group with its own tag. Its number is the `encap_id`."""

    tenant: TenantName
    number: int
    # Whether ARP and ND requests are flooded; otherwise the node answers them.
    floods: bool

    def __str__(self) -> str:
        return f"segment {self.number}"


class RemoteMac(msgspec.Struct, frozen=True, gc=False):
    """The MAC of a workload of another node: a static FDB entry towards its VTEP or the uplinks."""

    tenant: TenantName
    # `encap_id` of the network.
    vni: int
    vtep: str
    mac: str
    addresses: tuple[Address, ...]


def is_bridged(cluster: Cluster) -> bool:
    """Whether the cluster is in bridge mode; otherwise nodes route between networks."""
    return cluster.global_settings().fwd_mode == "bridge"


def floods(cluster: Cluster) -> bool:
    """Whether ARP and ND requests are flooded in bridge mode."""
    return cluster.global_settings().arp_mode == "flood"


def tags_of(cluster: Cluster, network: model.Network, group: str = "") -> model.NetworkTags | None:
    """The tags of a network's frames on the wire; for a group with its own VLAN tag, that tag."""
    stored = cluster.get(kinds.GROUP, network.tenant, group) if group else None
    return model.NetworkTags(vlan=stored.value.pkt_tag) if stored and stored.value.pkt_tag else network.tags


def all_tags_of(cluster: Cluster, network: model.Network) -> Iterator[model.NetworkTags]:
    """The tags of a network and, for encap vlan, of its groups."""
    if network.tags:
        yield network.tags
    for group in cluster.all(kinds.GROUP, network.tenant) if network.encap == "vlan" else ():
        if group.network == network.name and group.pkt_tag:
            yield model.NetworkTags(vlan=group.pkt_tag)


def segment_id_of(cluster: Cluster, tags: model.NetworkTags | None) -> int:
    """The number of the segment with these tags; 0 in routing mode."""
    return encap_id(tags) if tags and is_bridged(cluster) else 0


def encap_id(tags: model.NetworkTags) -> int:
    """The id of a network on the wire: its VNI, or its VLAN tag above all VNIs."""
    return tags.vni or _VLAN_BASE + tags.vlan


def vlan_tag(number: int) -> int:
    """The VLAN tag of an `encap_id`; 0 if it is a VNI."""
    return max(number - _VLAN_BASE, 0)


def segment_of(cluster: Cluster, tenant: TenantName, tags: model.NetworkTags | None) -> Segment | None:
    """The segment with these tags; None in routing mode."""
    number = segment_id_of(cluster, tags)
    return Segment(tenant, number, floods(cluster)) if number else None


def proxied_addresses(cluster: Cluster, network: model.Network) -> Iterator[Address]:
    """The addresses of a network for which every node answers ARP and ND: gateways and service VIPs."""
    for family in (4, 6):
        if gateway := ipam.gateway_of(network, family):
            yield gateway
    for service in cluster.all(kinds.SERVICE, network.tenant):
        if service.network == network.name:
            yield from service.addresses


def remote_mac_of(cluster: Cluster, node: NodeName, endpoint: model.Endpoint) -> RemoteMac | None:
    """The FDB entry of a remote endpoint; None while its node has no VTEP or its network no tag."""
    stored = cluster.get(kinds.NETWORK, *endpoint.network_key)
    other = cluster.get(kinds.NODE, endpoint.host)
    if stored is None or other is None or endpoint.host == node:
        return None
    tags, vtep = tags_of(cluster, stored.value, endpoint.group), other.value.vtep_ip
    # The node may not have published its VTEP yet; a later event completes the entry.
    if tags is None or not vtep or not endpoint.addresses:
        return None
    # An endpoint could take over any address by an entry of its own (H3).
    if not all(ipam.holds_address(cluster, stored.value, endpoint, address) for address in endpoint.addresses):
        return None
    return RemoteMac(endpoint.tenant, encap_id(tags), vtep, endpoint.mac_address, endpoint.addresses)
