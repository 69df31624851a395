"""NetworkPolicy decoding: valid and invalid documents, and an unchanged round trip."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import msgspec
import pytest
from tests.support.cluster_samples import random_object

from weft.domain.errors import Invalid, Malformed
from weft.domain.policy.model.netpol import NetworkPolicy, read_network_policy

Json = Mapping[str, object]


def document(spec: object, **metadata: object) -> dict[str, object]:
    return {"metadata": {"name": "p", "namespace": "x", **metadata}, "spec": spec}


def ingress(**rule: object) -> dict[str, object]:
    return document({"podSelector": {}, "ingress": [rule]})


def port(**member: object) -> dict[str, object]:
    return ingress(ports=[member])


def peer(**member: object) -> dict[str, object]:
    return ingress(**{"from": [member]})


def block(cidr: str, *holes: str) -> dict[str, object]:
    return peer(ipBlock={"cidr": cidr, "except": list(holes)})


@pytest.mark.parametrize(
    "source",
    [
        document({}),
        document(None) | {"spec": {"podSelector": None, "policyTypes": None, "ingress": None, "egress": None}},
        document({"podSelector": {"matchLabels": None, "matchExpressions": None}}),
        {"metadata": {"name": "p", "uid": "7", "labels": {"a": "b"}, "managedFields": []}, "status": {}},
        document({"policyTypes": ["Egress", "Ingress"]}),
        document({"policyTypes": ["Ingress"], "egress": [{"to": [{"podSelector": {}}]}]}),
        ingress(),
        ingress(ports=[], **{"from": []}),
        port(),
        port(port=1),
        port(port=65535, protocol="SCTP"),
        port(port=1, endPort=65535),
        port(port=80, endPort=80),
        port(port="http"),
        port(port="a-1-b"),
        block("0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16"),
        block("10.1.2.3/8"),
        block("fd00::/8", "fd00::/9"),
        peer(podSelector={}, namespaceSelector={}),
    ],
)
def test_valid_policies_are_read(source: Json) -> None:
    assert read_network_policy(source).metadata.name == "p"


@pytest.mark.parametrize(
    ("source", "field", "word"),
    [
        (port(port=0), "spec.ingress[0].ports[0].port", "65535"),
        (port(port=70000), "spec.ingress[0].ports[0].port", "70000"),
        (port(port=-1), "spec.ingress[0].ports[0].port", "-1"),
        (port(port=2**64), "spec.ingress[0].ports[0].port", ""),
        (port(port="80"), "spec.ingress[0].ports[0].port", "name"),
        (port(port=""), "spec.ingress[0].ports[0].port", "name"),
        (port(port="Http"), "spec.ingress[0].ports[0].port", "name"),
        (port(port="a--b"), "spec.ingress[0].ports[0].port", "name"),
        (port(port="a" * 16), "spec.ingress[0].ports[0].port", "name"),
        (port(protocol="ICMP"), "spec.ingress[0].ports[0].protocol", "ICMP"),
        (port(protocol="tcp", port=1), "spec.ingress[0].ports[0].protocol", "tcp"),
        (port(port=90, endPort=80), "spec.ingress[0].ports[0].endPort", "80"),
        (port(port=90, endPort=65536), "spec.ingress[0].ports[0].endPort", "65536"),
        (port(port="http", endPort=80), "spec.ingress[0].ports[0].endPort", "number"),
        (port(endPort=80), "spec.ingress[0].ports[0].endPort", "number"),
        (block("10.0.0.0/8", "11.0.0.0/9"), "spec.ingress[0].from[0].ipBlock.except[0]", "strict subset"),
        (
            block("10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/8"),
            "spec.ingress[0].from[0].ipBlock.except[1]",
            "strict subset",
        ),
        (block("10.0.0.0/8", "0.0.0.0/0"), "spec.ingress[0].from[0].ipBlock.except[0]", "strict subset"),
        (block("10.0.0.0/8", "fd00::/64"), "spec.ingress[0].from[0].ipBlock.except[0]", "strict subset"),
        (block("10.0.0.0"), "spec.ingress[0].from[0].ipBlock.cidr", "form"),
        (block("fe80::%eth0/64"), "spec.ingress[0].from[0].ipBlock.cidr", "form"),
        (block("10.0.0.0/8", "10.0.0.0/99"), "spec.ingress[0].from[0].ipBlock.except[0]", "32"),
        (peer(), "spec.ingress[0].from[0]", "needs"),
        (peer(podSelector={}, ipBlock={"cidr": "10.0.0.0/8"}), "spec.ingress[0].from[0]", "alone"),
        (
            peer(podSelector={"matchExpressions": [{"key": "a", "operator": "Like"}]}),
            "spec.ingress[0].from[0].podSelector.matchExpressions[0].operator",
            "Like",
        ),
        (
            peer(namespaceSelector={"matchLabels": {"a b": "c"}}),
            "spec.ingress[0].from[0].namespaceSelector.matchLabels",
            "a b",
        ),
        (document({"podSelector": {"matchLabels": {"a": "b c"}}}), "spec.podSelector.matchLabels.a", "b c"),
        (document({"egress": [{}, {"ports": [{"port": 0}]}]}), "spec.egress[1].ports[0].port", "0"),
        (document({"egress": [{"to": [{}]}]}), "spec.egress[0].to[0]", "needs"),
        (document({"policyTypes": ["Ingress", "Both"]}), "spec.policyTypes[1]", "Both"),
        (document({"policyTypes": ["Ingress", "Egress", "Ingress"]}), "spec.policyTypes", "two"),
        (document({}, name="A"), "metadata.name", "DNS"),
        (document({}, name="../x"), "metadata.name", "DNS"),
        (document({}, namespace="x/y"), "metadata.namespace", "DNS"),
        (document({}) | {"kind": "Pod"}, "kind", "Pod"),
        (document({}) | {"apiVersion": "extensions/v1beta1"}, "kind", "extensions"),
    ],
)
def test_a_bad_policy_is_refused_with_field_and_reason(source: Json, field: str, word: str) -> None:
    with pytest.raises(Invalid) as refusal:
        read_network_policy(source)
    assert refusal.value.field == field
    assert word in refusal.value.message


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({}, ""),
        ([], ""),
        ({"metadata": {}}, "metadata"),
        (document({"podSelector": []}), "spec.podSelector"),
        (document({"podSelectors": {}}), "spec"),
        (port(port=1.5), "spec.ingress[0].ports[0].port"),
        (peer(podselector={}), "spec.ingress[0].from[0]"),
        (document({"ingress": {}}), "spec.ingress"),
        (peer(ipBlock={}), "spec.ingress[0].from[0].ipBlock"),
    ],
)
def test_another_document_is_malformed(source: object, field: str) -> None:
    """An unknown field below spec might narrow a rule: ignoring it would widen the rule."""
    with pytest.raises(Malformed) as refusal:
        read_network_policy(source)
    assert refusal.value.field == field


@pytest.mark.parametrize("seed", range(20))
def test_cve_2025_64715_empty_and_absent_differ_in_the_codec(seed: int) -> None:
    """Empty stays empty and absent stays absent, so nothing becomes *allow all*."""
    rng = Random(seed)
    policies = [value for _ in range(200) if isinstance(value := random_object(rng), NetworkPolicy)]
    assert policies
    for policy in policies:
        assert read_network_policy(msgspec.json.decode(msgspec.json.encode(policy))) == policy


def test_cve_2025_64715_the_codec_keeps_null_empty_and_absent_apart() -> None:
    def written(spec: object) -> object:
        return msgspec.json.decode(msgspec.json.encode(read_network_policy(document(spec)).spec))

    specs: list[dict[str, object]] = [
        {},
        {"ingress": []},
        {"podSelector": {}},
        {"ingress": [{}], "egress": [{"to": []}], "policyTypes": []},
        {"ingress": [{"from": [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": {}}}]}]},
    ]
    for spec in specs:
        assert written(spec) == spec


def test_dry_run_needs_the_exact_annotation_value() -> None:
    assert read_network_policy(document({}, annotations={"weft/mode": "audit"})).audit
    assert not read_network_policy(document({}, annotations={"weft/mode": "Audit"})).audit
    assert not read_network_policy(document({}, annotations=None)).audit
