"""Objects of the API become the documents that are kept of them (W46, W47)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.kube_script import HANG, Scripted, event, listing

from weft.adapters.kubernetes.cluster_informers import ClusterDeclarations, read_namespace, read_service
from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.policies import read_policy
from weft.adapters.kubernetes.slices import read_endpoints, read_slice, read_slice_v1beta1
from weft.domain import kinds
from weft.domain.errors import Invalid
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import Conditions, SliceEndpoint, SlicePort
from weft.domain.model import Value
from weft.domain.policy.compile.kube_objects import KubeNamespace
from weft.lab.waiting import until
from weft.runtime.tasks import background


def data(**members: Any) -> bytes:
    metadata = {"name": "x", "namespace": "ns", "uid": "1", "resourceVersion": "9"} | members.pop("metadata", {})
    return msgspec.json.encode({"kind": "Any", "metadata": metadata, **members})


def test_a_namespace() -> None:
    assert read_namespace(data(metadata={"labels": {"a": "b"}})) == KubeNamespace(name="x", labels={"a": "b"})


class TestPolicies:
    def test_absent_and_empty_stay_apart(self) -> None:
        policy = read_policy(data(spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]}))
        assert (policy.namespace, policy.name, policy.fault, policy.dry_run) == ("ns", "x", "", False)
        assert policy.spec.egress is None
        assert policy.spec.ingress is not None
        assert len(policy.spec.ingress) == 1
        assert policy.spec.ingress[0].from_ is None
        assert read_policy(data(spec={"podSelector": {}, "ingress": []})).spec.ingress == ()

    def test_dry_runs(self) -> None:
        dry = read_policy(data(metadata={"annotations": {"weft/dry-run": "true"}}, spec={"podSelector": {}}))
        assert dry.dry_run
        assert dry.policy.dry_run

    @pytest.mark.parametrize(
        "rule",
        [
            {"from": [{"futureSelector": {}}]},
            {"ports": [{"port": 80, "protocol": "QUIC"}]},
            {"ports": [{"port": 80}], "onlyOnSundays": True},
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["192.168.0.0/16"]}}]},
        ],
    )
    def test_a_rule_that_cannot_be_read_allows_nothing(self, rule: Any) -> None:
        """Left out, it would widen what the policy allows; refused, the policy would not isolate any more."""
        good = {"ports": [{"port": 443}]}
        policy = read_policy(data(spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule, good]}))
        assert policy.spec.ingress is not None
        assert [rule.ports for rule in policy.spec.ingress if rule.ports] == [policy.spec.ingress[0].ports]
        assert len(policy.spec.ingress) == 1
        assert policy.spec.isolates_ingress
        assert policy.fault.startswith("ingress[0]: ")

    def test_a_selector_that_cannot_be_read_protects_nobody(self) -> None:
        for selector in ({"matchExpressions": [{"key": "a", "operator": "Near"}]}, 5):
            with pytest.raises((Invalid, msgspec.ValidationError)):
                read_policy(data(spec={"podSelector": selector}))


class TestServices:
    def test_members_and_who_may_ask(self) -> None:
        ports = [{"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080}]
        spec = {
            "clusterIP": "10.96.0.9",
            "clusterIPs": ["10.96.0.9", "fd00::9"],
            "ports": ports,
            "selector": {"a": "b"},
        }
        found = read_service(data(spec=spec))
        assert (found.namespace, found.name, found.tenant, found.shared) == ("ns", "x", "default", False)
        assert found.service.spec.cluster_ips == ("10.96.0.9", "fd00::9")
        assert found.service.spec.ports[0].node_port == 30080
        for metadata in (
            {"name": "kubernetes", "namespace": "default"},
            {"labels": {"k8s-app": "kube-dns"}},
            {"annotations": {"weft/shared": "true"}},
        ):
            assert read_service(data(metadata=metadata, spec=spec)).shared

    def test_where_names_are_asked_for(self) -> None:
        metadata = {"labels": {"k8s-app": "kube-dns"}, "annotations": {"weft/names": "true"}}
        found = read_service(data(metadata=metadata, spec={}))
        assert (found.names, found.shared) == (True, False)

    def test_a_server_of_old_has_one_address(self) -> None:
        assert read_service(data(spec={"clusterIP": "10.96.0.9"})).service.spec.cluster_ips == ("10.96.0.9",)
        assert read_service(data(spec={"clusterIP": "None"})).service.spec.cluster_ips == ("None",)

    def test_what_a_label_leaves_to_somebody_else_is_so_marked(self) -> None:
        """As kube-proxy reads them: the labels count, whatever their values."""
        assert not read_service(data(spec={})).foreign
        for label in ("service-proxy-name", "headless"):
            metadata = {"labels": {f"service.kubernetes.io/{label}": ""}}
            assert read_service(data(metadata=metadata, spec={})).foreign

    def test_two_services_of_one_name_are_two(self) -> None:
        """W46: services were keyed without their namespace."""
        first, second = (read_service(data(metadata={"namespace": name}, spec={})) for name in ("a", "b"))
        assert kinds.KUBE_SERVICE.key_parts(first) != kinds.KUBE_SERVICE.key_parts(second)


OF_X = {"labels": {"kubernetes.io/service-name": "x"}, "name": "x-1"}


class TestSlices:
    def test_one_that_is_not_for_balancing_is_so_marked(self) -> None:
        for label, foreign in (("other", False), ("service.kubernetes.io/headless", True)):
            metadata = {**OF_X, "labels": {"kubernetes.io/service-name": "x", label: ""}}
            found = read_slice(data(metadata=metadata, addressType="IPv4", endpoints=[]))
            assert found is not None
            assert found.foreign == foreign

    def test_v1(self) -> None:
        endpoint = {
            "addresses": ["10.1.0.5"],
            "conditions": {"ready": True},
            "nodeName": "n1",
            "targetRef": {"uid": "u"},
        }
        ports = [{"name": "http", "port": 8080, "protocol": "TCP"}]
        found = read_slice(data(metadata=OF_X, addressType="IPv4", endpoints=[endpoint], ports=ports))
        assert found is not None
        assert (found.service_name, found.name) == ("x", "x-1")
        assert found.slice.endpoints == (
            SliceEndpoint(addresses=("10.1.0.5",), conditions=Conditions(ready=True), node_name="n1"),
        )
        assert found.slice.ports == (SlicePort(name="http", port=8080),)

    def test_v1beta1_has_the_node_in_its_topology(self) -> None:
        """1.20 has no other form."""
        endpoint = {"addresses": ["10.1.0.5"], "topology": {"kubernetes.io/hostname": "n1"}}
        found = read_slice_v1beta1(data(metadata=OF_X, addressType="IPv4", endpoints=[endpoint], ports=None))
        assert found is not None
        assert found.slice.endpoints is not None
        assert found.slice.endpoints[0].node_name == "n1"
        assert read_slice_v1beta1(data(metadata=OF_X, addressType="FQDN")) is None

    def test_endpoints_of_old_servers(self) -> None:
        subset = {
            "addresses": [{"ip": "10.1.0.5", "nodeName": "n1", "hostname": "a"}],
            "notReadyAddresses": [{"ip": "10.1.0.6"}],
            "ports": [{"name": "http", "port": 80}],
        }
        found = read_endpoints(data(subsets=[subset]))
        assert found is not None
        assert found.service_name == found.name == "x"
        ready = [(each.addresses[0], each.conditions.ready, each.hostname) for each in found.slice.endpoints or ()]
        assert ready == [("10.1.0.5", True, "a"), ("10.1.0.6", False, "")]
        assert read_endpoints(data()) is not None

    def test_a_slice_of_nobody_is_left_out(self) -> None:
        assert read_slice(data(addressType="IPv4", endpoints=[])) is None


class Kept:
    """A keeper that takes notes."""

    def __init__(self) -> None:
        self.names: dict[str, set[tuple[str, ...]]] = {}

    def replace(self, kind: Kind[Any], documents: Sequence[Value]) -> None:
        self.names[kind.name] = {kind.key_parts(each) for each in documents}

    def put(self, kind: Kind[Any], document: Value) -> None:
        self.names[kind.name].add(kind.key_parts(document))

    def remove(self, kind: Kind[Any], document: Value) -> None:
        self.names[kind.name].discard(kind.key_parts(document))


async def test_all_kinds_are_followed_at_once(server: Scripted, access: Access) -> None:
    policies, slices = "/apis/networking.k8s.io/v1/networkpolicies", "/apis/discovery.k8s.io/v1beta1/endpointslices"
    as_json: Callable[[bytes], Any] = msgspec.json.decode
    of_x = as_json(data(metadata=OF_X, addressType="IPv4", endpoints=[]))
    server.lists |= {
        "/api/v1/namespaces": [listing(1, as_json(data()))],
        "/api/v1/services": [listing(1, as_json(data(spec={})))],
        policies: [listing(1)],
        slices: [listing(1, of_x)],
    }
    server.watches[policies] = [[event("ADDED", as_json(data(spec={"podSelector": {}}))), HANG]]
    server.watches[slices] = [[event("DELETED", of_x), HANG]]
    kept = Kept()
    async with ClusterDeclarations(access) as declarations, background(declarations.run(kept), name="declarations"):
        await until(
            lambda: (
                kept.names
                == {
                    "kubeNamespace": {("x",)},
                    "kubePolicy": {("ns", "x")},
                    "kubeService": {("default", "ns", "x")},
                    "kubeSlice": set(),
                }
            )
        )
        assert declarations.faults == []
