"""Bridge mode: networks are segments, and who is on them follows from the cluster (contiv 7.5, 7.8; N8, N9)."""

from __future__ import annotations

import msgspec
import pytest

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, address_hex, parse_address
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import RemoteMac, Segment, encap_id, segment_id_of, tags_of, vlan_tag
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    RemoteRoute,
    TenantNetns,
    VlanTrunk,
    VxlanPeer,
    network_prerequisites,
    plan_node_state,
    rank,
)
from weft.domain.ids import EndpointId, GroupName, NetworkName, NodeName, ServiceName, StoreKey, TenantName
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
SERVICE = model.Service(
    tenant=BLUE,
    name=ServiceName("web"),
    network=NETWORK.name,
    selectors=("app=web",),
    ports=("80:80:TCP",),
    vip="10.1.0.9",
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
        mac_address="02:02:0a:01:00:05",
        host=host,
    )


def cluster_of(*endpoints: model.Endpoint, fwd_mode: model.FwdMode = "bridge", arp: model.ArpMode = "proxy") -> Cluster:
    cluster = Cluster()
    settings = model.Global(fwd_mode=fwd_mode, arp_mode=arp)
    cluster.put(kinds.GLOBAL.store_key("global"), codec.encode(settings), 1)
    for node, vtep in ((HERE, "192.0.2.1"), (THERE, "192.0.2.2")):
        cluster.put(kinds.NODE.store_key(node), codec.encode(model.Node(name=node, vtep_ip=vtep)), 1)
    cluster.put(kinds.NETWORK.store_key(BLUE, NETWORK.name), codec.encode(NETWORK), 1)
    cluster.put(kinds.SERVICE.store_key(BLUE, SERVICE.name), codec.encode(SERVICE), 1)
    for each in endpoints:
        cluster.put(kinds.ENDPOINT.store_key(*each.key), codec.encode(each), 1)
        for claimed in each.addresses:
            claim = put_claim(ipam.claim_key(NETWORK, claimed), holder_of(kinds.ENDPOINT, each))
            cluster.put(claim.key, claim.value, 1)
    assert not cluster.faults
    return cluster


def test_endpoints_of_another_node_are_remote_macs() -> None:
    """Its gateway and its services are answered for on the segment; nothing is routed."""
    far = endpoint("far", THERE, "10.1.0.5", "2001:db8::5")
    found = plan_node_state(cluster_of(endpoint("near", HERE, "10.1.0.4"), far), HERE, [BLUE])
    assert found == {
        TenantNetns(BLUE),
        Segment(BLUE, 7, floods=False),
        Gateway(BLUE, address("10.1.0.1"), 7),
        Gateway(BLUE, address("10.1.0.9"), 7),
        Overlay(BLUE, 7),
        VxlanPeer(BLUE, 7, "192.0.2.2"),
        RemoteMac(BLUE, 7, "192.0.2.2", "02:02:0a:01:00:05", far.addresses),
    }
    assert [type(part) for part in sorted(found, key=rank)][:2] == [TenantNetns, Segment]


def test_flooding_is_the_clusters_choice() -> None:
    """N9: the segment is another, and peers get what is said to all."""
    found = plan_node_state(cluster_of(endpoint("far", THERE, "10.1.0.5"), arp="flood"), HERE, [BLUE])
    assert Segment(BLUE, 7, floods=True) in found
    assert VxlanPeer(BLUE, 7, "192.0.2.2", floods=True) in found


def test_where_nodes_route_there_are_no_segments() -> None:
    """N8."""
    cluster = cluster_of(endpoint("far", THERE, "10.1.0.5"), fwd_mode="routing")
    found = plan_node_state(cluster, HERE, [BLUE])
    assert not any(isinstance(part, Segment | RemoteMac) for part in found)
    assert any(isinstance(part, RemoteRoute) for part in found)
    assert Gateway(BLUE, address("10.1.0.1")) in found
    assert segment_id_of(cluster, NETWORK.tags) == 0


def test_H3_an_endpoint_without_block_or_claim_gets_no_fdb_entry() -> None:
    far = endpoint("far", THERE, "10.1.0.5")
    cluster = cluster_of(far)
    cluster.drop(ipam.claim_key(NETWORK, far.addresses[0]))
    assert not any(isinstance(part, RemoteMac) for part in plan_node_state(cluster, HERE, [BLUE]))


