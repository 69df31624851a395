"""What `inspect` shows beside the configuration (contiv 2.2); the scenarios by REST have the rest (E1–E12)."""

from __future__ import annotations

import msgspec
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network, policy, profile, rule, service

from weft.domain import codec, kinds, model
from weft.domain.ids import NodeName
from weft.domain.ipam import ipam
from weft.domain.lifecycle.changes.endpoints import plan_publish
from weft.domain.loadbalancer.kube_objects import KubeService, ServiceObject, ServiceSpec
from weft.domain.oper import endpoint_oper, oper_of


def test_an_empty_network_shows_its_tags_and_what_is_free() -> None:
    world = FakeCluster()
    blue = world.put(network())
    assert oper_of(world.cluster, kinds.NETWORK, blue) == {
        "pktTag": 1,
        "externalPktTag": 1,
        "networkTag": "blue.default",
        "availableIPAddresses": "10.1.1.1-10.1.1.254",
    }


def test_a_configured_tag_is_shown_instead_of_the_derived_one() -> None:
    world = FakeCluster()
    blue = world.put(network(cfgd_tag="fabric.blue"))
    web = world.put(group(cfgd_tag="fabric.web"))
    assert oper_of(world.cluster, kinds.NETWORK, blue)["networkTag"] == "fabric.blue"
    assert oper_of(world.cluster, kinds.GROUP, web)["groupTag"] == "fabric.web"


def test_a_groups_tag_is_its_own_or_its_networks() -> None:
    """contiv 2.2, `pktTag`; contiv 5.1."""
    world = FakeCluster()
    world.put(network(encap="vlan", pkt_tag=7))
    shown = [oper_of(world.cluster, kinds.GROUP, world.put(each)) for each in (group("a", pkt_tag=70), group("b"))]
    assert [each["pktTag"] for each in shown] == [70, 7]


def test_addresses_of_blocks_are_allocated_and_available_like_any_others() -> None:
    world = FakeCluster()
    blue = world.put(network(subnet="10.1.0.0/16"))
    reading = world.reading()
    block, writes = ipam.take_block(reading, blue, NodeName("n1"), family=4)
    world.carry_out(reading.plan(writes))
    mine = msgspec.structs.replace(endpoint("e1", address=str(block)), host="n1")
    world.carry_out(plan_publish(world.reading(), mine))
    world.attach("e2")
    oper = oper_of(world.cluster, kinds.NETWORK, blue)
    assert str(block) == "10.1.255.128"
    assert oper["allocatedIPAddresses"] == "10.1.0.1, 10.1.255.128"
    assert oper["availableIPAddresses"] == "10.1.0.2-10.1.255.127, 10.1.255.129-10.1.255.254"
    assert oper["allocatedAddressesCount"] == oper["numEndpoints"] == 2


def test_an_endpoint_shows_all_its_names() -> None:
    world = FakeCluster()
    world.put(network(ipv6_subnet="fd00::/64"))
    world.put(group())
    made = world.attach("e1", group="web")
    made = msgspec.structs.replace(made, labels={"app": "web"}, container_id="c1", container_name="shop", host="n1")
    assert endpoint_oper(world.cluster, made) == {
        "endpointID": "e1",
        "tenantName": "default",
        "network": "blue.default",
        "serviceName": "web",
        "endpointGroupId": 1,
        "endpointGroupKey": "web:default",
        "ipAddress": ["10.1.1.1", "fd00::1"],
        "macAddress": "02:02:0a:01:01:01",
        "homingHost": "n1",
        "labels": {"app": "web"},
        "containerID": "c1",
        "containerName": "shop",
    }


def test_the_settings_show_the_tags_in_use() -> None:
    world = FakeCluster()
    assert oper_of(world.cluster, kinds.GLOBAL, model.Global()) == {"freeVXLANsStart": 1}
    for number, tag in enumerate((0, 0, 7)):
        world.put(network(f"v{number}", f"10.2.{number}.0/24", encap="vlan", pkt_tag=tag))
        world.put(network(f"x{number}", f"10.3.{number}.0/24", pkt_tag=tag))
    world.put(model.Tenant(name=DEFAULT, default_network="v0"))
    assert oper_of(world.cluster, kinds.GLOBAL, model.Global()) == {
        "numNetworks": 6,
        "defaultNetwork": "v0",
        "vlansInUse": "1-2, 7",
        "vxlansInUse": "1-2, 7",
        "freeVXLANsStart": 3,
    }


def test_kinds_without_operational_state_show_none() -> None:
    world = FakeCluster()
    world.put(policy())
    for kind, value in ((kinds.RULE, world.put(rule())), (kinds.PROFILE, world.put(profile()))):
        assert oper_of(world.cluster, kind, value) == {}


def test_a_tenant_shows_what_is_in_it() -> None:
    world = FakeCluster()
    dual = network(ipv6_subnet="fd00::/64", ipv6_gateway="fd00::1")
    for value in (dual, group(), policy(), profile(), service()):
        world.put(value)
    world.attach("e1", group="web")
    oper = oper_of(world.cluster, kinds.TENANT, model.Tenant(name=DEFAULT))
    assert [oper[f"total{name}"] for name in ("Networks", "EPGs", "Policies", "Netprofiles", "Servicelbs")] == [1] * 5
    assert oper["networks"][0]["networkName"] == "blue"
    assert oper["networks"][0]["allocatedIPAddresses"] == "10.1.1.1-10.1.1.2"
    assert oper["servicelbs"] == [{"serviceName": "s", "serviceVip": "10.1.1.1", "ipv6ServiceVip": "fd00::2"}]
    assert oper["endpointGroups"][0]["numEndpoints"] == oper["totalEndpoints"] == 1


def test_a_kubernetes_service_reports_what_has_no_effect() -> None:
    """CVE-2020-8554: an external address that is not the tenant's says so."""
    world = FakeCluster()
    spec = ServiceSpec(cluster_ips=("10.96.0.10",), external_ips=("198.51.100.7", "10.96.0.10"))
    document = KubeService(tenant=DEFAULT, namespace="prod", name="shop", service=ServiceObject(spec=spec))
    world.cluster.put(kinds.KUBE_SERVICE.store_key(DEFAULT, "prod", "shop"), codec.encode(document), 1)
    reason = "is not in externalRanges of the tenant"
    assert oper_of(world.cluster, kinds.KUBE_SERVICE, document) == {
        "faults": [f"external address 198.51.100.7 {reason}", f"external address 10.96.0.10 {reason}"]
    }
    world.put(model.Tenant(name=DEFAULT, external_ranges=("0.0.0.0/0",)))
    assert oper_of(world.cluster, kinds.KUBE_SERVICE, document) == {
        "faults": ["external address 10.96.0.10 is the cluster IP of a service"]
    }
