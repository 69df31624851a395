"""(cluster, node) -> what this node's network should consist of: the one road from intent to wanted state.

The answer is a set of small frozen parts, the same whatever datapath carries them out; a datapath reads back what it
has in the same terms, so that restart, drift and a lost watch are all one difference of two sets. Only tenants with
workloads on this node are there at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import BITS, Address
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import (
    RemoteMac,
    Segment,
    all_tags_of,
    answered_addresses,
    floods,
    is_bridged,
    segment_of,
    station_of,
    tags_of,
    wire_number,
)
from weft.domain.host_access.state import (
    ExternalAddress,
    HostLink,
    HostPart,
    HostPort,
    NodePort,
    NodePortVip,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.ids import EndpointKey, NetworkKey, NodeName, TenantName
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.state import Backend, Frontend, ServicePart, Vip
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyPart, VerdictCounter
from weft.domain.validation import check, parse_bandwidth

_LARGEST_PACKET = 9 << 10
# What a kernel hands over at once.
_USUAL_BURST = 64 << 10
_LARGEST_BURST = 1 << 28


class Prefix(NamedTuple):
    """A block of addresses as routes name it."""

    family: int
    base: int
    length: int

    def __str__(self) -> str:
        return f"{Address(self.family, self.base)}/{self.length}"


class TenantNetns(msgspec.Struct, frozen=True, gc=False):
    """A tenant's own network space on this node."""

    tenant: TenantName


class Gateway(msgspec.Struct, frozen=True, gc=False):
    """An address that this node answers for in the tenant's space; the same on every node."""

    tenant: TenantName
    address: Address
    # On which segment it is asked for; 0: none is.
    segment: int = 0


class Overlay(msgspec.Struct, frozen=True, gc=False):
    """The way to other nodes for one network."""

    tenant: TenantName
    vni: int


class VlanTrunk(msgspec.Struct, frozen=True, gc=False):
    """The same for a network whose frames have VLAN tags: by the node's uplinks, where it has some."""

    tenant: TenantName
    # The network's `wire_number`.
    number: int


class VxlanPeer(msgspec.Struct, frozen=True, gc=False):
    """Another node on an overlay, by the address its tunnel ends at."""

    tenant: TenantName
    vni: int
    vtep: str
    # Whether it gets what is said to all of a segment.
    floods: bool = False


class RemoteRoute(msgspec.Struct, frozen=True, gc=False):
    """Addresses that are reached through a peer, or by the uplinks."""

    tenant: TenantName
    prefix: Prefix
    # The network's `wire_number`.
    vni: int
    vtep: str


class Port(msgspec.Struct, frozen=True, gc=False):
    """A workload's attachment, seen from the node: its host end, and the addresses and MAC that may come from it."""

    tenant: TenantName
    interface: str
    mac: str
    addresses: tuple[Address, ...]
    # The segment it is on; 0: its node routes all that comes from it.
    segment: int = 0


class QosProfile(msgspec.Struct, frozen=True, gc=False):
    """What a profile, or a wish, makes of the packets that come from a port and go to it."""

    tenant: TenantName
    interface: str
    # Bits per second; 0: no limit.
    rate: int
    # How many bytes may come at once after a pause; 0 without a limit.
    burst: int
    # What their DSCP is set to; 0: it stays as it is.
    dscp: int
    # The same for packets to the port.
    rate_in: int = 0
    burst_in: int = 0

    def __str__(self) -> str:
        inward = f", {self.rate_in} bit/s to it" if self.rate_in else ""
        return f"shape of {self.interface}: {self.rate} bit/s, bursts of {self.burst} B, DSCP {self.dscp}{inward}"


class RateLimits(msgspec.Struct, frozen=True):
    """What was asked for one workload: bits per second and bytes at once, out of it and into it; 0: no limit."""

    out: int = 0
    out_burst: int = 0
    into: int = 0
    into_burst: int = 0


NO_RATES = RateLimits()


# Who is reached through a peer.
Beyond = RemoteRoute | RemoteMac
StateItem = (
    TenantNetns
    | Segment
    | Gateway
    | Overlay
    | VlanTrunk
    | VxlanPeer
    | Beyond
    | Port
    | QosProfile
    | PolicyPart
    | ServicePart
    | HostPart
)

