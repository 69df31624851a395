"""The tables against the engine: what a datapath reads from the parts is the engine's verdict, whatever the history."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from random import Random

import msgspec
import pytest
from tests.support.cluster_samples import key_of, random_cluster, random_fact, remove_fact
from tests.support.paths import ORACLES

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.decide import Flow, Miss, decide, first_word, matches, misses
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.facts import Fact
from weft.domain.policy.model.identities import Identity, Kind
from weft.domain.policy.model.rules import DEFAULT_ALLOW_ID, OWN_HOST_ID, Action, Direction
from weft.domain.policy.policymap.l4_partition import Outcome
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import WORKLOAD, PolicyEntry, PolicyPart, VerdictCounter
from weft.domain.policy.policymap.stable_ids import StableIds
from weft.lab.verify.oracle_table import read_cases, walk

TABLE = ORACLES / "netpol-cases.json.gz"
DEFAULT, NODE = TenantName("default"), NodeName("n1")
SERVICES = [(6, 80), (6, 81), (6, 443), (6, 8080), (6, 65535), (6, 7), (6, 0), (17, 80), (17, 5), (132, 443), (47, 0)]
OTHERS = ["192.0.2.7", "203.0.113.9", "10.1.0.250", "10.1.0.17", "2001:db8::7", "fd01::ffff", "192.0.2.1", "192.0.2.2"]
SUBNETS = [Range(4, 0x0A010000, 0x0A0100FF), Range(6, 0xFD01 << 112, (0xFD01 << 112) + (1 << 64) - 1)]
GATEWAYS = [Address(4, 0x0A010001)]


def tables_of(engine: Engine, node: NodeName = NODE) -> PolicyMap:
    tables = PolicyMap(engine, tenant=DEFAULT, node=node)
    tables.set_ground(SUBNETS, GATEWAYS)
    return tables


def end(engine: Engine, address: Address) -> Identity:
    """Who has an address, with this address alone, as a packet shows it."""
    return msgspec.structs.replace(engine.directory.at(address, tenant=DEFAULT), addresses=(address,))


def expected(engine: Engine, flow: Flow, direction: Direction) -> Outcome:
    """The engine's word, and what it would be with dry runs in force."""
    deciding = engine.deciding(flow, direction)
    would = None
    local = flow.ends(direction)[0]
    rules = [
        rule
        for rule in engine.rule_set(local.key).of(direction)
        if Miss.LOCAL not in misses(rule, flow, engine.is_member)
    ]
    if deciding.id == OWN_HOST_ID and not rules:
        return Outcome(DEFAULT_ALLOW_ID, Action.ALLOW, direction)  # who has no rules needs none for its host
    if deciding.action is Action.ALLOW and not first_word(flow, direction):
        enforced = decide(rules, lambda rule: matches(rule, flow, engine.is_member), direction=direction)
        would = enforced.id if enforced.action is Action.DENY else None
    return Outcome(deciding.id, deciding.action, direction, would)


def addresses_of(engine: Engine) -> list[Address]:
    known = {address for each in engine.workloads.values() if each.tenant == DEFAULT for address in each.addresses}
    return sorted(known | {parse_address(text, field="") for text in OTHERS})


def check(engine: Engine, tables: PolicyMap, rng: Random, questions: int) -> None:
    """Ask engine and tables the same questions."""
    addresses = addresses_of(engine)
    for _ in range(questions):
        source = rng.choice(addresses)
        target = rng.choice([address for address in addresses if address.family == source.family])
        protocol, port = rng.choice([*SERVICES, (1 if source.family == 4 else 58, 0)])
        ends = end(engine, source), end(engine, target)
        if ends[0].kind is Kind.HOST and (ends[0].node == ends[1].node) != (ends[0].node == NODE):
            continue  # a host's own workloads are judged by the tables of its own node
        if all(each.kind is Kind.WORKLOAD and each.node != NODE for each in ends):
            continue  # they do not meet here
        flow = Flow(source=ends[0], target=ends[1], protocol=protocol, port=port, version=source.family)
        wanted = expected(engine, flow, Direction.EGRESS), expected(engine, flow, Direction.INGRESS)
        assert tables.lookup(source, target, protocol=protocol, port=port) == wanted, str(flow)


