"""How host and tenants reach each other follows from the cluster, and from who is on the node."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, parse_address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import rank
from weft.domain.host_access.state import (
    HostLink,
    HostPart,
    HostPort,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.host_access.view import HostReachableEndpoint, PublishedPort, host_addresses, host_view
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName
from weft.domain.policy.model.protocols import TCP

BLUE, RED = TenantName("blue"), TenantName("red")
HERE, THERE = NodeName("here"), NodeName("there")


def address(text: str) -> Address:
    return parse_address(text, field="test")


def network(tenant: TenantName, subnet: str, *, name: str = "net", vni: int = 7, **members: str) -> model.Network:
    tags = model.NetworkTags(vlan=1, vni=vni)
    return model.Network(tenant=tenant, name=NetworkName(name), encap="vxlan", subnet=subnet, tags=tags, **members)  # type: ignore[arg-type]


def guest(tenant: TenantName, v4: str, *ports: PublishedPort) -> HostReachableEndpoint:
    endpoint = model.Endpoint(
        tenant=tenant, network=NetworkName("net"), endpoint_id=EndpointId("e"), ip_address=v4, host=HERE
    )
    return HostReachableEndpoint(endpoint, ports)


def cluster_of(*networks: model.Network, used: Iterable[model.Endpoint] = ()) -> Cluster:
    cluster = Cluster()
    for node, vtep in ((HERE, "192.0.2.1"), (THERE, "192.0.2.2")):
        cluster.put(kinds.NODE.store_key(node), codec.encode(model.Node(name=node, vtep_ip=vtep)), 1)
    for each in networks:
        cluster.put(kinds.NETWORK.store_key(each.tenant, each.name), codec.encode(each), 1)
    for endpoint in used:
        cluster.put(kinds.ENDPOINT.store_key(*endpoint.key), codec.encode(endpoint), 1)
    assert not cluster.faults
    return cluster


def view(cluster: Cluster, *guests: HostReachableEndpoint) -> frozenset[HostPart]:
    return host_view(cluster, HERE, {each.endpoint.tenant for each in guests}, guests)


def of(kind: type[HostPart], parts: Iterable[HostPart]) -> set[HostPart]:
    return {part for part in parts if isinstance(part, kind)}


def test_a_node_without_workloads_has_no_host_access() -> None:
    assert view(cluster_of(network(BLUE, "10.1.0.0/16"))) == frozenset()


def test_a_host_speaks_from_the_end_of_its_tunnels() -> None:
    own = (address("192.0.2.1"), address("fd77:6566:7400::c000:201"))
    assert host_addresses(model.Node(name=HERE, vtep_ip="192.0.2.1")) == own
    assert host_addresses(model.Node(name=HERE)) == ()
    assert HostLink(BLUE, own) in view(cluster_of(network(BLUE, "10.1.0.0/16")), guest(BLUE, "10.1.0.5"))


def test_a_subnet_of_one_tenant_is_routed() -> None:
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.2.0.0/16"))
    parts = view(cluster, guest(BLUE, "10.1.0.5"), guest(RED, "10.2.0.5"))
    assert of(TenantSubnet, parts) == {
        TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=True),
        TenantSubnet(RED, parse_subnet_v4("10.2.0.0/16"), routed=True),
    }
    assert not of(TenantSnat, parts) | of(OverlapDnat, parts)


def test_where_tenants_overlap_both_are_known_by_private_addresses() -> None:
    """H3, W30: the same ones whenever they are asked for, all different, out of `pvtSubnet`."""
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.128.0/24"))
    guests = guest(BLUE, "10.1.128.5"), guest(RED, "10.1.128.5")
    parts = view(cluster, *guests)
    assert {part.routed for part in parts if isinstance(part, TenantSubnet)} == {False}
    private = [part.address for part in parts if isinstance(part, TenantSnat | OverlapDnat)]
    assert len(private) == len(set(private)) == 6, "a disguise of each family, and an alias of the one family"
    whole = parse_subnet_v4("172.19.0.0/16").usable
    assert all(whole.holds(each) for each in private if each.family == 4)
    assert view(cluster, *reversed(guests)) == parts
    alone = view(cluster, guests[0])
    assert not of(TenantSnat, alone)
    assert {part.routed for part in alone if isinstance(part, TenantSubnet)} == {True}


def test_no_route_ever_takes_the_underlay_away() -> None:
    """A subnet that holds a host is reached by private means only."""
    parts = view(cluster_of(network(BLUE, "192.0.0.0/16")), guest(BLUE, "192.0.9.5"))
    assert {part.routed for part in parts if isinstance(part, TenantSubnet)} == {False}


def test_an_infra_network_has_an_interface_instead_of_a_route() -> None:
    parts = view(cluster_of(network(BLUE, "10.1.0.0/16", nw_type="infra")), guest(BLUE, "10.1.0.5"))
    assert of(TenantSubnet, parts) == {TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=False)}


def test_other_hosts_are_answered_by_the_overlay() -> None:
    here = guest(BLUE, "10.1.0.5")
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), used=[here.endpoint])
    assert of(RemoteHostReturnRoute, view(cluster, here)) == {
        RemoteHostReturnRoute(BLUE, 7, "192.0.2.2", address("192.0.2.2")),
        RemoteHostReturnRoute(BLUE, 7, "192.0.2.2", address("fd77:6566:7400::c000:202")),
    }


def test_other_hosts_are_answered_by_the_uplinks_where_no_network_has_an_overlay() -> None:
    here = guest(BLUE, "10.1.0.5")
    tagged = network(BLUE, "10.1.0.0/16", vni=0)
    only = of(RemoteHostReturnRoute, view(cluster_of(tagged, used=[here.endpoint]), here))
    assert {vlan_tag(part.vni) for part in only if isinstance(part, RemoteHostReturnRoute)} == {1}
    other = network(BLUE, "10.2.0.0/16", name="other")
    away = msgspec.structs.replace(here.endpoint, network=NetworkName("other"), ip_address="10.2.0.5")
    both = of(RemoteHostReturnRoute, view(cluster_of(tagged, other, used=[here.endpoint, away]), here))
    assert {part.vni for part in both if isinstance(part, RemoteHostReturnRoute)} == {7}


def test_ports_of_the_host_lead_to_the_address_that_the_host_knows() -> None:
    asked = PublishedPort(protocol=TCP, port=8080, target_port=80)
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.0.0/16"))
    alone, red = guest(BLUE, "10.1.0.5", asked), guest(RED, "10.1.0.5")
    (port,) = of(HostPort, view(cluster, alone))
    assert port == HostPort(BLUE, 4, TCP, 8080, address("10.1.0.5"), 80)
    parts = view(cluster, alone, red)
    (port,) = of(HostPort, parts)
    (alias,) = [part for part in parts if isinstance(part, OverlapDnat) and part.tenant == BLUE]
    assert isinstance(port, HostPort)
    assert port.target == alias.address


def test_ports_of_one_address_meet_ports_of_all() -> None:
    every = PublishedPort(TCP, 80, 80)
    any4, any6 = PublishedPort(TCP, 80, 80, Address(4, 0)), PublishedPort(TCP, 80, 80, Address(6, 0))
    one, other = (PublishedPort(TCP, 80, 80, address(f"192.0.2.{last}")) for last in (1, 2))
    assert every.meets(one)
    assert any4.meets(one)
    assert one.meets(any4)
    assert not any6.meets(one)
    assert not one.meets(other)


def test_parts_have_a_rank() -> None:
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.0.0/16"))
    asked = PublishedPort(TCP, 80, 80)
    ordered = sorted(view(cluster, guest(BLUE, "10.1.0.5", asked), guest(RED, "10.1.0.5")), key=rank)
    assert isinstance(ordered[0], HostLink)
