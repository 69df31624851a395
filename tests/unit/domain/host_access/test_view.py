"""Host access derives from the cluster state and the workloads of the node."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, parse_address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import rank
from weft.domain.host_access.state import (
    HostAccessItem,
    HostLink,
    HostPort,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.host_access.view import HostReachableEndpoint, PublishedPort, host_addresses, plan_host_access
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName
from weft.domain.policy.model.protocols import TCP

BLUE, RED = TenantName("blue"), TenantName("red")
HERE, THERE = NodeName("here"), NodeName("there")


def address(text: str) -> Address:
    return parse_address(text, field="test")


def network(tenant: TenantName, subnet: str, *, name: str = "net", vni: int = 7, **members: str) -> model.Network:
    tags = model.NetworkTags(vlan=1, vni=vni)
    return model.Network(tenant=tenant, name=NetworkName(name), encap="vxlan", subnet=subnet, tags=tags, **members)  # type: ignore[arg-type]


def reachable(tenant: TenantName, v4: str, *ports: PublishedPort) -> HostReachableEndpoint:
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


def plan(cluster: Cluster, *endpoints: HostReachableEndpoint) -> frozenset[HostAccessItem]:
    return plan_host_access(cluster, HERE, {each.endpoint.tenant for each in endpoints}, endpoints)


def of(kind: type[HostAccessItem], items: Iterable[HostAccessItem]) -> set[HostAccessItem]:
    return {item for item in items if isinstance(item, kind)}


def test_a_node_without_workloads_has_no_host_access() -> None:
    assert plan(cluster_of(network(BLUE, "10.1.0.0/16"))) == frozenset()


def test_a_host_sends_from_its_vtep() -> None:
    own = (address("192.0.2.1"), address("fd77:6566:7400::c000:201"))
    assert host_addresses(model.Node(name=HERE, vtep_ip="192.0.2.1")) == own
    assert host_addresses(model.Node(name=HERE)) == ()
    assert HostLink(BLUE, own) in plan(cluster_of(network(BLUE, "10.1.0.0/16")), reachable(BLUE, "10.1.0.5"))


def test_a_subnet_of_one_tenant_is_routed() -> None:
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.2.0.0/16"))
    items = plan(cluster, reachable(BLUE, "10.1.0.5"), reachable(RED, "10.2.0.5"))
    assert of(TenantSubnet, items) == {
        TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=True),
        TenantSubnet(RED, parse_subnet_v4("10.2.0.0/16"), routed=True),
    }
    assert not of(TenantSnat, items) | of(OverlapDnat, items)


def test_overlapping_tenants_get_private_addresses() -> None:
    """H3, W30: stable, all different, and out of `pvtSubnet`."""
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.128.0/24"))
    endpoints = reachable(BLUE, "10.1.128.5"), reachable(RED, "10.1.128.5")
    items = plan(cluster, *endpoints)
    assert {item.routed for item in items if isinstance(item, TenantSubnet)} == {False}
    private = [item.address for item in items if isinstance(item, TenantSnat | OverlapDnat)]
    assert len(private) == len(set(private)) == 6, "an SNAT address per family, and a DNAT address of the one family"
    private_subnet = parse_subnet_v4("172.19.0.0/16").usable
    assert all(private_subnet.holds(each) for each in private if each.family == 4)
    assert plan(cluster, *reversed(endpoints)) == items
    alone = plan(cluster, endpoints[0])
    assert not of(TenantSnat, alone)
    assert {item.routed for item in alone if isinstance(item, TenantSubnet)} == {True}


def test_no_route_hijacks_the_underlay() -> None:
    """A subnet that contains a host has no route."""
    items = plan(cluster_of(network(BLUE, "192.0.0.0/16")), reachable(BLUE, "192.0.9.5"))
    assert {item.routed for item in items if isinstance(item, TenantSubnet)} == {False}


def test_an_infra_network_has_an_interface_instead_of_a_route() -> None:
    items = plan(cluster_of(network(BLUE, "10.1.0.0/16", nw_type="infra")), reachable(BLUE, "10.1.0.5"))
    assert of(TenantSubnet, items) == {TenantSubnet(BLUE, parse_subnet_v4("10.1.0.0/16"), routed=False)}


def test_return_routes_to_other_hosts_use_the_overlay() -> None:
    here = reachable(BLUE, "10.1.0.5")
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), used=[here.endpoint])
    assert of(RemoteHostReturnRoute, plan(cluster, here)) == {
        RemoteHostReturnRoute(BLUE, 7, "192.0.2.2", address("192.0.2.2")),
        RemoteHostReturnRoute(BLUE, 7, "192.0.2.2", address("fd77:6566:7400::c000:202")),
    }


def test_return_routes_use_the_uplinks_if_no_network_has_an_overlay() -> None:
    here = reachable(BLUE, "10.1.0.5")
    tagged = network(BLUE, "10.1.0.0/16", vni=0)
    only = of(RemoteHostReturnRoute, plan(cluster_of(tagged, used=[here.endpoint]), here))
    assert {vlan_tag(item.vni) for item in only if isinstance(item, RemoteHostReturnRoute)} == {1}
    other = network(BLUE, "10.2.0.0/16", name="other")
    away = msgspec.structs.replace(here.endpoint, network=NetworkName("other"), ip_address="10.2.0.5")
    both = of(RemoteHostReturnRoute, plan(cluster_of(tagged, other, used=[here.endpoint, away]), here))
    assert {item.vni for item in both if isinstance(item, RemoteHostReturnRoute)} == {7}


def test_host_ports_are_mapped_to_the_address_that_the_host_reaches() -> None:
    requested = PublishedPort(protocol=TCP, port=8080, target_port=80)
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.0.0/16"))
    alone, red = reachable(BLUE, "10.1.0.5", requested), reachable(RED, "10.1.0.5")
    (port,) = of(HostPort, plan(cluster, alone))
    assert port == HostPort(BLUE, 4, TCP, 8080, address("10.1.0.5"), 80)
    items = plan(cluster, alone, red)
    (port,) = of(HostPort, items)
    (dnat,) = [item for item in items if isinstance(item, OverlapDnat) and item.tenant == BLUE]
    assert isinstance(port, HostPort)
    assert port.target == dnat.address


def test_a_port_of_one_address_conflicts_with_ports_of_all() -> None:
    every = PublishedPort(TCP, 80, 80)
    any4, any6 = PublishedPort(TCP, 80, 80, Address(4, 0)), PublishedPort(TCP, 80, 80, Address(6, 0))
    one, other = (PublishedPort(TCP, 80, 80, address(f"192.0.2.{last}")) for last in (1, 2))
    assert every.conflicts_with(one)
    assert any4.conflicts_with(one)
    assert one.conflicts_with(any4)
    assert not any6.conflicts_with(one)
    assert not one.conflicts_with(other)


def test_items_have_a_rank() -> None:
    cluster = cluster_of(network(BLUE, "10.1.0.0/16"), network(RED, "10.1.0.0/16"))
    requested = PublishedPort(TCP, 80, 80)
    ordered = sorted(plan(cluster, reachable(BLUE, "10.1.0.5", requested), reachable(RED, "10.1.0.5")), key=rank)
    assert isinstance(ordered[0], HostLink)
