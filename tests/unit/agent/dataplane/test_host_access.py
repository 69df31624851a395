"""Host access as a datapath feature: differences when the cluster or the local endpoints change."""

from __future__ import annotations

import pytest

from weft.agent.dataplane.host_access import HostAccess
from weft.agent.dataplane.policy import TenantPolicy
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem, port_of
from weft.domain.host_access.state import HostLink, HostPort, OverlapDnat, TenantSnat, TenantSubnet
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName
from weft.domain.policy.model.identities import Kind
from weft.domain.policy.model.protocols import TCP
from weft.ports.datapath import EndpointConfig

BLUE, RED = TenantName("blue"), TenantName("red")
HERE, THERE = NodeName("here"), NodeName("there")
NOTHING: Difference[StateItem] = Difference((), ())


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    put_node(cluster, HERE, "192.0.2.1")
    for tenant in (BLUE, RED):
        put_network(cluster, tenant, "net", "10.1.0.0/16")
    assert not cluster.faults
    return cluster


def put_node(cluster: Cluster, name: NodeName, vtep: str) -> None:
    cluster.put(kinds.NODE.store_key(name), codec.encode(model.Node(name=name, vtep_ip=vtep)), 1)


def put_network(cluster: Cluster, tenant: TenantName, name: str, subnet: str) -> None:
    tags = model.NetworkTags(vlan=1, vni=7)
    network = model.Network(tenant=tenant, name=NetworkName(name), encap="vxlan", subnet=subnet, tags=tags)
    cluster.put(kinds.NETWORK.store_key(tenant, name), codec.encode(network), 1)


def attach(attachment_store: AttachmentStore, tenant: TenantName, *ports: PublishedPort) -> model.Endpoint:
    endpoint = model.Endpoint(
        tenant=tenant, network=NetworkName("net"), endpoint_id=EndpointId("e"), ip_address="10.1.0.5", host=HERE
    )
    config = EndpointConfig(port=port_of(endpoint), netns="/n", interface="eth0", addresses=(), mtu=1450, ports=ports)
    attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=Stage.CONFIGURING, config=config))
    return endpoint


def kinds_of(parts: tuple[StateItem, ...]) -> list[type]:
    return [type(part) for part in parts]


def test_only_differences_are_returned(cluster: Cluster) -> None:
    access = HostAccess(cluster, node=HERE, attachment_store=AttachmentStore())
    assert kinds_of(access.refresh({BLUE}).put) == [HostLink, TenantSubnet]
    assert access.refresh({BLUE}) == NOTHING
    put_network(cluster, BLUE, "more", "10.2.0.0/16")
    assert access.refresh({BLUE}) == NOTHING, "no event has marked it as touched"
    access.follow(kinds.NETWORK.store_key(BLUE, "more"))
    assert kinds_of(access.refresh({BLUE}).put) == [TenantSubnet]
    assert kinds_of(access.refresh(set()).drop) == [TenantSubnet, TenantSubnet, HostLink]


def test_a_plain_endpoint_changes_nothing(cluster: Cluster) -> None:
    """The hot path: only host ports and SNAT depend on endpoints."""
    attachment_store = AttachmentStore()
    access = HostAccess(cluster, node=HERE, attachment_store=attachment_store)
    access.refresh({BLUE})
    endpoint = attach(attachment_store, BLUE)
    assert access.add_endpoint(endpoint) == NOTHING
    assert access.remove_endpoint(endpoint) == NOTHING


def test_host_ports_come_and_go_with_their_endpoint(cluster: Cluster) -> None:
    attachment_store = AttachmentStore()
    access = HostAccess(cluster, node=HERE, attachment_store=attachment_store)
    access.refresh({BLUE})
    endpoint = attach(attachment_store, BLUE, PublishedPort(TCP, 8080, 80))
    put_items = access.add_endpoint(endpoint)
    assert kinds_of(put_items.put) == [HostPort]
    assert access.remove_endpoint(endpoint) == Difference((), put_items.put)


def test_an_overlapping_tenant_gets_snat(cluster: Cluster) -> None:
    """H3, W30: put with its link, and the same after a restart."""
    attachment_store = AttachmentStore()
    access = HostAccess(cluster, node=HERE, attachment_store=attachment_store)
    attach(attachment_store, BLUE)
    access.refresh({BLUE})
    attach(attachment_store, RED)
    put_items = access.refresh({BLUE, RED})
    assert kinds_of(put_items.put).count(TenantSnat) == 4
    assert kinds_of(put_items.put).count(OverlapDnat) == 2
    restarted = HostAccess(cluster, node=HERE, attachment_store=attachment_store)
    assert restarted.everything({BLUE, RED}) == access.everything({BLUE, RED})


def test_policy_follows_host_addresses(cluster: Cluster) -> None:
    policy = TenantPolicy(cluster, BLUE, node=HERE, attached=())
    directory = policy.engine.directory
    assert directory.at(parse_address("192.0.2.1", field="own"), tenant=BLUE).kind is Kind.HOST
    other = parse_address("192.0.2.2", field="other")
    assert directory.at(other, tenant=BLUE).kind is Kind.WORLD
    put_node(cluster, THERE, "192.0.2.2")
    policy.follow(kinds.NODE.store_key(THERE))
    assert directory.at(other, tenant=BLUE).node == THERE
    cluster.drop(kinds.NODE.store_key(THERE))
    policy.follow(kinds.NODE.store_key(THERE))
    assert directory.at(other, tenant=BLUE).kind is Kind.WORLD