_RANKS: dict[type, int] = {
    TenantNetns: 0,
    Segment: 1,
    Gateway: 2,
    Overlay: 3,
    VlanTrunk: 3,
    VxlanPeer: 4,
    RemoteRoute: 5,
    RemoteMac: 6,
    VerdictCounter: 7,
    PolicyEntry: 8,
    CidrIdentity: 9,
    IpIdentity: 10,
    Backend: 11,
    Frontend: 12,
    Vip: 13,
    Port: 14,
    QosProfile: 15,
    HostLink: 16,
    TenantSubnet: 17,
    RemoteHostReturnRoute: 18,
    TenantSnat: 19,
    OverlapDnat: 20,
    HostPort: 21,
    NodePortVip: 22,
    ExternalAddress: 23,
    NodePort: 24,
}


def rank(part: StateItem) -> int:
    """Parts of a lower rank must be there first."""
    return _RANKS[type(part)]


def host_end(key: EndpointKey) -> str:
    """The name of an endpoint's host end: fits into 15 characters, and tells ours from others'."""
    return "wp" + hashlib.sha256(str(key).encode()).hexdigest()[:11]


def node_view(cluster: Cluster, node: NodeName, tenants: Iterable[TenantName]) -> frozenset[StateItem]:
    """Everything this node should have for these tenants, which have workloads on it, besides their ports."""
    return frozenset(part for tenant in tenants for part in tenant_parts(cluster, node, tenant))


def tenant_parts(cluster: Cluster, node: NodeName, tenant: TenantName) -> Iterator[StateItem]:
    """What a tenant with workloads on this node needs there, besides their ports."""
    yield TenantNetns(tenant)
    for network in cluster.networks(tenant):
        segments = [segment for tags in all_tags_of(cluster, network) if (segment := segment_of(cluster, tenant, tags))]
        yield from segments
        for segment in segments:
            for address in answered_addresses(cluster, network):
                yield Gateway(tenant, address, segment.number)
        if not segments:
            for family in (4, 6):
                if gateway := ipam.gateway_of(network, family):
                    yield Gateway(tenant, gateway)
        if network.tags and is_used(cluster, network.key):
            yield from overlay_parts(cluster, node, network)


def ground_of(cluster: Cluster, network: model.Network, group: str = "") -> Iterator[StateItem]:
    """What must be there before somebody of a group is attached to a network."""
    yield TenantNetns(network.tenant)
    tags = tags_of(cluster, network, group)
    if segment := segment_of(cluster, network.tenant, tags):
        yield segment
    if tags:
        yield way_of(network.tenant, tags)


def way_of(tenant: TenantName, tags: model.NetworkTags) -> Overlay | VlanTrunk:
    """What leads to other nodes for a network."""
    return Overlay(tenant, tags.vni) if tags.vni else VlanTrunk(tenant, wire_number(tags))


def is_used(cluster: Cluster, network: NetworkKey) -> bool:
    """Whether there is anyone to be reached in a network."""
    return bool(cluster.by_network.get(network) or cluster.blocks.get(network))


def overlay_parts(cluster: Cluster, node: NodeName, network: model.Network) -> Iterator[StateItem]:
    """The way to other nodes for one network, and who is there."""
    assert network.tags is not None
    number = wire_number(network.tags)
    for tags in all_tags_of(cluster, network):
        yield way_of(network.tenant, tags)
    vteps = {other.name: other.vtep_ip for other in cluster.all(kinds.NODE) if other.vtep_ip and other.name != node}
    bridged = is_bridged(cluster)
    for vtep in set(vteps.values()) if network.tags.vni else ():
        yield VxlanPeer(network.tenant, number, vtep, floods=bridged and floods(cluster))
    for block, stored in () if bridged else cluster.blocks.get(network.key, {}).items():
        if vtep := vteps.get(NodeName(stored.value.owner), ""):
            length = BITS[block.family] - ipam.BLOCK_SIZE.bit_length() + 1
            yield RemoteRoute(network.tenant, Prefix(block.family, block.number, length), number, vtep)
    for endpoint in cluster.endpoints(network.key):
        yield from remotes_of(cluster, node, endpoint)


