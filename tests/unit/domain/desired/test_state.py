"""What a node should have follows from the cluster, and from nothing else."""

from __future__ import annotations

import msgspec
import pytest

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, address_hex, parse_address
from weft.domain.cluster import Cluster
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    Prefix,
    QosProfile,
    RateLimits,
    RemoteRoute,
    TenantNetns,
    VxlanPeer,
    host_ifname,
    plan_node_state,
    port_of,
    qos_profile_of,
    rank,
    requested_qos_profile,
)
from weft.domain.ids import (
    EndpointId,
    EndpointKey,
    GroupName,
    NetworkName,
    NodeName,
    ProfileName,
    StoreKey,
    TenantName,
)
from weft.domain.ipam import ipam
from weft.domain.transaction import holder_of, put_claim

BLUE = TenantName("blue")
HERE, THERE = NodeName("here"), NodeName("there")
NETWORK = model.Network(
    tenant=BLUE,
    name=NetworkName("net"),
    encap="vxlan",
    subnet="10.1.0.0/16",
    gateway="10.1.0.1",
    ipv6_subnet="2001:db8::/64",
    tags=model.NetworkTags(vlan=1, vni=7),
)


def address(text: str) -> Address:
    return parse_address(text, field="test")


def endpoint(name: str, host: str, v4: str, v6: str = "") -> model.Endpoint:
    return model.Endpoint(
        tenant=BLUE,
        network=NETWORK.name,
        endpoint_id=EndpointId(name),
        ip_address=v4,
        ipv6_address=v6,
        mac_address="02:02:00:00:00:01",
        host=host,
    )


def cluster_of(*endpoints: model.Endpoint, blocks: dict[str, str] | None = None, has_claims: bool = True) -> Cluster:
    cluster = Cluster()
    for node, vtep in ((HERE, "192.0.2.1"), (THERE, "192.0.2.2")):
        cluster.put(kinds.NODE.store_key(node), codec.encode(model.Node(name=node, vtep_ip=vtep)), 1)
    cluster.put(kinds.NETWORK.store_key(BLUE, NETWORK.name), codec.encode(NETWORK), 1)
    for each in endpoints:
        cluster.put(kinds.ENDPOINT.store_key(*each.key), codec.encode(each), 1)
        for claimed in each.addresses if has_claims else ():
            claim = put_claim(ipam.claim_key(NETWORK, claimed), holder_of(kinds.ENDPOINT, each))
            cluster.put(claim.key, claim.value, 1)
    for first, owner in (blocks or {}).items():
        key = StoreKey(kinds.blocks_of(BLUE, NETWORK.name) + address_hex(address(first)))
        cluster.put(key, codec.encode(model.Block(owner=owner)), 1)
    assert not cluster.faults
    return cluster


def test_a_node_without_workloads_has_nothing() -> None:
    assert plan_node_state(cluster_of(endpoint("e", THERE, "10.1.0.5")), HERE, ()) == frozenset()


def test_a_remote_endpoint_is_a_route_to_each_of_its_addresses() -> None:
    cluster = cluster_of(endpoint("e", THERE, "10.1.0.5", "2001:db8::5"))
    assert plan_node_state(cluster, HERE, [BLUE]) == {
        TenantNetns(BLUE),
        Gateway(BLUE, address("10.1.0.1")),
        Overlay(BLUE, 7),
        VxlanPeer(BLUE, 7, "192.0.2.2"),
        RemoteRoute(BLUE, Prefix(4, address("10.1.0.5").number, 32), 7, "192.0.2.2"),
        RemoteRoute(BLUE, Prefix(6, address("2001:db8::5").number, 128), 7, "192.0.2.2"),
    }


def test_a_nodes_block_is_one_route_whatever_is_in_it() -> None:
    members = [endpoint(f"e{number}", THERE, f"10.1.255.{192 + number}") for number in range(3)]
    view = plan_node_state(cluster_of(*members, blocks={"10.1.255.192": THERE}), HERE, [BLUE])
    assert [part for part in view if isinstance(part, RemoteRoute)] == [
        RemoteRoute(BLUE, Prefix(4, address("10.1.255.192").number, 26), 7, "192.0.2.2")
    ]