def churn(seed: int, *, changes: int, questions: int) -> None:
    """Change a random cluster step by step; after each step the tables are right, and as if they were made anew."""
    rng = Random(seed)
    facts: dict[Hashable, Fact] = {key_of(fact): fact for fact in random_cluster(rng)}
    engine = Engine(facts.values())
    tables = tables_of(engine)
    carried_out: set[PolicyPart] = set()
    for _ in range(changes):
        difference = tables.refresh()
        assert carried_out.issuperset(difference.drop)
        carried_out.difference_update(difference.drop)
        assert carried_out.isdisjoint(difference.put)
        carried_out.update(difference.put)
        assert carried_out == tables.parts
        anew = list(facts.values())
        rng.shuffle(anew)
        fresh = tables_of(Engine(anew))
        fresh.refresh()
        assert tables.parts == fresh.parts, seed
        check(engine, tables, rng, questions)
        for _ in range(rng.choice([1, 1, 1, 5])):
            if facts and rng.random() < 0.4:
                tables.note(remove_fact(engine, facts.pop(rng.choice(list(facts)))))
            else:
                fact = random_fact(rng)
                facts[key_of(fact)] = fact
                tables.note(engine.put(fact))


@pytest.mark.parametrize("seed", range(30))
def test_the_tables_say_what_the_engine_says_whatever_the_history(seed: int) -> None:
    churn(seed, changes=15, questions=150)


@pytest.mark.parametrize("seed", range(100, 108))
def test_numbers_that_collide_change_no_answer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy_map", "verdict_ids"):
        monkeypatch.setattr(f"weft.domain.policy.policymap.{module}.StableIds", partial(StableIds, bits=9))
    churn(seed, changes=15, questions=150)


@pytest.mark.soak
def test_the_tables_say_what_the_engine_says_for_long() -> None:
    for seed in range(1_000, 1_200):
        churn(seed, changes=40, questions=300)


@pytest.mark.parametrize("seed", range(10))
def test_every_outcome_of_a_row_has_a_tally_and_a_name(seed: int) -> None:
    tables = tables_of(Engine(random_cluster(Random(seed))))
    tables.refresh()
    outcomes = {part.outcome for part in tables.parts if isinstance(part, PolicyEntry)}
    assert outcomes == {part.outcome for part in tables.parts if isinstance(part, VerdictCounter)}
    assert outcomes <= tables.outcomes.keys()


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_heard_the_same_in_another_order_have_the_same_numbers(seed: int) -> None:
    facts = random_cluster(Random(seed))
    one, other = tables_of(Engine(facts), NodeName("n1")), tables_of(Engine(reversed(facts)), NodeName("n2"))
    put, put_there = one.refresh().put, other.refresh().put
    assert shared(one, put) == shared(other, put_there)


def shared(tables: PolicyMap, parts: tuple[PolicyPart, ...]) -> list[PolicyPart]:
    """The parts, in their order, without those about the node's own host and about pairs of workloads."""
    own = {number for number, outcome in tables.outcomes.items() if outcome.rule == OWN_HOST_ID}
    return [
        part
        for part in parts
        if not (isinstance(part, PolicyEntry) and (part.outcome in own or (part.remote or 0) & WORKLOAD))
        and not isinstance(part, VerdictCounter)
    ]


def test_many_changes_and_one_refresh_are_the_same_as_a_refresh_after_each() -> None:
    rng = Random(5)
    facts = random_cluster(rng)
    often, once = Engine(), Engine()
    tables = tables_of(often), tables_of(once)
    for fact in facts:
        tables[0].note(often.put(fact))
        tables[0].refresh()
        tables[1].note(once.put(fact))
    tables[0].refresh()
    assert set(tables[1].refresh().put) == tables[0].parts
    assert not tables[0].refresh()
    assert not tables[1].refresh()


@pytest.mark.skipif(not TABLE.exists(), reason="the table of right answers is kept beside the project, not in it")
def test_the_right_answers_for_network_policy() -> None:
    """Rows of the oracle, asked by address as packets are."""
    asked = 0
    for moment in (moment for case in read_cases(TABLE) for moment in walk(case, lambda _: NODE)):
        tables = PolicyMap(moment.engine, tenant=DEFAULT, node=NODE)
        tables.refresh()
        for row in moment.rows:
            flow = moment.flow(row)
            source, target = flow.source.addresses[0], flow.target.addresses[0]
            outcomes = tables.lookup(source, target, protocol=flow.protocol, port=flow.port)
            words = ["allowed" if outcome.action is Action.ALLOW else "blocked" for outcome in outcomes]
            assert words == [row.egress, row.ingress], (moment.name, row)
            asked += 1
    assert asked > 40_000
