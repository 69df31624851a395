"""The engine against its judges: the second evaluator, and itself computed anew."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest
from tests.support.cluster_samples import (
    key_of,
    large_cluster,
    random_cluster,
    random_fact,
    random_question,
    remove_fact,
)
from tests.support.policy_oracle import Answer, Judge, Question

from weft.domain.addresses import parse_address
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.facts import Fact
from weft.domain.policy.model.identities import Namespace, Pod, identity_of_world
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.rules import Action, MemberSet


def ask(engine: Engine, question: Question) -> Answer:
    flow = engine.directory.flow(
        question.source,
        question.target,
        protocol=question.protocol,
        port=question.port,
        version=question.version,
        tenant="",
    )
    verdict = engine.verdict(flow)
    assert verdict.allowed is (verdict.egress.action is Action.ALLOW and verdict.ingress.action is Action.ALLOW)
    return Answer(egress=verdict.egress.action is Action.ALLOW, ingress=verdict.ingress.action is Action.ALLOW)


def agree(seed: int, questions: int) -> int:
    """Ask engine and judge the same questions about one random cluster; gives how many there were."""
    rng = Random(seed)
    facts = random_cluster(rng)
    engine, judge = Engine(facts), Judge(facts)
    asked = 0
    for _ in range(questions):
        question = random_question(rng, engine)
        if question is not None:
            assert ask(engine, question) == judge.answer(question), (seed, question)
            asked += 1
    return asked


def state(engine: Engine) -> tuple[object, ...]:
    """Everything that follows from the facts: rule sets, and members of the sets that rules name."""
    sets: set[MemberSet] = {each for unit in engine.units.values() for each in unit.sets()}
    return (
        dict(engine.workloads),
        {key: engine.rule_set(key) for key in engine.workloads},
        {each: set(engine.members(each)) for each in sets},
        {key: engine.sets_of(key) for key in engine.workloads},
    )


def churn(seed: int, changes: int) -> None:
    """Change a random cluster step by step; after each step all must be as if it were computed anew."""
    rng = Random(seed)
    facts: dict[Hashable, Fact] = {key_of(fact): fact for fact in random_cluster(rng)}
    engine = Engine(facts.values())
    for _ in range(changes):
        if facts and rng.random() < 0.4:
            fact = facts.pop(rng.choice(list(facts)))
            remove_fact(engine, fact)
        else:
            fact = random_fact(rng)
            facts[key_of(fact)] = fact
            engine.put(fact)
        anew = list(facts.values())
        rng.shuffle(anew)
        assert state(engine) == state(Engine(anew)), (seed, fact)
        if rng.random() < 0.1:
            remove_fact(engine, random_fact_that_is_not_in(rng, facts))
            assert state(engine) == state(Engine(anew)), seed


def random_fact_that_is_not_in(rng: Random, facts: dict[Hashable, Fact]) -> Fact:
    while key_of(fact := random_fact(rng)) in facts:
        pass
    return fact


@pytest.mark.parametrize("seed", range(100))
def test_engine_and_judge_agree(seed: int) -> None:
    agree(seed, 60)


@pytest.mark.soak
def test_engine_and_judge_agree_on_100_000_verdicts() -> None:
    asked = seed = 0
    while asked < 100_000:
        seed += 1
        asked += agree(1_000 + seed, 60)


@pytest.mark.parametrize("seed", range(20))
def test_incremental_is_the_same_as_full(seed: int) -> None:
    churn(seed, 25)


@pytest.mark.soak
def test_incremental_is_the_same_as_full_for_long() -> None:
    for seed in range(300):
        churn(1_000 + seed, 60)


@pytest.mark.parametrize("seed", range(20))
def test_touched_names_everything_that_changed(seed: int) -> None:
    rng = Random(seed)
    facts = random_cluster(rng)
    engine = Engine(facts)
    for _ in range(30):
        rules = {key: engine.rule_set(key) for key in engine.workloads}
        sets: set[MemberSet] = {each for unit in engine.units.values() for each in unit.sets()}
        members = {each: located(engine, each) for each in sets}
        touched = engine.put(random_fact(rng))
        for key in engine.workloads:
            if key in rules and engine.rule_set(key) != rules[key]:
                assert key in touched.workloads
        still_named = {each for unit in engine.units.values() for each in unit.sets()} & sets
        for each in still_named:
            if located(engine, each) != members[each]:
                assert each in touched.sets


def located(engine: Engine, of: MemberSet) -> set[tuple[object, ...]]:
    return {(key, engine.workloads[key].addresses, engine.workloads[key].ports) for key in engine.members(of)}


def test_a_label_change_touches_only_what_depends_on_it() -> None:
    engine = Engine(large_cluster(Random(1), pods=200, namespaces=20, policies=60))
    pod = Pod(namespace="ns-3", name="pod-3", labels={"app": "app-1"}, ips=("10.0.0.3",))
    engine.put(pod)
    touched = engine.put(Pod(namespace="ns-3", name="pod-3", labels={"app": "app-1", "note": "7"}, ips=("10.0.0.3",)))
    assert not touched.workloads
    assert not touched.sets
    touched = engine.put(Pod(namespace="ns-3", name="pod-3", labels={"app": "app-2"}, ips=("10.0.0.3",)))
    assert touched.workloads <= {"ns-3/pod-3"}


def test_a_copy_changes_alone() -> None:
    rng = Random(7)
    engine = Engine(random_cluster(rng))
    before = state(engine)
    twin = engine.copy()
    assert state(twin) == before
    for _ in range(40):
        twin.put(random_fact(rng))
    assert state(engine) == before


def test_the_order_of_facts_does_not_matter() -> None:
    facts = random_cluster(Random(3))
    assert state(Engine(facts)) == state(Engine(reversed(facts)))


def test_a_pod_that_moved_out_of_a_set_is_no_longer_allowed() -> None:
    policy = {
        "metadata": {"name": "p", "namespace": "x"},
        "spec": {"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "client"}}}]}]},
    }
    engine = Engine([Namespace(name="x"), Pod(namespace="x", name="server", ips=("10.0.0.1",))])
    engine.put(Pod(namespace="x", name="client", ips=("10.0.0.2",), labels={"role": "client"}))
    engine.put(read_network_policy(policy))
    flow = engine.directory.flow("x/client", "x/server", protocol=6, port=80)
    assert engine.verdict(flow).allowed
    engine.put(Pod(namespace="x", name="client", ips=("10.0.0.2",), labels={"role": "guest"}))
    assert not engine.verdict(engine.directory.flow("x/client", "x/server", protocol=6, port=80)).allowed


def test_an_end_without_rules_is_open() -> None:
    world = identity_of_world(parse_address("192.0.2.1", field="f"))
    verdict = Engine().verdict(Flow(source=world, target=world, protocol=6, port=80))
    assert verdict.allowed
    assert verdict.egress.id == verdict.ingress.id == "weft/default"
