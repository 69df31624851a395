"""The policy map against the engine: a datapath lookup returns the engine's verdict, whatever the history."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from random import Random

import msgspec
import pytest
from tests.support.cluster_samples import key_of, random_cluster, random_object, remove_object
from tests.support.paths import ORACLES

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.decide import Flow, Miss, builtin_rule_for, decide, matches, misses
from weft.domain.policy.engine.engine import Engine, PolicyObject
from weft.domain.policy.model.identities import Identity, Kind
from weft.domain.policy.model.rules import DEFAULT_ALLOW_ID, OWN_HOST_ID, Action, Direction
from weft.domain.policy.policymap.l4_partition import Verdict
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import WORKLOAD, PolicyEntry, PolicyItem, VerdictCounter
from weft.domain.policy.policymap.stable_ids import StableIds
from weft.lab.verify.verdict_table import read_cases, walk

TABLE = ORACLES / "netpol-cases.json.gz"
DEFAULT, NODE = TenantName("default"), NodeName("n1")
SERVICES = [(6, 80), (6, 81), (6, 443), (6, 8080), (6, 65535), (6, 7), (6, 0), (17, 80), (17, 5), (132, 443), (47, 0)]
OTHERS = ["192.0.2.7", "203.0.113.9", "10.1.0.250", "10.1.0.17", "2001:db8::7", "fd01::ffff", "192.0.2.1", "192.0.2.2"]
SUBNETS = [Range(4, 0x0A010000, 0x0A0100FF), Range(6, 0xFD01 << 112, (0xFD01 << 112) + (1 << 64) - 1)]
GATEWAYS = [Address(4, 0x0A010001)]


def map_of(engine: Engine, node: NodeName = NODE) -> PolicyMap:
    policy_map = PolicyMap(engine, tenant=DEFAULT, node=node)
    policy_map.set_tenant_subnets(SUBNETS, GATEWAYS)
    return policy_map


def end(engine: Engine, address: Address) -> Identity:
    """The identity of an address, with this address alone, as in a packet."""
    return msgspec.structs.replace(engine.directory.at(address, tenant=DEFAULT), addresses=(address,))


def expected(engine: Engine, flow: Flow, direction: Direction) -> Verdict:
    """The engine's verdict, and the one it would return with audit rules enforced."""
    deciding_rule = engine.deciding_rule(flow, direction)
    audit_deny = None
    local = flow.ends(direction)[0]
    rules = [
        rule
        for rule in engine.rule_set(local.key).of(direction)
        if Miss.LOCAL not in misses(rule, flow, engine.is_member)
    ]
    if deciding_rule.id == OWN_HOST_ID and not rules:
        return Verdict(DEFAULT_ALLOW_ID, Action.ALLOW, direction)  # without rules there is no entry for the own host
    if deciding_rule.action is Action.ALLOW and not builtin_rule_for(flow, direction):
        enforced = decide(rules, lambda rule: matches(rule, flow, engine.is_member), direction=direction)
        audit_deny = enforced.id if enforced.action is Action.DENY else None
    return Verdict(deciding_rule.id, deciding_rule.action, direction, audit_deny)


def addresses_of(engine: Engine) -> list[Address]:
    known = {address for each in engine.workloads.values() if each.tenant == DEFAULT for address in each.addresses}
    return sorted(known | {parse_address(text, field="") for text in OTHERS})


def check(engine: Engine, policy_map: PolicyMap, rng: Random, flows: int) -> None:
    """Compare engine and policy map on random flows."""
    addresses = addresses_of(engine)
    for _ in range(flows):
        source = rng.choice(addresses)
        target = rng.choice([address for address in addresses if address.family == source.family])
        protocol, port = rng.choice([*SERVICES, (1 if source.family == 4 else 58, 0)])
        ends = end(engine, source), end(engine, target)
        if ends[0].kind is Kind.HOST and (ends[0].node == ends[1].node) != (ends[0].node == NODE):
            continue  # only a host's own node has the entry that allows it
        if all(each.kind is Kind.WORKLOAD and each.node != NODE for each in ends):
            continue  # such packets never pass this node
        flow = Flow(source=ends[0], target=ends[1], protocol=protocol, port=port, version=source.family)
        wanted = expected(engine, flow, Direction.EGRESS), expected(engine, flow, Direction.INGRESS)
        assert policy_map.lookup(source, target, protocol=protocol, port=port) == wanted, str(flow)