def test_an_address_in_another_nodes_block_has_a_route_of_its_own() -> None:
    """It was claimed before the block changed hands, or by an operator: the longer prefix wins."""
    stray = endpoint("e", THERE, "10.1.255.200")
    view = plan_node_state(cluster_of(stray, blocks={"10.1.255.192": HERE}), HERE, [BLUE])
    assert RemoteRoute(BLUE, Prefix(4, address("10.1.255.200").number, 32), 7, "192.0.2.2") in view


@pytest.mark.parametrize("blocks", [{}, {"10.1.255.192": HERE}, {"10.1.255.192": "third"}])
def test_H3_an_endpoint_without_block_or_claim_gets_no_route(blocks: dict[str, str]) -> None:
    """A host route to it would beat the route of the owner's block: any node could take over any address."""
    thief = endpoint("e", THERE, "10.1.255.200", "2001:db8::7")
    view = plan_node_state(cluster_of(thief, blocks=blocks, has_claims=False), HERE, [BLUE])
    assert not [part for part in view if isinstance(part, RemoteRoute)]
    owner = endpoint("owner", HERE, "10.1.255.200", "2001:db8::7")
    cluster = cluster_of(owner, blocks=blocks)
    cluster.put(kinds.ENDPOINT.store_key(*thief.key), codec.encode(thief), 2)
    assert not [part for part in plan_node_state(cluster, HERE, [BLUE]) if isinstance(part, RemoteRoute)]


def test_H3_a_block_gives_no_route_to_what_another_has_claimed_or_the_network_does_not_have() -> None:
    owner, thief = endpoint("owner", HERE, "10.1.2.5"), endpoint("e", THERE, "10.1.2.5")
    cluster = cluster_of(owner, blocks={"10.1.2.0": THERE, "8.8.8.0": THERE, "10.2.0.0": THERE})
    outside = endpoint("outside", THERE, "8.8.8.8")
    for each in (thief, outside, endpoint("gateway", THERE, "10.1.0.1")):
        cluster.put(kinds.ENDPOINT.store_key(*each.key), codec.encode(each), 2)
    claim = put_claim(ipam.claim_key(NETWORK, outside.addresses[0]), holder_of(kinds.ENDPOINT, outside))
    cluster.put(claim.key, claim.value, 2)
    assert [part for part in plan_node_state(cluster, HERE, [BLUE]) if isinstance(part, RemoteRoute)] == [
        RemoteRoute(BLUE, Prefix(4, address("10.1.2.0").number, 26), 7, "192.0.2.2")
    ]


def test_our_own_endpoints_and_blocks_are_no_remotes() -> None:
    view = plan_node_state(cluster_of(endpoint("e", HERE, "10.1.0.5"), blocks={"10.1.255.192": HERE}), HERE, [BLUE])
    assert not [part for part in view if isinstance(part, RemoteRoute)]
    assert Overlay(BLUE, 7) in view, "others must reach what is here"


def test_an_unused_network_has_no_state() -> None:
    assert plan_node_state(cluster_of(), HERE, [BLUE]) == {TenantNetns(BLUE), Gateway(BLUE, address("10.1.0.1"))}


def test_a_node_without_vtep_has_no_routes() -> None:
    cluster = cluster_of(endpoint("e", THERE, "10.1.0.5"))
    cluster.put(kinds.NODE.store_key(THERE), codec.encode(model.Node(name=THERE)), 2)
    assert not [part for part in plan_node_state(cluster, HERE, [BLUE]) if isinstance(part, VxlanPeer | RemoteRoute)]


@pytest.mark.parametrize("name", ["e", "x" * 200, "a-b"])
def test_host_ends_fit_into_a_device_name_and_differ(name: str) -> None:
    """R6, W36: long names are no trouble, equal ones in two tenants do not meet."""
    key = EndpointKey(BLUE, NETWORK.name, EndpointId(name))
    assert len(host_ifname(key)) <= 15
    assert host_ifname(key) != host_ifname(key._replace(tenant=TenantName("red")))


def test_a_port_is_known_by_its_addresses_and_mac() -> None:
    one = endpoint("e", HERE, "10.1.0.5", "2001:db8::5")
    port = port_of(one)
    assert port.addresses == (address("10.1.0.5"), address("2001:db8::5"))
    assert port != port_of(msgspec.structs.replace(one, mac_address="02:02:00:00:00:02"))
    assert rank(port) > rank(TenantNetns(BLUE))


