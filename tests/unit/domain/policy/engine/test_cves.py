"""CVEs of other projects that concern selectors, scope, precedence and limits."""

from __future__ import annotations

from random import Random

import pytest
from tests.support.cluster_samples import random_cluster, random_flow
from tests.support.policy_oracle import PolicyOracle

from weft.domain.addresses import parse_address
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointId, GroupName, NetworkName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, Policy, Rule
from weft.domain.policy.engine.decide import Flow, matches
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import Namespace, Pod, identity_of_world
from weft.domain.policy.model.netpol import NetworkPolicy, read_network_policy
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import Action, Direction, FlowRule, Peer, PodsOfNamespaces, Tier
from weft.domain.policy.model.rules import RuleId as FlowRuleId
from weft.domain.selectors import EVERYTHING, parse_selector

DEFAULT, NET = TenantName("default"), NetworkName("net")


def network_policy(spec: object, namespace: str = "x") -> NetworkPolicy:
    return read_network_policy({"metadata": {"name": "p", "namespace": namespace}, "spec": spec})


def passes(engine: Engine, source: str, target: str, *, protocol: int = 6, port: int = 80) -> bool:
    return engine.verdict(engine.directory.flow(source, target, protocol=protocol, port=port)).allowed


@pytest.fixture
def engine() -> Engine:
    """Pod x/server, and pod y/intruder with labels that imitate another namespace."""
    forged = {
        "kubernetes.io/metadata.name": "x",
        "io.kubernetes.pod.namespace": "x",
        "namespace": "x",
        "team": "red",
        "app": "client",
    }
    return Engine(
        [
            Namespace(name="x", labels={"team": "red"}),
            Namespace(name="y", labels={"team": "blue", "kubernetes.io/metadata.name": "x"}),
            Pod(namespace="x", name="server", labels={"app": "server"}, ips=("10.0.0.1",)),
            Pod(namespace="x", name="client", labels={"app": "client"}, ips=("10.0.0.2",)),
            Pod(namespace="y", name="intruder", labels=forged, ips=("10.0.0.3",)),
        ]
    )


@pytest.mark.parametrize(
    "peer",
    [
        {"podSelector": {}},
        {"podSelector": {"matchLabels": {"app": "client"}}},
        {"podSelector": {"matchLabels": {"io.kubernetes.pod.namespace": "y"}}},
        {"podSelector": {"matchLabels": {"kubernetes.io/metadata.name": "x"}}},
        {"namespaceSelector": {"matchLabels": {"team": "red"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "x"}}},
        {"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["blue"]}]}},
    ],
)
def test_cve_2023_39347_labels_of_a_pod_never_move_it_into_another_namespace(engine: Engine, peer: object) -> None:
    engine.put(network_policy({"podSelector": {}, "ingress": [{"from": [peer]}]}))
    assert not passes(engine, "y/intruder", "x/server")


def test_cve_2023_41333_a_policy_cannot_select_pods_of_another_namespace(engine: Engine) -> None:
    """Not with any label: Weft adds the namespace, and last."""
    selectors: list[dict[str, object]] = [
        {},
        {"matchLabels": {"kubernetes.io/metadata.name": "x"}},
        {"matchExpressions": [{"key": "io.kubernetes.pod.namespace", "operator": "Exists"}]},
    ]
    for selector in selectors:
        engine.put(network_policy({"podSelector": selector}, namespace="y"))
        assert passes(engine, "y/intruder", "x/server")
        assert engine.rule_set(next(key for key in engine.workloads if key == "x/server")).ingress == ()


def test_ghsa_pfhr_pccp_hwmh_a_namespace_cannot_take_anothers_name(engine: Engine) -> None:
    """The default label is the name of the namespace, whatever its own labels are."""
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "x"}}}
    engine.put(network_policy({"podSelector": {}, "ingress": [{"from": [peer]}]}))
    assert passes(engine, "x/client", "x/server")
    assert not passes(engine, "y/intruder", "x/server")


@pytest.mark.parametrize(
    "peers",
    [
        (),
        (Peer(addresses=AddressSet()),),
        (Peer(members=PodsOfNamespaces(EVERYTHING, parse_selector("no=body"))),),
    ],
)
def test_cve_2025_64715_an_empty_set_matches_nothing(peers: tuple[Peer, ...]) -> None:
    world = identity_of_world(parse_address("192.0.2.1", field="f"))
    flow = Flow(source=world, target=world, protocol=6, port=80)
    empty, absent = (
        FlowRule(id=FlowRuleId("r"), tier=Tier.GROUP, direction=Direction.INGRESS, action=Action.ALLOW, peers=each)
        for each in (peers, None)
    )
    assert not matches(empty, flow, lambda *_: False)
    assert matches(absent, flow, lambda *_: False)
    assert empty != absent


