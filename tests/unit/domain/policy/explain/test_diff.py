"""The policy diff, compared with evaluating every flow."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network
from random import Random

import pytest
from tests.support.cluster_samples import random_cluster, random_object, remove_object

from weft.domain.ids import EndpointId, GroupName, NetworkName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, Policy, Rule
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.diff import FlowChange, diff
from weft.domain.policy.explain.header_space import portless_protocols
from weft.domain.policy.model.identities import IdentityKey, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.protocols import protocol_name

DEFAULT, NET = TenantName("default"), NetworkName("net")
SERVICES = [(6, 80), (6, 81), (6, 8080), (6, 65535), (6, 7), (17, 80), (132, 443), (1, 0), (47, 0), (99, 0)]
WORLD = ["192.0.2.7", "10.1.0.250", "8.8.8.8", "2001:db8::7", "fd01::ffff"]


def covers(change: FlowChange, engine: Engine, end: str, names: tuple[str, ...]) -> bool:
    """Whether the names of a change include this end."""
    workload = engine.workloads.get(IdentityKey(end))
    if workload is None:
        return any(in_world(end, name.removeprefix("world ")) for name in names if name.startswith("world "))
    collective = f"group {workload.group_key}" if workload.group else f"namespace {workload.namespace}"
    return end in names or collective in names


def in_world(address: str, text: str) -> bool:
    first, dash, last = text.partition("-")
    if not dash:
        return ip_address(address) in ip_network(text)
    number, low, high = ip_address(address), ip_address(first), ip_address(last)
    return number.version == low.version and int(low) <= int(number) <= int(high)


def has_service(change: FlowChange, protocol: int, port: int, named: frozenset[int]) -> bool:
    """Whether the services of a change include this one; `named` are the portless protocols in rules."""
    name = "icmp" if protocol in (1, 58) else protocol_name(protocol)
    for service in change.services:
        words, _, ports = service.partition("/")
        if words == name and not ports:
            return True
        if words == name:
            first, _, last = ports.partition("-")
            if int(first) <= port <= int(last or first):
                return True
    return "other protocols" in change.services and protocol in {47, 99} - named


def check(before: Engine, after: Engine) -> None:
    """The diff contains a flow exactly if its verdict differs, with the new verdict."""
    changes = diff(before, after)
    named = portless_protocols(
        rule for engine in (before, after) for unit in engine.policies.values() for rule in unit.rules
    )
    ends = [*(before.workloads.keys() & after.workloads.keys()), *WORLD]
    for source in ends:
        for target in ends:
            if source in WORLD and target in WORLD:
                continue
            for version in (4, 6):
                for protocol, port in SERVICES:
                    verdicts = [verdict(engine, source, target, protocol, port, version) for engine in (before, after)]
                    if None in verdicts:
                        continue
                    found = [
                        change
                        for change in changes
                        if version in change.versions
                        and covers(change, after, source, change.sources)
                        and covers(change, after, target, change.targets)
                        and has_service(change, protocol, port, named)
                    ]
                    assert [change.allowed for change in found] == (
                        [verdicts[1]] if verdicts[0] != verdicts[1] else []
                    ), (source, target, protocol, port, version)


def verdict(engine: Engine, source: str, target: str, protocol: int, port: int, version: int) -> bool | None:
    for end in (source, target):
        workload = engine.workloads.get(IdentityKey(end))
        versions = {each.family for each in workload.addresses} if workload else {ip_address(end).version}
        if version not in versions:
            return None
    flow = engine.directory.flow(source, target, protocol=protocol, port=port, version=version, tenant="")
    return engine.verdict(flow).allowed


def random_change(rng: Random, engine: Engine) -> None:
    value = random_object(rng)
    if rng.random() < 0.3:
        remove_object(engine, value)
    else:
        engine.put(value)


@pytest.mark.parametrize("seed", range(12))
def test_the_diff_is_exact(seed: int) -> None:
    rng = Random(seed)
    before = Engine(random_cluster(rng))
    after = before.copy()
    for _ in range(rng.randint(1, 3)):
        random_change(rng, after)
    check(before, after)


@pytest.mark.soak
def test_the_diff_is_exact_for_long() -> None:
    for seed in range(1_000, 1_300):
        rng = Random(seed)
        before = Engine(random_cluster(rng))
        after = before.copy()
        for _ in range(rng.randint(1, 4)):
            random_change(rng, after)
        check(before, after)


@pytest.mark.parametrize("seed", range(5))
def test_no_change_gives_an_empty_diff(seed: int) -> None:
    engine = Engine(random_cluster(Random(seed)))
    assert diff(engine, engine.copy()) == ()


@pytest.fixture
def engine_with_groups() -> Engine:
    """Contiv's groups web (two endpoints) and client (one)."""
    engine = Engine([Policy(tenant=DEFAULT, name=PolicyName("p"))])
    for number, (name, group) in enumerate((("w1", "web"), ("w2", "web"), ("c1", "client")), start=1):
        policies = (PolicyName("p"),) if group == "web" else ()
        engine.put(Group(tenant=DEFAULT, name=GroupName(group), network=NET, policies=policies))
        engine.put(
            Endpoint(
                tenant=DEFAULT, network=NET, endpoint_id=EndpointId(name), group=group, ip_address=f"10.0.0.{number}"
            )
        )
    return engine