def churn(seed: int, *, changes: int, flows: int) -> None:
    """Change a random cluster step by step; after each step the map is right, and equals a newly built one."""
    rng = Random(seed)
    objects: dict[Hashable, PolicyObject] = {key_of(value): value for value in random_cluster(rng)}
    engine = Engine(objects.values())
    policy_map = map_of(engine)
    applied: set[PolicyItem] = set()
    for _ in range(changes):
        delta = policy_map.refresh()
        assert applied.issuperset(delta.drop)
        applied.difference_update(delta.drop)
        assert applied.isdisjoint(delta.put)
        applied.update(delta.put)
        assert applied == policy_map.state_items
        shuffled = list(objects.values())
        rng.shuffle(shuffled)
        fresh = map_of(Engine(shuffled))
        fresh.refresh()
        assert policy_map.state_items == fresh.state_items, seed
        check(engine, policy_map, rng, flows)
        for _ in range(rng.choice([1, 1, 1, 5])):
            if objects and rng.random() < 0.4:
                policy_map.note(remove_object(engine, objects.pop(rng.choice(list(objects)))))
            else:
                value = random_object(rng)
                objects[key_of(value)] = value
                policy_map.note(engine.put(value))


@pytest.mark.parametrize("seed", range(30))
def test_the_policy_map_agrees_with_the_engine_whatever_the_history(seed: int) -> None:
    churn(seed, changes=15, flows=150)


@pytest.mark.parametrize("seed", range(100, 108))
def test_colliding_ids_change_no_verdict(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy_map", "policy_entries"):
        monkeypatch.setattr(f"weft.domain.policy.policymap.{module}.StableIds", partial(StableIds, bits=9))
    churn(seed, changes=15, flows=150)


@pytest.mark.soak
def test_the_policy_map_agrees_with_the_engine_for_long() -> None:
    for seed in range(1_000, 1_200):
        churn(seed, changes=40, flows=300)


@pytest.mark.parametrize("seed", range(10))
def test_every_verdict_id_of_an_entry_has_a_counter_and_a_verdict(seed: int) -> None:
    policy_map = map_of(Engine(random_cluster(Random(seed))))
    policy_map.refresh()
    verdicts = {item.verdict_id for item in policy_map.state_items if isinstance(item, PolicyEntry)}
    assert verdicts == {item.verdict_id for item in policy_map.state_items if isinstance(item, VerdictCounter)}
    assert verdicts <= policy_map.verdicts.keys()


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_receive_objects_in_another_order_have_the_same_ids(seed: int) -> None:
    objects = random_cluster(Random(seed))
    one, other = map_of(Engine(objects), NodeName("n1")), map_of(Engine(reversed(objects)), NodeName("n2"))
    put, other_put = one.refresh().put, other.refresh().put
    assert shared(one, put) == shared(other, other_put)


def shared(policy_map: PolicyMap, items: tuple[PolicyItem, ...]) -> list[PolicyItem]:
    """The items, in their order, without entries for the own host and for pairs of workloads."""
    own = {verdict_id for verdict_id, verdict in policy_map.verdicts.items() if verdict.rule == OWN_HOST_ID}
    return [
        item
        for item in items
        if not (isinstance(item, PolicyEntry) and (item.verdict_id in own or (item.remote or 0) & WORKLOAD))
        and not isinstance(item, VerdictCounter)
    ]


def test_many_changes_and_one_refresh_are_the_same_as_a_refresh_after_each() -> None:
    rng = Random(5)
    objects = random_cluster(rng)
    often, once = Engine(), Engine()
    maps = map_of(often), map_of(once)
    for value in objects:
        maps[0].note(often.put(value))
        maps[0].refresh()
        maps[1].note(once.put(value))
    maps[0].refresh()
    assert set(maps[1].refresh().put) == maps[0].state_items
    assert not maps[0].refresh()
    assert not maps[1].refresh()


@pytest.mark.skipif(not TABLE.exists(), reason="the oracle table is kept outside the repository")
def test_the_oracle_table_of_network_policy() -> None:
    """Rows of the oracle table, looked up by address as packets are."""
    checked = 0
    for moment in (moment for case in read_cases(TABLE) for moment in walk(case, lambda _: NODE)):
        policy_map = PolicyMap(moment.engine, tenant=DEFAULT, node=NODE)
        policy_map.refresh()
        for row in moment.rows:
            flow = moment.flow(row)
            source, target = flow.source.addresses[0], flow.target.addresses[0]
            verdicts = policy_map.lookup(source, target, protocol=flow.protocol, port=flow.port)
            words = ["allowed" if verdict.action is Action.ALLOW else "blocked" for verdict in verdicts]
            assert words == [row.egress, row.ingress], (moment.name, row)
            checked += 1
    assert checked > 40_000
