"""Compute the desired state of a node from the cluster (pure).

The desired state is a set of small frozen state items, the same for every datapath. A datapath reads back its actual
state in the same terms, so that restart, drift and a lost watch are all handled by the difference of two sets. A node
has state only for tenants with workloads on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import BITS, Address
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.segments import (
    RemoteMac,
    Segment,
    all_tags_of,
    encap_id,
    floods,
    is_bridged,
    proxied_addresses,
    remote_mac_of,
    segment_of,
    tags_of,
)
from weft.domain.host_access.state import (
    ExternalAddress,
    HostAccessItem,
    HostLink,
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
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendSources, ServiceItem, Vip
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyItem, VerdictCounter
from weft.domain.validation import check, parse_bandwidth

# A token bucket smaller than one jumbo frame would always drop that frame.
_MIN_BURST = 9 << 10
# The kernel hands over GSO packets of up to 64 KiB; a smaller default burst would throttle below the rate.
_DEFAULT_BURST = 64 << 10
# 2 Gbit: fits into 32 bits in whatever unit the kernel or OVS counts.
_MAX_BURST = 1 << 28


class Prefix(NamedTuple):
    """An address prefix, as in a route."""

    family: int
    base: int
    length: int

    def __str__(self) -> str:
        return f"{Address(self.family, self.base)}/{self.length}"


class TenantNetns(msgspec.Struct, frozen=True, gc=False):
    """The network namespace of a tenant on this node."""

    tenant: TenantName


class Gateway(msgspec.Struct, frozen=True, gc=False):
    """A gateway or proxied address in the tenant's netns; anycast, the same on every node."""

    tenant: TenantName
    address: Address
    # The segment whose ARP and ND requests for it are answered; 0 in routing mode.
    segment: int = 0


class Overlay(msgspec.Struct, frozen=True, gc=False):
    """The VXLAN tunnel of one network."""

    tenant: TenantName
    vni: int


class VlanTrunk(msgspec.Struct, frozen=True, gc=False):
    """The VLAN of a network on the node's uplinks; the counterpart of `Overlay` for encap vlan."""

    tenant: TenantName
    # `encap_id` of the network.
    number: int


class VxlanPeer(msgspec.Struct, frozen=True, gc=False):
    """Another node on an overlay, by its VTEP address."""

    tenant: TenantName
    vni: int
    vtep: str
    # Whether broadcast, unknown unicast and multicast are replicated to it.
    floods: bool = False


class RemoteRoute(msgspec.Struct, frozen=True, gc=False):
    """A route to addresses of another node, through its VTEP or the uplinks."""

    tenant: TenantName
    prefix: Prefix
    # `encap_id` of the network.
    vni: int
    vtep: str


class Port(msgspec.Struct, frozen=True, gc=False):
    """The host-side port of a workload, and the source addresses and MAC that its spoof guard accepts."""

    tenant: TenantName
    interface: str
    mac: str
    addresses: tuple[Address, ...]
    # The segment it is bridged to; 0 in routing mode.
    segment: int = 0


class QosProfile(msgspec.Struct, frozen=True, gc=False):
    """Rate limits and DSCP of a port, from its group's netprofile and the CNI bandwidth capability."""

    tenant: TenantName
    interface: str
    # Egress rate in bits per second; 0: no limit.
    rate: int
    # Egress burst in bytes; 0 without a limit.
    burst: int
    # DSCP set on egress packets; 0: unchanged.
    dscp: int
    # The same for packets to the workload.
    ingress_rate: int = 0
    ingress_burst: int = 0

    def __str__(self) -> str:
        ingress = f", ingress {self.ingress_rate} bit/s" if self.ingress_rate else ""
        return f"QoS of {self.interface}: egress {self.rate} bit/s, burst {self.burst} B, DSCP {self.dscp}{ingress}"


class RateLimits(msgspec.Struct, frozen=True):
    """Requested limits of one workload: rates in bits per second, bursts in bytes; 0: no limit."""

    egress: int = 0
    egress_burst: int = 0
    ingress: int = 0
    ingress_burst: int = 0