def shaped(cluster: Cluster, *, profile: model.Profile, group: str = "web") -> Cluster:
    member = model.Group(tenant=BLUE, name=GroupName(group), network=NETWORK.name, net_profile=profile.name)
    cluster.put(kinds.GROUP.store_key(BLUE, group), codec.encode(member), 1)
    cluster.put(kinds.PROFILE.store_key(BLUE, profile.name), codec.encode(profile), 1)
    assert not cluster.faults
    return cluster


def gold(*, bandwidth: str = "", burst: int = 0, dscp: int = 0) -> model.Profile:
    return model.Profile(tenant=BLUE, name=ProfileName("gold"), bandwidth=bandwidth, burst=burst, dscp=dscp)


MEMBER = msgspec.structs.replace(endpoint("e", HERE, "10.1.0.5"), group="web")


def test_a_port_gets_the_shape_that_its_groups_profile_asks_for() -> None:
    """Q2, Q11."""
    shape = qos_profile_of(shaped(cluster_of(), profile=gold(bandwidth="6 Mbps", burst=100, dscp=46)), MEMBER)
    assert shape == QosProfile(BLUE, host_ifname(MEMBER.key), rate=6 << 20, burst=100 << 10, dscp=46)
    assert rank(shape) > rank(port_of(MEMBER))


@pytest.mark.parametrize(
    ("bandwidth", "rate"),
    [("1k", 1 << 10), ("10 mbps", 10 << 20), ("10Mbps", 10 << 20), ("20mb", 20 << 20), ("4G", 4 << 30)],
)
def test_bandwidth_counts_as_in_contiv(bandwidth: str, rate: int) -> None:
    """O19: the units are 1,024 of each other."""
    shape = qos_profile_of(shaped(cluster_of(), profile=gold(bandwidth=bandwidth)), MEMBER)
    assert shape is not None
    assert shape.rate == rate


@pytest.mark.parametrize(
    ("asked", "bandwidth", "burst"),
    [(0, "1k", 64 << 10), (0, "1G", (1 << 30) // 800), (2, "10M", 9 << 10), (10486, "10M", 10486 << 10)],
)
def test_a_burst_holds_at_least_the_largest_packet(asked: int, bandwidth: str, burst: int) -> None:
    shape = qos_profile_of(shaped(cluster_of(), profile=gold(bandwidth=bandwidth, burst=asked)), MEMBER)
    assert shape is not None
    assert shape.burst == burst


def test_without_a_profile_that_asks_for_something_there_is_no_shape() -> None:
    """Q1, Q4, Q5."""
    assert qos_profile_of(cluster_of(), MEMBER) is None
    cluster = shaped(cluster_of(), profile=gold(burst=100))
    assert qos_profile_of(cluster, MEMBER) is None
    assert qos_profile_of(cluster, msgspec.structs.replace(MEMBER, group="")) is None
    cluster = shaped(cluster_of(), profile=gold(bandwidth="6M"))
    assert qos_profile_of(cluster, msgspec.structs.replace(MEMBER, group="other")) is None
    assert qos_profile_of(cluster, MEMBER) is not None
    cluster.drop(kinds.PROFILE.store_key(BLUE, "gold"))
    assert qos_profile_of(cluster, MEMBER) is None


def test_a_mark_alone_is_a_shape_without_a_limit() -> None:
    """Q5, Q11."""
    shape = qos_profile_of(shaped(cluster_of(), profile=gold(dscp=10, burst=100)), MEMBER)
    assert shape == QosProfile(BLUE, host_ifname(MEMBER.key), rate=0, burst=0, dscp=10)


def test_requested_limits_apply_in_both_directions() -> None:
    """P-52: a burst may be left to us; one that is asked for has room for a packet at least."""
    requested = RateLimits(egress=8_000_000, egress_burst=100, ingress=16_000_000)
    shape = qos_profile_of(cluster_of(), MEMBER, requested)
    assert shape == QosProfile(
        BLUE, host_ifname(MEMBER.key), 8_000_000, 9 << 10, 0, ingress_rate=16_000_000, ingress_burst=64 << 10
    )
    assert requested_qos_profile(MEMBER, RateLimits()) is None