def test_cve_2025_64715_an_entry_whose_selector_matches_no_pod_allows_nothing(engine: Engine) -> None:
    no_pods = {"podSelector": {"matchLabels": {"no": "pod"}}}
    engine.put(network_policy({"podSelector": {}, "ingress": [{"from": [no_pods]}]}))
    assert not passes(engine, "x/client", "x/server")
    engine.put(network_policy({"podSelector": {}, "ingress": []}))
    assert not passes(engine, "x/client", "x/server")


def contiv(*rules: tuple[str, int, str, int]) -> Engine:
    """Endpoint default:net:server in a group whose policy has rules (action, priority, from address, port)."""
    engine = Engine(
        [
            Policy(tenant=DEFAULT, name=PolicyName("p")),
            Group(tenant=DEFAULT, name=GroupName("g"), network=NET, policies=(PolicyName("p"),)),
            Endpoint(tenant=DEFAULT, network=NET, endpoint_id=EndpointId("server"), group="g", ip_address="10.0.0.1"),
        ]
    )
    for number, (action, priority, address, port) in enumerate(rules):
        engine.put(
            Rule(
                tenant=DEFAULT,
                policy=PolicyName("p"),
                rule_id=RuleId(str(number)),
                direction="in",
                action="allow" if action == "allow" else "deny",
                priority=priority,
                from_ip_address=address,
                protocol="tcp" if port else "",
                port=port,
            )
        )
    return engine


def test_cve_2024_47825_a_narrow_allow_does_not_override_a_broad_deny() -> None:
    broad, narrow = ("deny", 5, "0.0.0.0/0", 0), ("allow", 5, "192.0.2.1", 80)
    for rules in ((broad, narrow), (narrow, broad)):
        assert not passes(contiv(*rules), "192.0.2.1", "default:net:server")
    assert passes(contiv(broad, ("allow", 6, "192.0.2.1", 80)), "192.0.2.1", "default:net:server")


@pytest.mark.parametrize("seed", range(200, 220))
def test_cve_2024_52529_precedence_and_port_ranges_agree_with_an_independent_evaluator(seed: int) -> None:
    rng = Random(seed)
    objects = random_cluster(rng)
    engine, oracle = Engine(objects), PolicyOracle(objects)
    for _ in range(50):
        question = random_flow(rng, engine)
        if question is not None:
            flow = engine.directory.flow(
                question.source,
                question.target,
                protocol=question.protocol,
                port=question.port,
                version=question.version,
                tenant="",
            )
            assert engine.verdict(flow).allowed is all(oracle.verdict(question))


@pytest.mark.parametrize(("high", "low"), [(100, 1), (100, 99), (2, 1)])
def test_cve_2026_25804_priorities_keep_their_order_at_the_limits(high: int, low: int) -> None:
    assert passes(contiv(("allow", high, "", 0), ("deny", low, "", 0)), "192.0.2.1", "default:net:server")
    assert not passes(contiv(("deny", high, "", 0), ("allow", low, "", 0)), "192.0.2.1", "default:net:server")


def test_integer_limits_of_ports() -> None:
    spec = {"podSelector": {}, "ingress": [{"ports": [{"port": 65535}, {"port": 1, "endPort": 2}]}]}
    engine = Engine([Namespace(name="x"), Pod(namespace="x", name="a", ips=("10.0.0.1",)), network_policy(spec)])
    opened = {port for port in (0, 1, 2, 3, 65534, 65535, 65536, 65537) if passes(engine, "x/a", "x/a", port=port)}
    assert opened == {1, 2, 65535}
    for port in (0, 65536, 2**16 + 80, 2**32 + 80, -1):
        with pytest.raises(Invalid):
            network_policy({"podSelector": {}, "ingress": [{"ports": [{"port": port}]}]})


@pytest.mark.parametrize("protocol", [6, 17, 132, 1, 2, 47, 50, 255])
def test_cve_2023_27594_no_protocol_is_a_way_around_a_deny(protocol: int) -> None:
    assert not passes(contiv(("deny", 1, "", 0)), "192.0.2.1", "default:net:server", protocol=protocol, port=0)
