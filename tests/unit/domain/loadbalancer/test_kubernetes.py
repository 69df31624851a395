"""Kubernetes Services compiled to frontends and pools, from API documents."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Invalid
from weft.domain.loadbalancer.kube_objects import EndpointSlice, ServiceObject
from weft.domain.loadbalancer.kubernetes import (
    external_pools,
    internal_pools,
    is_externally_reachable,
    node_ports,
    requested_external_ips,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool
from weft.domain.policy.model.protocols import SCTP, TCP, UDP

EXTERNAL_IP = parse_address("198.51.100.7", field="externalIPs")
NODEPORT_VIP = parse_address("172.19.255.1", field="vip")


def at(text: str) -> Address:
    return parse_address(text, field="address")


def service(**spec: Any) -> dict[str, Any]:
    ports = [{"name": "web", "port": 80, "targetPort": "http", "nodePort": 30080}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "shop", "namespace": "prod"},
        "spec": {"clusterIPs": ["10.96.0.10"], "type": "ClusterIP", "ports": ports, **spec},
        "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.7"}, {"hostname": "elsewhere.example"}]}},
    }


def pod(address: str, node: str = "one", **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "nodeName": node, "conditions": conditions, "targetRef": {"kind": "Pod"}}


def one_slice(*endpoints: dict[str, Any], family: int = 4, **port: Any) -> dict[str, Any]:
    return {
        "kind": "EndpointSlice",
        "metadata": {"labels": {"kubernetes.io/service-name": "shop"}},
        "addressType": f"IPv{family}",
        "endpoints": list(endpoints),
        "ports": [{"name": "web", "protocol": "TCP", "port": 8080, **port}],
    }


def internal_of(document: dict[str, Any], *slices: dict[str, Any], node: str = "one") -> dict[FrontendKey, Pool]:
    parsed = msgspec.convert(document, ServiceObject)
    return internal_pools(
        parsed, [msgspec.convert(each, EndpointSlice) for each in slices], node=node, external_ips=[EXTERNAL_IP]
    )


def external_of(document: dict[str, Any], *slices: dict[str, Any]) -> dict[FrontendKey, Pool]:
    parsed = [msgspec.convert(each, EndpointSlice) for each in slices]
    service = msgspec.convert(document, ServiceObject)
    return external_pools(service, parsed, node="one", external_ips=[EXTERNAL_IP], nodeport_vips=[NODEPORT_VIP])


def targets(pool: Pool) -> list[str]:
    return [f"{target.address}:{target.port}" for target in pool.targets]


def test_pods_use_cluster_ips_and_external_ips() -> None:
    pools = internal_of(service(), one_slice(pod("10.1.0.1"), pod("10.1.0.2", "two")), one_slice(pod("10.1.0.3")))
    assert {frontend.address for frontend in pools} == {at("10.96.0.10"), EXTERNAL_IP}
    assert all(targets(pool) == ["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"] for pool in pools.values())


def test_external_ips_and_node_ports_of_a_service() -> None:
    parsed = msgspec.convert(service(externalIPs=["203.0.113.9"]), ServiceObject)
    assert requested_external_ips(parsed) == [at("203.0.113.9"), EXTERNAL_IP]
    assert list(node_ports(parsed)) == [(TCP, 30080)]
    assert is_externally_reachable(parsed)
    assert not is_externally_reachable(msgspec.convert({**service(ports=[{"port": 80}]), "status": {}}, ServiceObject))


@pytest.mark.parametrize(
    ("conditions", "is_used"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, False),
        ({"ready": False, "serving": True, "terminating": False}, False),
    ],
)
def test_conditions_of_the_only_endpoint(conditions: dict[str, bool], is_used: bool) -> None:
    pools = internal_of(service(), one_slice(pod("10.1.0.1", "one", **conditions)))
    assert bool(pools[FrontendKey(at("10.96.0.10"), TCP, 80)].targets) is is_used


def test_a_terminating_endpoint_is_unused_while_another_is_ready() -> None:
    terminating = pod("10.1.0.1", ready=False, serving=True, terminating=True)
    pools = internal_of(service(), one_slice(terminating, pod("10.1.0.2", ready=True)))
    assert targets(pools[FrontendKey(at("10.96.0.10"), TCP, 80)]) == ["10.1.0.2:8080"]


def test_local_traffic_stays_on_the_node() -> None:
    slices = one_slice(pod("10.1.0.1", "one"), pod("10.1.0.2", "two"))
    own, outer = FrontendKey(at("10.96.0.10"), TCP, 80), FrontendKey(at("198.51.100.7"), TCP, 80)
    inside = internal_of(service(internalTrafficPolicy="Local", externalTrafficPolicy="Local"), slices)
    assert targets(inside[own]) == ["10.1.0.1:8080"]
    assert len(inside[outer].targets) == 2
    assert internal_of(service(internalTrafficPolicy="Local"), slices, node="three")[own].targets == ()
    external = external_of(service(externalTrafficPolicy="Local"), slices)
    assert external.keys() == {outer._replace(external=True), FrontendKey(NODEPORT_VIP, TCP, 30080)}
    assert all(targets(pool) == ["10.1.0.1:8080"] for pool in external.values())


def test_external_traffic_gets_all_backends_unless_the_policy_is_local() -> None:
    slices = one_slice(pod("10.1.0.1", "one"), pod("10.1.0.2", "two"))
    external = external_of(service(), slices)
    assert {frontend: targets(pool) for frontend, pool in external.items()} == {
        FrontendKey(NODEPORT_VIP, TCP, 30080): ["10.1.0.1:8080", "10.1.0.2:8080"]
    }


def test_affinity_defaults_to_three_hours() -> None:
    frontend = FrontendKey(at("10.96.0.10"), TCP, 80)
    assert internal_of(service())[frontend].affinity == 0
    assert internal_of(service(sessionAffinity="ClientIP"))[frontend].affinity == 10800
    configured = service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}})
    assert internal_of(configured)[frontend].affinity == 60


def test_both_families_and_several_ports() -> None:
    ports = [
        {"name": "web", "port": 80},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "sip", "port": 5060, "protocol": "SCTP"},
    ]
    document = service(clusterIPs=["10.96.0.10", "fd00::10"], ports=ports)
    slices = (
        one_slice(pod("10.1.0.1")),
        one_slice(pod("fd01::1"), family=6),
        one_slice(pod("10.1.0.1"), name="dns", protocol="UDP", port=5353),
    )
    pools = {frontend: targets(pool) for frontend, pool in internal_of(document, *slices).items()}
    v4, v6 = at("10.96.0.10"), at("fd00::10")
    assert pools[FrontendKey(v4, TCP, 80)] == ["10.1.0.1:8080"]
    assert pools[FrontendKey(v6, TCP, 80)] == ["fd01::1:8080"]
    assert pools[FrontendKey(v4, UDP, 53)] == ["10.1.0.1:5353"]
    assert pools[FrontendKey(v6, UDP, 53)] == pools[FrontendKey(v4, SCTP, 5060)] == []


@pytest.mark.parametrize("addresses", [["None"], [], [""]])
def test_a_headless_service_has_no_frontend_at_a_cluster_ip(addresses: list[str]) -> None:
    assert internal_of(service(clusterIPs=addresses), one_slice(pod("10.1.0.1"))).keys() == {
        FrontendKey(EXTERNAL_IP, TCP, 80)
    }


def test_a_slice_may_be_empty_in_every_way() -> None:
    empty = {"addressType": "IPv4", "endpoints": None, "ports": None}
    pools = internal_of(service(), empty, one_slice(), {**one_slice(pod("10.1.0.1")), "ports": None})
    assert pools[FrontendKey(at("10.96.0.10"), TCP, 80)].targets == ()


def test_an_invalid_address_is_rejected() -> None:
    with pytest.raises(Invalid):
        internal_of(service(), one_slice(pod("::ffff:10.1.0.1")))