def test_H3_a_block_gives_no_fdb_entry_for_the_gateway_or_for_what_another_has_claimed() -> None:
    cluster = cluster_of(endpoint("owner", HERE, "10.1.0.5"))
    key = StoreKey(kinds.blocks_of(BLUE, NETWORK.name) + address_hex(address("10.1.0.0")))
    cluster.put(key, codec.encode(model.Block(owner=THERE)), 2)
    for thief in (endpoint("e", THERE, "10.1.0.5"), endpoint("gateway", THERE, "10.1.0.1")):
        cluster.put(kinds.ENDPOINT.store_key(*thief.key), codec.encode(thief), 2)
    assert not any(isinstance(part, RemoteMac) for part in plan_node_state(cluster, HERE, [BLUE]))


@pytest.mark.parametrize(
    "gone", [endpoint("far", "unknown", "10.1.0.5"), endpoint("near", HERE, "10.1.0.5"), endpoint("far", THERE, "")]
)
def test_local_and_unreachable_endpoints_are_no_remote_macs(gone: model.Endpoint) -> None:
    assert not any(isinstance(part, RemoteMac) for part in plan_node_state(cluster_of(gone), HERE, [BLUE]))


def test_a_network_without_tunnels_is_a_segment_too() -> None:
    """It has a number that no tunnel has."""
    local = model.Network(tenant=BLUE, name=NetworkName("l"), encap="vlan", subnet="10.9.0.0/24",
                          tags=model.NetworkTags(vlan=7))  # fmt: skip
    number = segment_id_of(cluster_of(), local.tags)
    assert number > 1 << 24
    prerequisites = [TenantNetns(BLUE), Segment(BLUE, number, floods=False), VlanTrunk(BLUE, number)]
    assert list(network_prerequisites(cluster_of(), local)) == prerequisites
    assert vlan_tag(number) == 7
    assert vlan_tag(7) == 0


TAGGED = model.Network(
    tenant=BLUE, name=NetworkName("t"), encap="vlan", subnet="10.9.0.0/16", gateway="10.9.0.1",
    tags=model.NetworkTags(vlan=7),
)  # fmt: skip
OWN, NETWORKS = encap_id(model.NetworkTags(vlan=70)), encap_id(model.NetworkTags(vlan=7))


def tagged_cluster(fwd_mode: model.FwdMode) -> Cluster:
    """A group with a tag of its own and one without, each with a member on the other node, whose block they are in."""
    cluster = cluster_of(fwd_mode=fwd_mode)
    cluster.put(kinds.NETWORK.store_key(BLUE, TAGGED.name), codec.encode(TAGGED), 1)
    block = kinds.blocks_of(BLUE, TAGGED.name) + address_hex(address("10.9.0.0"))
    cluster.put(StoreKey(block), codec.encode(model.Block(owner=THERE)), 1)
    for number, (name, tag) in enumerate({"own": 70, "usual": 0}.items(), start=5):
        group = model.Group(tenant=BLUE, name=GroupName(name), network=TAGGED.name, pkt_tag=tag)
        cluster.put(kinds.GROUP.store_key(BLUE, name), codec.encode(group), 1)
        member = msgspec.structs.replace(endpoint(name, THERE, f"10.9.0.{number}"), network=TAGGED.name, group=name)
        cluster.put(kinds.ENDPOINT.store_key(*member.key), codec.encode(member), 1)
    assert not cluster.faults
    return cluster


def test_a_group_may_have_a_segment_of_its_own() -> None:
    """contiv 5.1: its tag overrides its network's, and whose group is missing has the network's."""
    cluster = tagged_cluster("bridge")
    found = plan_node_state(cluster, HERE, [BLUE])
    for number, member in ((OWN, "10.9.0.5"), (NETWORKS, "10.9.0.6")):
        assert {Segment(BLUE, number, floods=False), VlanTrunk(BLUE, number)} <= found
        assert Gateway(BLUE, address("10.9.0.1"), number) in found
        (remote_mac,) = (each for each in found if isinstance(each, RemoteMac) and address(member) in each.addresses)
        assert remote_mac.vni == number
    assert list(network_prerequisites(cluster, TAGGED, "own"))[1:] == [
        Segment(BLUE, OWN, floods=False),
        VlanTrunk(BLUE, OWN),
    ]
    assert tags_of(cluster, TAGGED, "own") == model.NetworkTags(vlan=70)
    for group in ("", "usual", "missing"):
        assert tags_of(cluster, TAGGED, group) == TAGGED.tags


def test_where_nodes_route_a_groups_members_are_reached_by_its_tag() -> None:
    """Also those in their node's block, whose frames have the network's tag."""
    found = plan_node_state(tagged_cluster("routing"), HERE, [BLUE])
    assert {VlanTrunk(BLUE, OWN), VlanTrunk(BLUE, NETWORKS)} <= found
    routes = {(str(part.prefix), part.vni) for part in found if isinstance(part, RemoteRoute)}
    assert routes == {("10.9.0.0/26", NETWORKS), ("10.9.0.5/32", OWN)}
