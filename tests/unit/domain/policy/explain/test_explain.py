"""Explanations: the deciding rule, the rules considered, and the nearest rule that would change the verdict."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from tests.support.cluster_samples import random_cluster, random_flow

from weft.domain.ids import EndpointId, GroupName, NetworkName, PolicyName, TenantName
from weft.domain.model import Endpoint, Group, Policy, Rule
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.model.identities import Host, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.protocols import parse_service

DEFAULT, NET = TenantName("default"), NetworkName("net")


def explained(engine: Engine, source: str, target: str, service: str = "tcp/80") -> Explanation:
    protocol, port = parse_service(service)
    return explain(engine, engine.directory.flow(source, target, protocol=protocol, port=port))


def kubernetes(*policies: object, audit: bool = False) -> Engine:
    engine = Engine(
        [
            Namespace(name="x", labels={"team": "red"}),
            Pod(namespace="x", name="a", labels={"app": "a"}, ips=("10.0.0.1",), node="n1"),
            Pod(namespace="x", name="b", labels={"app": "b"}, ips=("10.0.0.2",), node="n1"),
            Host(node="n1", addresses=("192.0.2.1",)),
        ]
    )
    for number, spec in enumerate(policies):
        metadata = {"name": f"p{number}", "namespace": "x", "annotations": {"weft/mode": "audit" if audit else ""}}
        engine.put(read_network_policy({"metadata": metadata, "spec": spec}))
    return engine


def contiv(*rules: tuple[str, str, int, dict[str, object]], audit: bool = False) -> Engine:
    engine = Engine([Policy(tenant=DEFAULT, name=PolicyName("p"), mode="audit" if audit else "enforce")])
    for number, name in enumerate(("web", "client"), start=1):
        engine.put(
            Endpoint(
                tenant=DEFAULT, network=NET, endpoint_id=EndpointId(name), group=name, ip_address=f"10.0.0.{number}"
            )
        )
        policies = (PolicyName("p"),) if name == "web" else ()
        engine.put(Group(tenant=DEFAULT, name=GroupName(name), network=NET, policies=policies))
    for name, action, priority, members in rules:
        document = {"tenantName": "default", "policyName": "p", "ruleId": name, "direction": "in", "action": action}
        engine.put(msgspec.convert({**document, "priority": priority, **members}, Rule))
    return engine


def test_a_default_deny_has_a_rule_id_and_the_nearest_allow_says_what_does_not_match() -> None:
    engine = kubernetes(
        {
            "podSelector": {"matchLabels": {"app": "b"}},
            "ingress": [{"ports": [{"port": 80}]}, {"ports": [{"port": 443}]}],
        }
    )
    explanation = explained(engine, "x/a", "x/b", "tcp/81")
    assert not explanation.allowed
    assert explanation.decided_by == "k8s/x/p0/ingress/isolation"
    assert [each.rule for each in explanation.ingress.considered] == [
        "k8s/x/p0/ingress/0",
        "k8s/x/p0/ingress/1",
        "k8s/x/p0/ingress/isolation",
    ]
    assert explanation.nearest is not None
    assert explanation.nearest.rule == "k8s/x/p0/ingress/0"
    assert explanation.nearest.misses == ("tcp/81 does not match tcp/80",)
    assert explanation.egress.allowed
    assert explanation.egress.decided_by == "weft/default"


def test_the_nearest_rule_has_the_fewest_obstacles() -> None:
    engine = kubernetes(
        {
            "podSelector": {"matchLabels": {"app": "b"}},
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "z"}}}], "ports": [{"port": 443}]},
                {"from": [{"podSelector": {"matchLabels": {"app": "z"}}}]},
            ],
        }
    )
    explanation = explained(engine, "x/a", "x/b")
    assert explanation.nearest is not None
    assert explanation.nearest.rule == "k8s/x/p0/ingress/1"
    assert explanation.nearest.misses == ("x/a does not match pods [app=z] of namespace x",)


def test_the_nearest_rule_of_an_allowed_flow_is_the_deny_of_lower_precedence() -> None:
    engine = contiv(("all", "deny", 1, {}), ("http", "allow", 9, {"protocol": "tcp", "port": 80}))
    explanation = explained(engine, "default:net:client", "default:net:web")
    assert explanation.allowed
    assert explanation.decided_by == "contiv/default/p/http"
    assert [each.rule for each in explanation.ingress.considered] == ["contiv/default/p/http"]
    assert explanation.nearest is not None
    assert explanation.nearest.rule == "contiv/default/p/all"
    assert explanation.nearest.misses == ("contiv/default/p/http takes precedence",)


def test_an_allow_below_the_deciding_deny_lists_all_obstacles() -> None:
    engine = contiv(("all", "deny", 9, {}), ("http", "allow", 1, {"protocol": "tcp", "port": 443}))
    explanation = explained(engine, "default:net:client", "default:net:web")
    assert explanation.nearest is not None
    assert explanation.nearest.misses == ("tcp/80 does not match tcp/443", "contiv/default/p/all takes precedence")


def test_an_audit_policy_is_reported_and_never_decides() -> None:
    engine = contiv(("all", "deny", 1, {}), audit=True)
    explanation = explained(engine, "default:net:client", "default:net:web")
    assert explanation.allowed
    assert explanation.decided_by == "weft/default"
    assert explanation.ingress.audit is not None
    assert (explanation.ingress.audit.rule, explanation.ingress.audit.action) == ("contiv/default/p/all", "deny")
    assert explanation.nearest is not None
    assert explanation.nearest.misses == ("the rule is in audit mode",)
    assert explanation.ingress.considered[0].audit


def test_a_network_policy_in_audit_mode_isolates_no_pod() -> None:
    explanation = explained(kubernetes({"podSelector": {}}, audit=True), "x/a", "x/b")
    assert explanation.allowed
    assert explanation.ingress.audit is not None
    assert explanation.ingress.audit.rule == "k8s/x/p0/ingress/isolation"


def test_if_both_ends_block_the_rule_of_the_source_is_reported() -> None:
    explanation = explained(kubernetes({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}), "x/a", "x/b")
    assert explanation.decided_by == "k8s/x/p0/egress/isolation"
    assert explanation.nearest is None
    assert not explanation.ingress.allowed


def test_if_both_ends_allow_a_policy_rule_is_reported_before_the_default() -> None:
    engine = kubernetes({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"], "egress": [{}]})
    assert explained(engine, "x/a", "x/b").decided_by == "k8s/x/p0/egress/0"
    assert explained(engine, "x/b", "x/a").decided_by == "weft/default"


def test_built_in_rules_are_reported() -> None:
    engine = kubernetes({"podSelector": {}})
    assert explained(engine, "host:n1", "x/b").decided_by == "weft/own-host"
    engine.put(Pod(namespace="x", name="c", ips=("10.0.0.3",), tenant=TenantName("red")))
    explanation = explained(engine, "x/a", "x/c")
    assert explanation.decided_by == "weft/tenants"
    assert not explanation.ingress.considered


def test_the_text_form() -> None:
    engine = kubernetes({"podSelector": {"matchLabels": {"app": "b"}}, "ingress": [{"ports": [{"port": 80}]}]})
    assert str(explained(engine, "x/a", "x/b", "udp/53")) == (
        "x/a -> x/b udp/53: blocked by k8s/x/p0/ingress/isolation; "
        "nearest to allow it: k8s/x/p0/ingress/0, but udp/53 does not match tcp/80"
    )
    assert str(explained(engine, "x/b", "x/a", "icmp")) == "x/b -> x/a icmp: allowed by weft/default"


def test_an_explanation_encodes_to_json() -> None:
    engine = kubernetes({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "fd00::/8"}}]}]})
    explanation = explained(engine, "x/a", "x/b")
    text = msgspec.json.encode(explanation)
    assert msgspec.json.decode(text, type=Explanation) == explanation
    assert msgspec.json.decode(text)["ingress"]["decidedBy"] == "k8s/x/p0/ingress/isolation"


@pytest.mark.parametrize("seed", range(40))
def test_an_explanation_never_contradicts_the_verdict(seed: int) -> None:
    rng = Random(seed)
    engine = Engine(random_cluster(rng))
    for _ in range(30):
        flow_spec = random_flow(rng, engine)
        if flow_spec is None:
            continue
        flow = engine.directory.flow(
            flow_spec.source,
            flow_spec.target,
            protocol=flow_spec.protocol,
            port=flow_spec.port,
            version=flow_spec.version,
        )
        verdict, explanation = engine.verdict(flow), explain(engine, flow)
        assert explanation.allowed is verdict.allowed
        assert (explanation.egress.decided_by, explanation.ingress.decided_by) == (
            verdict.egress.id,
            verdict.ingress.id,
        )
        assert explanation.decided_by in (verdict.egress.id, verdict.ingress.id)
        for side in (explanation.egress, explanation.ingress):
            if side.nearest is not None:
                assert side.nearest.misses
                assert (side.nearest.action == "allow") is not side.allowed
