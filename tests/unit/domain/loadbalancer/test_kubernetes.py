"""Kubernetes services as fronts and pools, from the documents as its API server gives them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Invalid
from weft.domain.loadbalancer.kube_objects import DeclaredService, EndpointSlice
from weft.domain.loadbalancer.kubernetes import (
    is_outward,
    node_ports,
    pools_for_outside,
    pools_for_pods,
    wanted_addresses,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool
from weft.domain.policy.model.protocols import SCTP, TCP, UDP

OUTER = parse_address("198.51.100.7", field="outer")
DOOR = parse_address("172.19.255.1", field="door")


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


def for_pods(document: dict[str, Any], *slices: dict[str, Any], node: str = "one") -> dict[FrontendKey, Pool]:
    parsed = msgspec.convert(document, DeclaredService)
    return pools_for_pods(parsed, [msgspec.convert(each, EndpointSlice) for each in slices], node=node, outer=[OUTER])


def for_outside(document: dict[str, Any], *slices: dict[str, Any]) -> dict[FrontendKey, Pool]:
    parsed = [msgspec.convert(each, EndpointSlice) for each in slices]
    service = msgspec.convert(document, DeclaredService)
    return pools_for_outside(service, parsed, node="one", outer=[OUTER], doors=[DOOR])


def targets(pool: Pool) -> list[str]:
    return [f"{target.address}:{target.port}" for target in pool.targets]


def test_pods_ask_at_the_cluster_address_and_at_outer_ones() -> None:
    pools = for_pods(service(), one_slice(pod("10.1.0.1"), pod("10.1.0.2", "two")), one_slice(pod("10.1.0.3")))
    assert {front.address for front in pools} == {at("10.96.0.10"), OUTER}
    assert all(targets(pool) == ["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"] for pool in pools.values())


def test_what_a_service_asks_for_outside() -> None:
    wanting = msgspec.convert(service(externalIPs=["203.0.113.9"]), DeclaredService)
    assert wanted_addresses(wanting) == [at("203.0.113.9"), OUTER]
    assert list(node_ports(wanting)) == [(TCP, 30080)]
    assert is_outward(wanting)
    assert not is_outward(msgspec.convert({**service(ports=[{"port": 80}]), "status": {}}, DeclaredService))


@pytest.mark.parametrize(
    ("conditions", "is_asked"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, False),
        ({"ready": False, "serving": True, "terminating": False}, False),
    ],
)
def test_who_is_asked_when_there_is_no_other(conditions: dict[str, bool], is_asked: bool) -> None:
    pools = for_pods(service(), one_slice(pod("10.1.0.1", "one", **conditions)))
    assert bool(pools[FrontendKey(at("10.96.0.10"), TCP, 80)].targets) is is_asked


def test_who_ends_is_not_asked_while_another_is_ready() -> None:
    ending = pod("10.1.0.1", ready=False, serving=True, terminating=True)
    pools = for_pods(service(), one_slice(ending, pod("10.1.0.2", ready=True)))
    assert targets(pools[FrontendKey(at("10.96.0.10"), TCP, 80)]) == ["10.1.0.2:8080"]


def test_local_traffic_stays_on_the_node() -> None:
    slices = one_slice(pod("10.1.0.1", "one"), pod("10.1.0.2", "two"))
    own, outer = FrontendKey(at("10.96.0.10"), TCP, 80), FrontendKey(at("198.51.100.7"), TCP, 80)
    inside = for_pods(service(internalTrafficPolicy="Local", externalTrafficPolicy="Local"), slices)
    assert targets(inside[own]) == ["10.1.0.1:8080"]
    assert len(inside[outer].targets) == 2
    assert for_pods(service(internalTrafficPolicy="Local"), slices, node="three")[own].targets == ()
    outside = for_outside(service(externalTrafficPolicy="Local"), slices)
    assert outside.keys() == {outer._replace(outside=True), FrontendKey(DOOR, TCP, 30080)}
    assert all(targets(pool) == ["10.1.0.1:8080"] for pool in outside.values())


def test_who_comes_by_the_host_is_served_as_pods_are_unless_traffic_is_local() -> None:
    slices = one_slice(pod("10.1.0.1", "one"), pod("10.1.0.2", "two"))
    outside = for_outside(service(), slices)
    assert {front: targets(pool) for front, pool in outside.items()} == {
        FrontendKey(DOOR, TCP, 30080): ["10.1.0.1:8080", "10.1.0.2:8080"]
    }


def test_affinity_is_three_hours_unless_it_is_said() -> None:
    front = FrontendKey(at("10.96.0.10"), TCP, 80)
    assert for_pods(service())[front].affinity == 0
    assert for_pods(service(sessionAffinity="ClientIP"))[front].affinity == 10800
    said = service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}})
    assert for_pods(said)[front].affinity == 60


def test_both_families_and_several_ports() -> None:
    ports = [
        {"name": "web", "port": 80},
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "voice", "port": 5060, "protocol": "SCTP"},
    ]
    document = service(clusterIPs=["10.96.0.10", "fd00::10"], ports=ports)
    slices = (
        one_slice(pod("10.1.0.1")),
        one_slice(pod("fd01::1"), family=6),
        one_slice(pod("10.1.0.1"), name="dns", protocol="UDP", port=5353),
    )
    pools = {front: targets(pool) for front, pool in for_pods(document, *slices).items()}
    v4, v6 = at("10.96.0.10"), at("fd00::10")
    assert pools[FrontendKey(v4, TCP, 80)] == ["10.1.0.1:8080"]
    assert pools[FrontendKey(v6, TCP, 80)] == ["fd01::1:8080"]
    assert pools[FrontendKey(v4, UDP, 53)] == ["10.1.0.1:5353"]
    assert pools[FrontendKey(v6, UDP, 53)] == pools[FrontendKey(v4, SCTP, 5060)] == []


@pytest.mark.parametrize("addresses", [["None"], [], [""]])
def test_a_headless_service_has_no_front(addresses: list[str]) -> None:
    assert for_pods(service(clusterIPs=addresses), one_slice(pod("10.1.0.1"))).keys() == {FrontendKey(OUTER, TCP, 80)}


def test_a_slice_may_be_empty_in_every_way() -> None:
    empty = {"addressType": "IPv4", "endpoints": None, "ports": None}
    pools = for_pods(service(), empty, one_slice(), {**one_slice(pod("10.1.0.1")), "ports": None})
    assert pools[FrontendKey(at("10.96.0.10"), TCP, 80)].targets == ()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid):
        for_pods(service(), one_slice(pod("::ffff:10.1.0.1")))
