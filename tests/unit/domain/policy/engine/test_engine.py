"""The engine against the policy oracle, incremental updates against a rebuilt engine, and its identity directory."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest
from tests.support.cluster_samples import (
    key_of,
    large_cluster,
    random_cluster,
    random_flow,
    random_object,
    remove_object,
)
from tests.support.policy_oracle import FlowSpec, OracleVerdict, PolicyOracle

from weft.domain.addresses import parse_address
from weft.domain.errors import Invalid, NotFound
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.domain.model import Endpoint
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine, PolicyObject
from weft.domain.policy.model.identities import ApiServer, Host, Kind, Namespace, Pod, identity_of_world
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.rules import Action, MemberSet


def engine_verdict(engine: Engine, flow_spec: FlowSpec) -> OracleVerdict:
    flow = engine.directory.flow(
        flow_spec.source,
        flow_spec.target,
        protocol=flow_spec.protocol,
        port=flow_spec.port,
        version=flow_spec.version,
        tenant="",
    )
    verdict = engine.verdict(flow)
    assert verdict.allowed is (verdict.egress.action is Action.ALLOW and verdict.ingress.action is Action.ALLOW)
    return OracleVerdict(egress=verdict.egress.action is Action.ALLOW, ingress=verdict.ingress.action is Action.ALLOW)


def agree(seed: int, flows: int) -> int:
    """Compare engine and oracle on flows of one random cluster; return how many were compared."""
    rng = Random(seed)
    objects = random_cluster(rng)
    engine, oracle = Engine(objects), PolicyOracle(objects)
    compared = 0
    for _ in range(flows):
        flow_spec = random_flow(rng, engine)
        if flow_spec is not None:
            assert engine_verdict(engine, flow_spec) == oracle.verdict(flow_spec), (seed, flow_spec)
            compared += 1
    return compared


def state(engine: Engine) -> tuple[object, ...]:
    """Everything derived from the objects: rule sets, and members of the sets that rules name."""
    sets: set[MemberSet] = {each for policy in engine.policies.values() for each in policy.sets()}
    return (
        dict(engine.workloads),
        {key: engine.rule_set(key) for key in engine.workloads},
        {each: set(engine.members(each)) for each in sets},
        {key: engine.sets_of(key) for key in engine.workloads},
    )


def churn(seed: int, changes: int) -> None:
    """Change a random cluster step by step; after each step the state must equal that of a rebuilt engine."""
    rng = Random(seed)
    objects: dict[Hashable, PolicyObject] = {key_of(value): value for value in random_cluster(rng)}
    engine = Engine(objects.values())
    for _ in range(changes):
        if objects and rng.random() < 0.4:
            value = objects.pop(rng.choice(list(objects)))
            remove_object(engine, value)
        else:
            value = random_object(rng)
            objects[key_of(value)] = value
            engine.put(value)
        shuffled = list(objects.values())
        rng.shuffle(shuffled)
        assert state(engine) == state(Engine(shuffled)), (seed, value)
        if rng.random() < 0.1:
            remove_object(engine, random_object_not_in(rng, objects))
            assert state(engine) == state(Engine(shuffled)), seed


def random_object_not_in(rng: Random, objects: dict[Hashable, PolicyObject]) -> PolicyObject:
    while key_of(value := random_object(rng)) in objects:
        pass
    return value


@pytest.mark.parametrize("seed", range(100))
def test_engine_and_oracle_agree(seed: int) -> None:
    agree(seed, 60)


@pytest.mark.soak
def test_engine_and_oracle_agree_on_100_000_verdicts() -> None:
    compared = seed = 0
    while compared < 100_000:
        seed += 1
        compared += agree(1_000 + seed, 60)


@pytest.mark.parametrize("seed", range(20))
def test_incremental_is_the_same_as_full(seed: int) -> None:
    churn(seed, 25)


@pytest.mark.soak
def test_incremental_is_the_same_as_full_for_long() -> None:
    for seed in range(300):
        churn(1_000 + seed, 60)


@pytest.mark.parametrize("seed", range(20))
def test_affected_names_everything_that_changed(seed: int) -> None:
    rng = Random(seed)
    objects = random_cluster(rng)
    engine = Engine(objects)
    for _ in range(30):
        rules = {key: engine.rule_set(key) for key in engine.workloads}
        sets: set[MemberSet] = {each for policy in engine.policies.values() for each in policy.sets()}
        members = {each: located(engine, each) for each in sets}
        affected = engine.put(random_object(rng))
        for key in engine.workloads:
            if key in rules and engine.rule_set(key) != rules[key]:
                assert key in affected.workloads
        still_named = {each for policy in engine.policies.values() for each in policy.sets()} & sets
        for each in still_named:
            if located(engine, each) != members[each]:
                assert each in affected.sets


def located(engine: Engine, of: MemberSet) -> set[tuple[object, ...]]:
    return {(key, engine.workloads[key].addresses, engine.workloads[key].ports) for key in engine.members(of)}


def test_a_label_change_affects_only_what_depends_on_it() -> None:
    engine = Engine(large_cluster(Random(1), pods=200, namespaces=20, policies=60))
    pod = Pod(namespace="ns-3", name="pod-3", labels={"app": "app-1"}, ips=("10.0.0.3",))
    engine.put(pod)
    affected = engine.put(Pod(namespace="ns-3", name="pod-3", labels={"app": "app-1", "note": "7"}, ips=("10.0.0.3",)))
    assert not affected.workloads
    assert not affected.sets
    affected = engine.put(Pod(namespace="ns-3", name="pod-3", labels={"app": "app-2"}, ips=("10.0.0.3",)))
    assert affected.workloads <= {"ns-3/pod-3"}


def test_a_copy_is_independent() -> None:
    rng = Random(7)
    engine = Engine(random_cluster(rng))
    before = state(engine)
    twin = engine.copy()
    assert state(twin) == before
    for _ in range(40):
        twin.put(random_object(rng))
    assert state(engine) == before


def test_the_order_of_objects_does_not_matter() -> None:
    objects = random_cluster(Random(3))
    assert state(Engine(objects)) == state(Engine(reversed(objects)))


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


def test_an_identity_without_rules_is_not_isolated() -> None:
    world = identity_of_world(parse_address("192.0.2.1", field="f"))
    verdict = Engine().verdict(Flow(source=world, target=world, protocol=6, port=80))
    assert verdict.allowed
    assert verdict.egress.id == verdict.ingress.id == "weft/default"


def endpoint(tenant: str) -> Endpoint:
    return Endpoint(
        tenant=TenantName(tenant), network=NetworkName("net"), endpoint_id=EndpointId("e"), ip_address="10.1.1.1"
    )


@pytest.fixture
def engine() -> Engine:
    return Engine(
        [
            endpoint("default"),
            endpoint("red"),
            Pod(namespace="x", name="a", ips=("10.9.0.1", "fd00::1")),
            Pod(namespace="x", name="six", ips=("fd00::6",)),
            Pod(namespace="x", name="pending"),
            Host(node="n1", addresses=("192.0.2.1", "192.0.2.11")),
            ApiServer(addresses=("192.0.2.2",)),
        ]
    )


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("x/a", "x/a", Kind.WORKLOAD),
        ("10.9.0.1", "x/a", Kind.WORKLOAD),
        ("fd00:0::1", "x/a", Kind.WORKLOAD),
        ("default:net:e", "default:net:e", Kind.WORKLOAD),
        ("10.1.1.1", "default:net:e", Kind.WORKLOAD),
        ("host:n1", "host:n1", Kind.HOST),
        ("192.0.2.11", "host:n1", Kind.HOST),
        ("apiserver", "apiserver", Kind.API_SERVER),
        ("192.0.2.2", "apiserver", Kind.API_SERVER),
        ("203.0.113.1", "203.0.113.1", Kind.WORLD),
    ],
)
def test_ends(engine: Engine, name: str, key: str, kind: Kind) -> None:
    end = engine.directory.flow(name, name, protocol=6, port=1).source
    assert (end.key, end.kind) == (key, kind)


def test_an_address_resolves_in_the_tenant_of_the_other_end(engine: Engine) -> None:
    assert engine.directory.flow("red:net:e", "10.1.1.1", protocol=1).target.key == "red:net:e"
    assert engine.directory.flow("10.1.1.1", "default:net:e", protocol=1).source.key == "default:net:e"
    assert engine.directory.flow("10.1.1.1", "10.1.1.1", protocol=1, tenant="red").source.key == "red:net:e"
    assert engine.directory.flow("10.1.1.1", "10.1.1.1", protocol=1, tenant="none").source.kind is Kind.WORLD


def test_a_host_uses_the_requested_address(engine: Engine) -> None:
    assert [str(each) for each in engine.directory.flow("192.0.2.11", "x/a", protocol=1).source.addresses] == [
        "192.0.2.11"
    ]


@pytest.mark.parametrize("name", ["x/absent", "host:n9", "10.1.1", "fe80::1%eth0", "", "a" * 5000])
def test_an_unknown_end_is_not_found(engine: Engine, name: str) -> None:
    with pytest.raises(NotFound):
        engine.directory.flow(name, "x/a", protocol=6, port=1)


def test_the_flow_uses_a_version_that_both_ends_have(engine: Engine) -> None:
    assert engine.directory.flow("x/a", "x/a", protocol=6, port=1).version == 4
    assert engine.directory.flow("x/a", "x/a", protocol=6, port=1, version=6).version == 6
    assert engine.directory.flow("x/a", "x/six", protocol=6, port=1).version == 6
    assert engine.directory.flow("x/pending", "x/six", protocol=6, port=1).version == 6
    assert engine.directory.flow("x/pending", "x/pending", protocol=6, port=1).version == 4
    for source, version in (("default:net:e", None), ("x/a", 4)):
        with pytest.raises(Invalid):
            engine.directory.flow(source, "x/six", protocol=6, port=1, version=version)


def test_icmp_follows_the_version(engine: Engine) -> None:
    assert engine.directory.flow("x/a", "x/a", protocol=1, version=6).protocol == 58
    assert engine.directory.flow("x/a", "x/a", protocol=58, version=4).protocol == 1


def test_a_reused_address_belongs_to_its_new_workload(engine: Engine) -> None:
    engine.remove_pod("x", "a")
    assert engine.directory.flow("10.9.0.1", "10.9.0.1", protocol=1).source.kind is Kind.WORLD
    engine.put(Pod(namespace="x", name="b", ips=("10.9.0.1",)))
    assert engine.directory.flow("10.9.0.1", "10.9.0.1", protocol=1).source.key == "x/b"
    engine.remove_host("n1")
    engine.remove_api_server()
    for address in ("192.0.2.1", "192.0.2.2"):
        assert engine.directory.flow(address, "x/b", protocol=1).source.kind is Kind.WORLD