def remotes_of(cluster: Cluster, node: NodeName, endpoint: model.Endpoint) -> Iterator[Beyond]:
    """Where an endpoint of another node is; nothing for addresses that are reached by their node's block.

    The block's frames have the network's tag.
    """
    if is_bridged(cluster):
        if station := station_of(cluster, node, endpoint):
            yield station
        return
    stored = cluster.get(kinds.NETWORK, *endpoint.network_key)
    other = cluster.get(kinds.NODE, endpoint.host)
    tags = tags_of(cluster, stored.value, endpoint.group) if stored else None
    if stored is None or tags is None or other is None:
        return
    vtep = other.value.vtep_ip
    if endpoint.host == node or not vtep:
        return
    for address in endpoint.addresses:
        if tags != stored.value.tags or _owner(cluster, stored.value, address) != endpoint.host:
            prefix = Prefix(address.family, address.number, BITS[address.family])
            yield RemoteRoute(endpoint.tenant, prefix, wire_number(tags), vtep)


def _owner(cluster: Cluster, network: model.Network, address: Address) -> str:
    """The node whose block an address lies in, or nobody."""
    if not ipam.has_blocks(network, address.family):
        return ""
    block = cluster.blocks.get(network.key, {}).get(ipam.block_of(network, address))
    return block.value.owner if block else ""


def port_of(endpoint: model.Endpoint, *, segment: int = 0) -> Port:
    """The endpoint's host end, on the segment of its network if that is one."""
    return Port(
        tenant=endpoint.tenant,
        interface=host_end(endpoint.key),
        mac=endpoint.mac_address,
        addresses=endpoint.addresses,
        segment=segment,
    )


def shape_of(cluster: Cluster, endpoint: model.Endpoint, wish: RateLimits = NO_RATES) -> QosProfile | None:
    """What the profile of the endpoint's group and the wish of its caller ask for; nothing where they ask for nothing.

    Where both limit what comes from the workload, the lower rate counts. `Invalid` when the profile is not as the
    master would have let it be.
    """
    profile = _profile_of(cluster, endpoint)
    if profile is None:
        return wished_shape(endpoint, wish)
    rate = parse_bandwidth(profile.bandwidth)
    burst = _burst(rate, profile.burst << 10) if rate else 0
    return _shape(endpoint, [(rate, burst), (wish.out, wish.out_burst)], dscp=profile.dscp, wish=wish)


def wished_shape(endpoint: model.Endpoint, wish: RateLimits) -> QosProfile | None:
    """What the wish alone asks for."""
    return _shape(endpoint, [(wish.out, wish.out_burst)], dscp=0, wish=wish)


def _profile_of(cluster: Cluster, endpoint: model.Endpoint) -> model.Profile | None:
    group = cluster.get(kinds.GROUP, endpoint.tenant, endpoint.group)
    if group is None or not group.value.net_profile:
        return None
    stored = cluster.get(kinds.PROFILE, endpoint.tenant, group.value.net_profile)
    return check(stored.value) if stored else None


def _shape(
    endpoint: model.Endpoint, limits: list[tuple[int, int]], *, dscp: int, wish: RateLimits
) -> QosProfile | None:
    rate, burst = min(((rate, burst) for rate, burst in limits if rate), default=(0, 0))
    if not (rate or dscp or wish.into):
        return None
    return QosProfile(
        tenant=endpoint.tenant,
        interface=host_end(endpoint.key),
        rate=rate,
        burst=_burst(rate, burst) if rate else 0,
        dscp=dscp,
        rate_in=wish.into,
        burst_in=_burst(wish.into, wish.into_burst) if wish.into else 0,
    )


def _burst(rate: int, asked: int) -> int:
    """What was asked for, but not less than the largest packet; else what comes in a hundredth of a second."""
    if asked:
        return min(max(asked, _LARGEST_PACKET), _LARGEST_BURST)
    return min(max(rate // 800, _USUAL_BURST), _LARGEST_BURST)