def deny(**members: str) -> Rule:
    make: Callable[..., Rule] = Rule
    return make(tenant=DEFAULT, policy=PolicyName("p"), rule_id=RuleId("1"), direction="in", action="deny", **members)


def test_ends_are_named_by_group(engine_with_groups: Engine) -> None:
    after = engine_with_groups.copy()
    after.put(deny(protocol="tcp", from_endpoint_group="client"))
    assert diff(engine_with_groups, after) == (
        FlowChange(
            allowed=False,
            sources=("group default:client",),
            targets=("group default:web",),
            services=("tcp",),
            versions=(4,),
            decided_by=after.rule_set(IdentityKey("default:net:w1")).ingress[0].id,
        ),
    )
    (back,) = diff(after, engine_with_groups)
    assert back.allowed
    assert back.decided_by == "weft/default"


def test_world_addresses_are_named_by_range(engine_with_groups: Engine) -> None:
    after = engine_with_groups.copy()
    after.put(deny(protocol="udp", from_ip_address="192.0.2.0/24"))
    (change,) = diff(engine_with_groups, after)
    assert change.sources == ("world 192.0.2.0/24",)
    assert change.services == ("udp",)


def test_an_audit_policy_changes_nothing(engine_with_groups: Engine) -> None:
    after = engine_with_groups.copy()
    after.put(Policy(tenant=DEFAULT, name=PolicyName("p"), mode="audit"))
    after.put(deny())
    assert diff(engine_with_groups, after) == ()
    enforced = after.copy()
    enforced.put(Policy(tenant=DEFAULT, name=PolicyName("p")))
    assert all(not change.allowed for change in diff(after, enforced))


def test_a_label_change_affects_both_ends() -> None:
    spec = {"podSelector": {}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"role": "ok"}}}]}]}
    before = Engine([Namespace(name="x"), Namespace(name="y"), Pod(namespace="x", name="a", ips=("10.0.0.1",))])
    before.put(Pod(namespace="x", name="b", ips=("10.0.0.2",)))
    before.put(read_network_policy({"metadata": {"name": "p", "namespace": "x"}, "spec": spec}))
    after = before.copy()
    after.put(Pod(namespace="x", name="b", ips=("10.0.0.2",), labels={"role": "ok"}))
    (change,) = diff(before, after)
    assert (change.allowed, change.sources, change.targets) == (True, ("x/b",), ("namespace x",))
    assert change.decided_by == "k8s/x/p/ingress/0"


def test_added_and_deleted_workloads_are_no_change_of_policy(engine_with_groups: Engine) -> None:
    engine_with_groups.put(deny())
    after = engine_with_groups.copy()
    after.put(Endpoint(tenant=DEFAULT, network=NET, endpoint_id=EndpointId("w3"), group="web", ip_address="10.0.0.9"))
    assert diff(engine_with_groups, after) == ()
    assert diff(after, engine_with_groups) == ()
