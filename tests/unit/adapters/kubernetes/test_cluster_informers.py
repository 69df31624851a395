"""Decoding of Kubernetes objects into stored documents, and the cluster-wide informers (W46, W47)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.support.kube_script import HANG, Scripted, event, listing

from weft.adapters.kubernetes.cluster_informers import KubeInformers, decode_namespace, decode_service
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.policies import decode_policy
from weft.adapters.kubernetes.slices import decode_endpoints, decode_slice, decode_slice_v1beta1
from weft.domain import kinds
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import Conditions, SliceEndpoint, SlicePort
from weft.domain.model import Value
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.compile.kubernetes import compile_network_policy, is_isolation
from weft.domain.validation import check
from weft.lab.waiting import until
from weft.runtime.tasks import background


def data(**members: Any) -> bytes:
    metadata = {"name": "x", "namespace": "ns", "uid": "1", "resourceVersion": "9"} | members.pop("metadata", {})
    return msgspec.json.encode({"kind": "Any", "metadata": metadata, **members})


def test_a_namespace() -> None:
    assert decode_namespace(data(metadata={"labels": {"a": "b"}})) == KubeNamespace(name="x", labels={"a": "b"})


class TestPolicies:
    def test_absent_and_empty_rules_are_distinct(self) -> None:
        policy = decode_policy(data(spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]}))
        assert (policy.namespace, policy.name, policy.fault, policy.audit) == ("ns", "x", "", False)
        assert policy.spec.egress is None
        assert policy.spec.ingress is not None
        assert len(policy.spec.ingress) == 1
        assert policy.spec.ingress[0].from_ is None
        assert decode_policy(data(spec={"podSelector": {}, "ingress": []})).spec.ingress == ()

    def test_audit_mode(self) -> None:
        audited = decode_policy(data(metadata={"annotations": {"weft/mode": "audit"}}, spec={"podSelector": {}}))
        assert audited.audit
        assert audited.policy.audit

    @pytest.mark.parametrize(
        "rule",
        [
            {"from": [{"futureSelector": {}}]},
            {"ports": [{"port": 80, "protocol": "QUIC"}]},
            {"ports": [{"port": 80}], "onlyOnSundays": True},
            {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["192.168.0.0/16"]}}]},
        ],
    )
    def test_an_undecodable_rule_allows_nothing(self, rule: Any) -> None:
        """Ignoring the unknown member would widen the rule; rejecting the policy would end the isolation."""
        good = {"ports": [{"port": 443}]}
        policy = decode_policy(data(spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule, good]}))
        assert policy.spec.ingress is not None
        assert [rule.ports for rule in policy.spec.ingress if rule.ports] == [policy.spec.ingress[0].ports]
        assert len(policy.spec.ingress) == 1
        assert policy.spec.isolates_ingress
        assert policy.fault.startswith("ingress[0]: ")

    def test_H9_a_name_with_a_long_label_is_enforced(self) -> None:
        """Kubernetes limits a name to 253 characters, and not each label of it."""
        for name in ("a" * 253, f"{'b' * 100}.{'c' * 152}"):
            policy = decode_policy(data(metadata={"name": name}, spec={"podSelector": {}}))
            assert (check(policy).name, policy.fault) == (name, "")
            assert isolates(policy) == {"ingress"}

    @pytest.mark.parametrize("selector", [{"matchExpressions": [{"key": "a", "operator": "Near"}]}, 5, [], {"new": 1}])
    def test_H9_an_unreadable_selector_isolates_the_namespace(self, selector: Any) -> None:
        policy = decode_policy(data(spec={"podSelector": selector, "ingress": [{}], "egress": [{}]}))
        assert policy.fault.startswith("podSelector: ")
        assert (policy.spec.pod_selector, policy.spec.ingress, policy.spec.egress) == (None, None, None)
        assert isolates(policy) == {"ingress", "egress"}

    @pytest.mark.parametrize(
        ("members", "closed"),
        [
            ({"policyTypes": ["Sideways"]}, {"ingress", "egress"}),
            ({"policyTypes": 5}, {"ingress", "egress"}),
            ({"onlyOnSundays": True}, {"ingress", "egress"}),
            ({"onlyOnSundays": True, "policyTypes": ["Ingress"]}, {"ingress"}),
            ({"ingress": {}}, {"ingress"}),
            ({"egress": [{"to": 5}]}, {"ingress", "egress"}),
        ],
    )
    def test_H9_what_is_unreadable_allows_nothing(self, members: dict[str, Any], closed: set[str]) -> None:
        policy = decode_policy(data(spec={"podSelector": {}} | members))
        assert policy.fault
        assert not policy.spec.ingress
        assert not policy.spec.egress
        assert isolates(policy) == closed

    @pytest.mark.parametrize("metadata", [{"name": 5}, {"name": "a/b"}, {"labels": None, "annotations": None}])
    def test_H9_unreadable_metadata_still_isolates(self, metadata: dict[str, Any]) -> None:
        policy = decode_policy(data(metadata=metadata, spec={"podSelector": {}}))
        assert isolates(check(policy)) == {"ingress"}

    def test_H6_a_policy_past_the_bound_fails_closed(self) -> None:
        """2,000 rules whose addresses overlap pairwise: four million combinations."""
        rules = [
            {"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"10.{i >> 8}.{i & 255}.0/24"]}}]}
            for i in range(2000)
        ]
        policy = decode_policy(data(spec={"podSelector": {}, "ingress": rules}))
        assert "the limit is" in policy.fault
        assert (policy.spec.ingress, isolates(policy)) == (None, {"ingress"})


def isolates(policy: KubePolicy) -> set[str]:
    """The directions in which the policy denies what its rules do not allow."""
    rules = compile_network_policy(policy.policy).rules
    return {str(rule.direction) for rule in rules if is_isolation(rule.id)}


class TestServices:
    def test_members_and_sharing(self) -> None:
        ports = [{"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080}]
        spec = {
            "clusterIP": "10.96.0.9",
            "clusterIPs": ["10.96.0.9", "fd00::9"],
            "ports": ports,
            "selector": {"a": "b"},
        }
        found = decode_service(data(spec=spec))
        assert (found.namespace, found.name, found.tenant, found.shared) == ("ns", "x", "default", False)
        assert found.service.spec.cluster_ips == ("10.96.0.9", "fd00::9")
        assert found.service.spec.ports[0].node_port == 30080
        for metadata in (
            {"name": "kubernetes", "namespace": "default"},
            {"labels": {"k8s-app": "kube-dns"}},
            {"annotations": {"weft/shared": "true"}},
        ):
            assert decode_service(data(metadata=metadata, spec=spec)).shared

    def test_the_dns_service(self) -> None:
        metadata = {"labels": {"k8s-app": "kube-dns"}, "annotations": {"weft/dns": "true"}}
        found = decode_service(data(metadata=metadata, spec={}))
        assert (found.cluster_dns, found.shared) == (True, False)

    def test_an_old_server_has_a_single_cluster_ip(self) -> None:
        assert decode_service(data(spec={"clusterIP": "10.96.0.9"})).service.spec.cluster_ips == ("10.96.0.9",)
        assert decode_service(data(spec={"clusterIP": "None"})).service.spec.cluster_ips == ("None",)

    def test_a_service_with_another_proxy_is_marked_foreign(self) -> None:
        """As in kube-proxy: the labels count, whatever their values."""
        assert not decode_service(data(spec={})).foreign
        for label in ("service-proxy-name", "headless"):
            metadata = {"labels": {f"service.kubernetes.io/{label}": ""}}
            assert decode_service(data(metadata=metadata, spec={})).foreign

    def test_services_of_the_same_name_in_two_namespaces_are_distinct(self) -> None:
        """W46: services were keyed without their namespace."""
        first, second = (decode_service(data(metadata={"namespace": name}, spec={})) for name in ("a", "b"))
        assert kinds.KUBE_SERVICE.key_parts(first) != kinds.KUBE_SERVICE.key_parts(second)


OF_X = {"labels": {"kubernetes.io/service-name": "x"}, "name": "x-1"}


class TestSlices:
    def test_a_slice_with_another_proxy_is_marked_foreign(self) -> None:
        for label, foreign in (("other", False), ("service.kubernetes.io/headless", True)):
            metadata = {**OF_X, "labels": {"kubernetes.io/service-name": "x", label: ""}}
            found = decode_slice(data(metadata=metadata, addressType="IPv4", endpoints=[]))
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
        found = decode_slice(data(metadata=OF_X, addressType="IPv4", endpoints=[endpoint], ports=ports))
        assert found is not None
        assert (found.service_name, found.name) == ("x", "x-1")
        assert found.slice.endpoints == (
            SliceEndpoint(addresses=("10.1.0.5",), conditions=Conditions(ready=True), node_name="n1"),
        )
        assert found.slice.ports == (SlicePort(name="http", port=8080),)

    def test_v1beta1_has_the_node_in_its_topology(self) -> None:
        """1.20 has no other version."""
        endpoint = {"addresses": ["10.1.0.5"], "topology": {"kubernetes.io/hostname": "n1"}}
        found = decode_slice_v1beta1(data(metadata=OF_X, addressType="IPv4", endpoints=[endpoint], ports=None))
        assert found is not None
        assert found.slice.endpoints is not None
        assert found.slice.endpoints[0].node_name == "n1"
        assert decode_slice_v1beta1(data(metadata=OF_X, addressType="FQDN")) is None

    def test_endpoints_of_a_server_without_slices(self) -> None:
        subset = {
            "addresses": [{"ip": "10.1.0.5", "nodeName": "n1", "hostname": "a"}],
            "notReadyAddresses": [{"ip": "10.1.0.6"}],
            "ports": [{"name": "http", "port": 80}],
        }
        found = decode_endpoints(data(subsets=[subset]))
        assert found is not None
        assert found.service_name == found.name == "x"
        ready = [(each.addresses[0], each.conditions.ready, each.hostname) for each in found.slice.endpoints or ()]
        assert ready == [("10.1.0.5", True, "a"), ("10.1.0.6", False, "")]
        assert decode_endpoints(data()) is not None

    def test_a_slice_without_a_service_is_skipped(self) -> None:
        assert decode_slice(data(addressType="IPv4", endpoints=[])) is None


class RecordingHandler:
    """A `ResourceHandler` that records its calls."""

    def __init__(self) -> None:
        self.names: dict[str, set[tuple[str, ...]]] = {}

    def replace(self, kind: Kind[Any], documents: Sequence[Value]) -> None:
        self.names[kind.name] = {kind.key_parts(each) for each in documents}

    def put(self, kind: Kind[Any], document: Value) -> None:
        self.names[kind.name].add(kind.key_parts(document))

    def remove(self, kind: Kind[Any], document: Value) -> None:
        self.names[kind.name].discard(kind.key_parts(document))


async def test_all_kinds_are_watched_at_once(server: Scripted, client_config: ClientConfig) -> None:
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
    recorded = RecordingHandler()
    async with KubeInformers(client_config) as informers, background(informers.run(recorded), name="informers"):
        await until(
            lambda: (
                recorded.names
                == {
                    "kubeNamespace": {("x",)},
                    "kubePolicy": {("ns", "x")},
                    "kubeService": {("default", "ns", "x")},
                    "kubeSlice": set(),
                }
            )
        )
        assert informers.faults == []
