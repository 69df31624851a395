"""Explanations: what decided, what was considered, and what would have changed it."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from tests.support.cluster_samples import random_cluster, random_question

from weft.domain.ids import EndpointId, GroupName, NetworkName, PolicyName, TenantName
from weft.domain.model import Endpoint, Group, Policy, Rule
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.model.identities import Host, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.protocols import parse_service

DEFAULT, NET = TenantName("default"), NetworkName("net")


def because(engine: Engine, source: str, target: str, service: str = "tcp/80") -> Explanation:
    protocol, port = parse_service(service)
    return explain(engine, engine.directory.flow(source, target, protocol=protocol, port=port))


def kubernetes(*policies: object, dry_run: bool = False) -> Engine:
    engine = Engine(
        [
            Namespace(name="x", labels={"team": "red"}),
            Pod(namespace="x", name="a", labels={"app": "a"}, ips=("10.0.0.1",), node="n1"),
            Pod(namespace="x", name="b", labels={"app": "b"}, ips=("10.0.0.2",), node="n1"),
            Host(node="n1", addresses=("192.0.2.1",)),
        ]
    )
    for number, spec in enumerate(policies):
        metadata = {"name": f"p{number}", "namespace": "x", "annotations": {"weft/dry-run": "true" if dry_run else ""}}
        engine.put(read_network_policy({"metadata": metadata, "spec": spec}))
    return engine


def contiv(*rules: tuple[str, str, int, dict[str, object]], dry_run: bool = False) -> Engine:
    engine = Engine([Policy(tenant=DEFAULT, name=PolicyName("p"), dry_run=dry_run)])
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


def test_a_default_deny_has_a_name_and_the_nearest_allow_says_what_it_misses() -> None:
    engine = kubernetes(
        {
            "podSelector": {"matchLabels": {"app": "b"}},
            "ingress": [{"ports": [{"port": 80}]}, {"ports": [{"port": 443}]}],
        }
    )
    answer = because(engine, "x/a", "x/b", "tcp/81")
    assert not answer.allowed
    assert answer.decided_by == "k8s/x/p0/ingress/isolation"
    assert [each.rule for each in answer.ingress.considered] == [
        "k8s/x/p0/ingress/0",
        "k8s/x/p0/ingress/1",
        "k8s/x/p0/ingress/isolation",
    ]
    assert answer.nearest is not None
    assert answer.nearest.rule == "k8s/x/p0/ingress/0"
    assert answer.nearest.misses == ("tcp/81 is not tcp/80",)
    assert answer.egress.allowed
    assert answer.egress.decided_by == "weft/default"


def test_the_nearest_rule_is_the_one_that_fewest_things_keep_from_deciding() -> None:
    engine = kubernetes(
        {
            "podSelector": {"matchLabels": {"app": "b"}},
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "z"}}}], "ports": [{"port": 443}]},
                {"from": [{"podSelector": {"matchLabels": {"app": "z"}}}]},
            ],
        }
    )
    answer = because(engine, "x/a", "x/b")
    assert answer.nearest is not None
    assert answer.nearest.rule == "k8s/x/p0/ingress/1"
    assert answer.nearest.misses == ("x/a is not pods [app=z] of namespace x",)


def test_of_an_allowed_flow_the_nearest_is_the_deny_that_was_outranked() -> None:
    engine = contiv(("all", "deny", 1, {}), ("http", "allow", 9, {"protocol": "tcp", "port": 80}))
    answer = because(engine, "default:net:client", "default:net:web")
    assert answer.allowed
    assert answer.decided_by == "contiv/default/p/http"
    assert [each.rule for each in answer.ingress.considered] == ["contiv/default/p/http"]
    assert answer.nearest is not None
    assert answer.nearest.rule == "contiv/default/p/all"
    assert answer.nearest.misses == ("contiv/default/p/http outranks it",)


def test_an_allow_below_the_deny_that_decides_says_both_things_it_lacks() -> None:
    engine = contiv(("all", "deny", 9, {}), ("http", "allow", 1, {"protocol": "tcp", "port": 443}))
    answer = because(engine, "default:net:client", "default:net:web")
    assert answer.nearest is not None
    assert answer.nearest.misses == ("tcp/80 is not tcp/443", "contiv/default/p/all outranks it")


def test_a_dry_run_is_reported_and_never_decides() -> None:
    engine = contiv(("all", "deny", 1, {}), dry_run=True)
    answer = because(engine, "default:net:client", "default:net:web")
    assert answer.allowed
    assert answer.decided_by == "weft/default"
    assert answer.ingress.dry_run is not None
    assert (answer.ingress.dry_run.rule, answer.ingress.dry_run.action) == ("contiv/default/p/all", "deny")
    assert answer.nearest is not None
    assert answer.nearest.misses == ("it is a dry run",)
    assert answer.ingress.considered[0].dry_run


def test_a_network_policy_in_dry_run_isolates_nobody() -> None:
    answer = because(kubernetes({"podSelector": {}}, dry_run=True), "x/a", "x/b")
    assert answer.allowed
    assert answer.ingress.dry_run is not None
    assert answer.ingress.dry_run.rule == "k8s/x/p0/ingress/isolation"


def test_where_both_ends_block_the_source_is_named() -> None:
    answer = because(kubernetes({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}), "x/a", "x/b")
    assert answer.decided_by == "k8s/x/p0/egress/isolation"
    assert answer.nearest is None
    assert not answer.ingress.allowed


def test_of_two_ends_that_allow_the_more_telling_rule_is_named() -> None:
    engine = kubernetes({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"], "egress": [{}]})
    assert because(engine, "x/a", "x/b").decided_by == "k8s/x/p0/egress/0"
    assert because(engine, "x/b", "x/a").decided_by == "weft/default"


def test_rules_of_our_own_are_named_too() -> None:
    engine = kubernetes({"podSelector": {}})
    assert because(engine, "host:n1", "x/b").decided_by == "weft/own-host"
    engine.put(Pod(namespace="x", name="c", ips=("10.0.0.3",), tenant=TenantName("red")))
    answer = because(engine, "x/a", "x/c")
    assert answer.decided_by == "weft/tenants"
    assert not answer.ingress.considered


def test_in_words() -> None:
    engine = kubernetes({"podSelector": {"matchLabels": {"app": "b"}}, "ingress": [{"ports": [{"port": 80}]}]})
    assert str(because(engine, "x/a", "x/b", "udp/53")) == (
        "x/a -> x/b udp/53: blocked by k8s/x/p0/ingress/isolation; "
        "nearest to allow it: k8s/x/p0/ingress/0, but udp/53 is not tcp/80"
    )
    assert str(because(engine, "x/b", "x/a", "icmp")) == "x/b -> x/a icmp: allowed by weft/default"


def test_the_answer_is_ready_for_json() -> None:
    engine = kubernetes({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "fd00::/8"}}]}]})
    answer = because(engine, "x/a", "x/b")
    text = msgspec.json.encode(answer)
    assert msgspec.json.decode(text, type=Explanation) == answer
    assert msgspec.json.decode(text)["ingress"]["decidedBy"] == "k8s/x/p0/ingress/isolation"


@pytest.mark.parametrize("seed", range(40))
def test_an_explanation_never_contradicts_the_verdict(seed: int) -> None:
    rng = Random(seed)
    engine = Engine(random_cluster(rng))
    for _ in range(30):
        question = random_question(rng, engine)
        if question is None:
            continue
        flow = engine.directory.flow(
            question.source, question.target, protocol=question.protocol, port=question.port, version=question.version
        )
        verdict, answer = engine.verdict(flow), explain(engine, flow)
        assert answer.allowed is verdict.allowed
        assert (answer.egress.decided_by, answer.ingress.decided_by) == (verdict.egress.id, verdict.ingress.id)
        assert answer.decided_by in (verdict.egress.id, verdict.ingress.id)
        for side in (answer.egress, answer.ingress):
            if side.nearest is not None:
                assert side.nearest.misses
                assert (side.nearest.action == "allow") is not side.allowed