NO_LIMITS = RateLimits()


# State items that locate endpoints of other nodes.
RemoteItem = RemoteRoute | RemoteMac
StateItem = (
    TenantNetns
    | Segment
    | Gateway
    | Overlay
    | VlanTrunk
    | VxlanPeer
    | RemoteItem
    | Port
    | QosProfile
    | PolicyItem
    | ServiceItem
    | HostAccessItem
)

# The difference of a node on which nothing has changed.
NOTHING: Difference[StateItem] = Difference((), ())

# The order of creation; deletion is in reverse. Policy comes before ports, so that no port forwards without it, and an
# identity comes after the entries that evaluate it, so that its packets never meet an empty policy map.
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
    FrontendSources: 11,
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


def rank(item: StateItem) -> int:
    """Items of a lower rank must exist first."""
    return _RANKS[type(item)]


def host_ifname(key: EndpointKey) -> str:
    """The name of an endpoint's host-side port. The prefix `wp` marks it as ours."""
    # IFNAMSIZ leaves 15 characters: a hash is the only fixed-width name for keys of any length.
    return "wp" + hashlib.sha256(str(key).encode()).hexdigest()[:11]


def plan_node_state(cluster: Cluster, node: NodeName, tenants: Iterable[TenantName]) -> frozenset[StateItem]:
    """The desired state for the tenants that have workloads on this node, without ports."""
    return frozenset(item for tenant in tenants for item in _tenant_state(cluster, node, tenant))


def _tenant_state(cluster: Cluster, node: NodeName, tenant: TenantName) -> Iterator[StateItem]:
    """The desired state of one tenant, without ports."""
    yield TenantNetns(tenant)
    for network in cluster.networks(tenant):
        segments = [segment for tags in all_tags_of(cluster, network) if (segment := segment_of(cluster, tenant, tags))]
        yield from segments
        for segment in segments:
            for address in proxied_addresses(cluster, network):
                yield Gateway(tenant, address, segment.number)
        if not segments:
            for family in (4, 6):
                if gateway := ipam.gateway_of(network, family):
                    yield Gateway(tenant, gateway)
        if network.tags and has_endpoints(cluster, network.key):
            yield from _overlay_state(cluster, node, network)


def network_prerequisites(cluster: Cluster, network: model.Network, group: str = "") -> Iterator[StateItem]:
    """The items that must exist before an endpoint of a group is attached to a network."""
    yield TenantNetns(network.tenant)
    tags = tags_of(cluster, network, group)
    if segment := segment_of(cluster, network.tenant, tags):
        yield segment
    if tags:
        yield encap_item(network.tenant, tags)


def encap_item(tenant: TenantName, tags: model.NetworkTags) -> Overlay | VlanTrunk:
    """The tunnel or VLAN that carries a network between nodes."""
    return Overlay(tenant, tags.vni) if tags.vni else VlanTrunk(tenant, encap_id(tags))


def has_endpoints(cluster: Cluster, network: NetworkKey) -> bool:
    """Whether a network has endpoints, or blocks from which nodes may create some."""
    return bool(cluster.by_network.get(network) or cluster.blocks.get(network))


def _overlay_state(cluster: Cluster, node: NodeName, network: model.Network) -> Iterator[StateItem]:
    """The tunnel or VLAN of one network, its peers, and the location of remote endpoints."""
    assert network.tags is not None
    number = encap_id(network.tags)
    for tags in all_tags_of(cluster, network):
        yield encap_item(network.tenant, tags)
    vteps = {other.name: other.vtep_ip for other in cluster.all(kinds.NODE) if other.vtep_ip and other.name != node}
    bridged = is_bridged(cluster)
    for vtep in set(vteps.values()) if network.tags.vni else ():
        yield VxlanPeer(network.tenant, number, vtep, floods=bridged and floods(cluster))
    for block, stored in () if bridged else cluster.blocks.get(network.key, {}).items():
        vtep = vteps.get(NodeName(stored.value.owner), "")
        # A block outside of the network would be a route to another network, or to the world (H3).
        if vtep and ipam.is_block_of(network, block):
            length = BITS[block.family] - BLOCK_SIZE.bit_length() + 1
            yield RemoteRoute(network.tenant, Prefix(block.family, block.number, length), number, vtep)
    for endpoint in cluster.endpoints(network.key):
        yield from remote_items_of(cluster, node, endpoint)


def remote_items_of(cluster: Cluster, node: NodeName, endpoint: model.Endpoint) -> Iterator[RemoteItem]:
    """The location of a remote endpoint; nothing for addresses that the route to their node's block covers."""
    if is_bridged(cluster):
        if remote_mac := remote_mac_of(cluster, node, endpoint):
            yield remote_mac
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
        # A host route beats the route to a block: without this, an endpoint could take any address (H3).
        if not ipam.holds_address(cluster, stored.value, endpoint, address):
            continue
        in_own_block = ipam.block_owner(cluster, stored.value, address) == endpoint.host
        # The route to a block uses the network's tag; an endpoint whose group has its own tag needs a host route.
        if tags != stored.value.tags or not in_own_block:
            prefix = Prefix(address.family, address.number, BITS[address.family])
            yield RemoteRoute(endpoint.tenant, prefix, encap_id(tags), vtep)


def port_of(endpoint: model.Endpoint, *, segment: int = 0) -> Port:
    """The host-side port of an endpoint; `segment` in bridge mode."""
    return Port(
        tenant=endpoint.tenant,
        interface=host_ifname(endpoint.key),
        mac=endpoint.mac_address,
        addresses=endpoint.addresses,
        segment=segment,
    )


def qos_profile_of(cluster: Cluster, endpoint: model.Endpoint, requested: RateLimits = NO_LIMITS) -> QosProfile | None:
    """The QoS of an endpoint from its group's netprofile and the request of its runtime; None if neither sets any.

    If both limit egress, the lower rate wins. `Invalid` for a stored profile that netmaster would not have accepted.
    """
    profile = _profile_of(cluster, endpoint)
    if profile is None:
        return requested_qos_profile(endpoint, requested)
    rate = parse_bandwidth(profile.bandwidth)
    burst = _burst(rate, profile.burst << 10) if rate else 0
    limits = [(rate, burst), (requested.egress, requested.egress_burst)]
    return _qos_profile(endpoint, limits, dscp=profile.dscp, requested=requested)


def requested_qos_profile(endpoint: model.Endpoint, requested: RateLimits) -> QosProfile | None:
    """The QoS of an endpoint from the request of its runtime alone."""
    return _qos_profile(endpoint, [(requested.egress, requested.egress_burst)], dscp=0, requested=requested)


def _profile_of(cluster: Cluster, endpoint: model.Endpoint) -> model.Profile | None:
    group = cluster.get(kinds.GROUP, endpoint.tenant, endpoint.group)
    if group is None or not group.value.net_profile:
        return None
    stored = cluster.get(kinds.PROFILE, endpoint.tenant, group.value.net_profile)
    return check(stored.value) if stored else None


def _qos_profile(
    endpoint: model.Endpoint, limits: list[tuple[int, int]], *, dscp: int, requested: RateLimits
) -> QosProfile | None:
    rate, burst = min(((rate, burst) for rate, burst in limits if rate), default=(0, 0))
    if not (rate or dscp or requested.ingress):
        return None
    return QosProfile(
        tenant=endpoint.tenant,
        interface=host_ifname(endpoint.key),
        rate=rate,
        burst=_burst(rate, burst) if rate else 0,
        dscp=dscp,
        ingress_rate=requested.ingress,
        ingress_burst=_burst(requested.ingress, requested.ingress_burst) if requested.ingress else 0,
    )


def _burst(rate: int, requested: int) -> int:
    """The requested burst, at least one packet; by default what the rate sends in 10 ms."""
    if requested:
        return min(max(requested, _MIN_BURST), _MAX_BURST)
    # Bits per second / 800 are bytes per 10 ms.
    return min(max(rate // 800, _DEFAULT_BURST), _MAX_BURST)
