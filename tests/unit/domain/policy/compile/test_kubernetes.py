"""NetworkPolicy semantics, case by case. The verdict table and the policy oracle cover the combinations."""

from __future__ import annotations

from typing import Any

import pytest

from weft.domain.errors import Invalid
from weft.domain.model import PodPort
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import ApiServer, Host, Namespace, Pod
from weft.domain.policy.model.netpol import Metadata, NetworkPolicy, PolicySpec, read_network_policy
from weft.domain.policy.model.protocols import parse_service
from weft.domain.selectors import LabelExpression, LabelSelector

PORTS = (PodPort("http", 6, 8080), PodPort("dns", 17, 53))


def network_policy(name: str = "p", /, *, namespace: str = "x", **spec: object) -> NetworkPolicy:
    return read_network_policy({"metadata": {"name": name, "namespace": namespace}, "spec": spec})


@pytest.fixture
def engine() -> Engine:
    """Two namespaces with the pods a and b each, on one node, with hosts and an API server."""
    engine = Engine([Namespace(name="x", labels={"team": "red"}), Namespace(name="y", labels={"team": "blue"})])
    for number, (namespace, name) in enumerate((("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")), start=1):
        engine.put(
            Pod(
                namespace=namespace,
                name=name,
                labels={"pod": name},
                ips=(f"10.0.0.{number}", f"fd00::{number}"),
                ports=PORTS,
                node="n1",
            )
        )
    engine.put(Host(node="n1", addresses=("192.0.2.1", "2001:db8::1")))
    engine.put(Host(node="n2", addresses=("192.0.2.2",)))
    engine.put(ApiServer(addresses=("192.0.2.9",)))
    return engine


def passes(engine: Engine, source: str, target: str, service: str = "tcp/80", *, version: int | None = None) -> bool:
    protocol, port = parse_service(service)
    return engine.verdict(engine.directory.flow(source, target, protocol=protocol, port=port, version=version)).allowed


def test_without_a_policy_everything_is_allowed(engine: Engine) -> None:
    for service in ("tcp/80", "udp/53", "sctp/1", "icmp", "ip/47"):
        for version in (4, 6):
            assert passes(engine, "x/a", "y/b", service, version=version)


def test_isolation_is_per_direction(engine: Engine) -> None:
    engine.put(network_policy(podSelector={"matchLabels": {"pod": "a"}}))
    assert not passes(engine, "y/a", "x/a")
    assert passes(engine, "x/a", "y/a")
    assert passes(engine, "y/a", "x/b")
    engine.put(network_policy("q", podSelector={"matchLabels": {"pod": "b"}}, policyTypes=["Egress"]))
    assert not passes(engine, "x/b", "y/a")
    assert passes(engine, "y/a", "x/b")


def test_isolation_covers_every_protocol_and_both_families(engine: Engine) -> None:
    """CVE-2023-27594, GHSA-c66w-hq56-4q97: neither IPv6 nor ICMP is a way around a policy."""
    engine.put(network_policy(podSelector={}))
    for service in ("tcp/80", "udp/53", "sctp/1", "icmp", "ip/47"):
        for version in (4, 6):
            assert not passes(engine, "y/a", "x/a", service, version=version)


def test_an_entry_with_ports_does_not_allow_icmp(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, ingress=[{"ports": [{"port": 80}]}]))
    assert passes(engine, "y/a", "x/a", "tcp/80", version=6)
    assert not passes(engine, "y/a", "x/a", "icmp")
    engine.put(network_policy(podSelector={}, ingress=[{}]))
    assert passes(engine, "y/a", "x/a", "icmp")


def test_policies_add_up(engine: Engine) -> None:
    engine.put(network_policy("one", podSelector={}, ingress=[{"ports": [{"port": 80}]}]))
    engine.put(network_policy("two", podSelector={}, ingress=[{"ports": [{"port": 81}]}]))
    assert passes(engine, "y/a", "x/a", "tcp/80")
    assert passes(engine, "y/a", "x/a", "tcp/81")
    assert not passes(engine, "y/a", "x/a", "tcp/82")


def test_both_ends_must_allow(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, ingress=[{"ports": [{"port": 80}]}]))
    engine.put(
        network_policy(namespace="y", podSelector={}, policyTypes=["Egress"], egress=[{"ports": [{"port": 81}]}])
    )
    assert not passes(engine, "y/a", "x/a", "tcp/80")
    assert not passes(engine, "y/a", "x/a", "tcp/81")


@pytest.mark.parametrize(
    ("types", "egress", "isolated"),
    [
        (None, None, (True, False)),
        ([], None, (True, False)),
        (None, [], (True, False)),
        (None, [{"ports": [{"port": 1}]}], (True, True)),
        (["Ingress"], [{"ports": [{"port": 1}]}], (True, False)),
        (["Egress"], None, (False, True)),
        (["Egress", "Ingress"], None, (True, True)),
    ],
)
def test_policy_types_and_their_defaults(
    engine: Engine, types: object, egress: object, isolated: tuple[bool, bool]
) -> None:
    engine.put(network_policy(podSelector={}, policyTypes=types, egress=egress))
    assert (not passes(engine, "y/a", "x/a"), not passes(engine, "x/a", "y/a")) == isolated


@pytest.mark.parametrize(
    ("peer", "friends"),
    [
        ({"podSelector": {}}, {"x/a", "x/b"}),
        ({"podSelector": {"matchLabels": {"pod": "b"}}}, {"x/b"}),
        ({"namespaceSelector": {}}, {"x/a", "x/b", "y/a", "y/b"}),
        ({"namespaceSelector": {"matchLabels": {"team": "blue"}}}, {"y/a", "y/b"}),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "y"}}}, {"y/a", "y/b"}),
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"pod": "b"}}}, {"x/b", "y/b"}),
        ({"namespaceSelector": {"matchLabels": {"team": "none"}}}, set()),
        ({"ipBlock": {"cidr": "10.0.0.0/30"}}, {"x/a", "x/b", "y/a"}),
        ({"ipBlock": {"cidr": "10.0.0.0/29", "except": ["10.0.0.2/31"]}}, {"x/a", "y/b"}),
        ({"ipBlock": {"cidr": "192.0.2.0/24"}}, {"192.0.2.77", "apiserver", "host:n2"}),
        ({"ipBlock": {"cidr": "fd00::/64"}}, set()),
        ({"ipBlock": {"cidr": "::ffff:10.0.0.1/128"}}, {"x/a"}),
    ],
)
def test_peers(engine: Engine, peer: object, friends: set[str]) -> None:
    engine.put(network_policy(podSelector={"matchLabels": {"pod": "a"}}, ingress=[{"from": [peer]}]))
    everyone = ("x/a", "x/b", "y/a", "y/b", "192.0.2.77", "apiserver", "host:n2")
    assert {source for source in everyone if passes(engine, source, "x/a", version=4)} == friends


def test_an_ip_block_matches_the_address_in_the_packet(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, ingress=[{"from": [{"ipBlock": {"cidr": "fd00::3/128"}}]}]))
    assert passes(engine, "y/a", "x/a", version=6)
    assert not passes(engine, "y/a", "x/a", version=4)


@pytest.mark.parametrize(
    ("ports", "open_services"),
    [
        ([{"port": 80}], {"tcp/80"}),
        ([{"port": 80, "protocol": "UDP"}], {"udp/80"}),
        ([{"protocol": "SCTP"}], {"sctp/80"}),
        ([{}], {"tcp/80", "tcp/81", "tcp/8080"}),
        ([{"port": 80, "endPort": 81}], {"tcp/80", "tcp/81"}),
        ([{"port": "http"}], {"tcp/8080"}),
        ([{"port": "http", "protocol": "UDP"}], set()),
        ([{"port": "dns", "protocol": "UDP"}, {"port": 81}], {"udp/53", "tcp/81"}),
        ([{"port": "absent"}], set()),
        ([], {"tcp/80", "tcp/81", "tcp/8080", "udp/53", "udp/80", "sctp/80", "icmp"}),
    ],
)
@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_services(engine: Engine, direction: str, ports: object, open_services: set[str]) -> None:
    """A named port resolves on the destination: the pod itself for ingress, the peer for egress."""
    types = ["Ingress" if direction == "ingress" else "Egress"]
    entries: dict[str, Any] = {direction: [{"ports": ports}]}
    engine.put(network_policy(podSelector={}, policyTypes=types, **entries))
    source, target = ("y/a", "x/a") if direction == "ingress" else ("x/a", "y/a")
    services = ("tcp/80", "tcp/81", "tcp/8080", "udp/53", "udp/80", "sctp/80", "icmp")
    assert {service for service in services if passes(engine, source, target, service)} == open_services


def test_a_named_port_matches_nothing_on_an_end_without_named_ports(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, policyTypes=["Egress"], egress=[{"ports": [{"port": "http"}]}]))
    assert not passes(engine, "x/a", "192.0.2.77", "tcp/8080")


def test_a_pod_is_always_reachable_from_its_own_host_only(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, policyTypes=["Ingress", "Egress"]))
    assert passes(engine, "host:n1", "x/a")
    assert passes(engine, "2001:db8::1", "x/a")
    assert not passes(engine, "host:n2", "x/a")
    assert not passes(engine, "x/a", "host:n1")
    assert not passes(engine, "apiserver", "x/a")


def test_no_namespace_selector_matches_an_unknown_namespace(engine: Engine) -> None:
    engine.put(
        network_policy(podSelector={"matchLabels": {"pod": "a"}}, ingress=[{"from": [{"namespaceSelector": {}}]}])
    )
    assert passes(engine, "y/a", "x/a")
    engine.remove_namespace("y")
    assert not passes(engine, "y/a", "x/a")
    engine.put(network_policy(namespace="y", podSelector={}))
    assert not passes(engine, "x/a", "y/a"), "its own policies still protect its pods"


def test_an_invalid_policy_changes_nothing(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}))
    spec = PolicySpec(pod_selector=LabelSelector(match_expressions=(LabelExpression(key="a", operator="Like"),)))
    with pytest.raises(Invalid):
        engine.put(NetworkPolicy(metadata=Metadata(name="p", namespace="x"), spec=spec))
    assert not passes(engine, "y/a", "x/a")


def test_every_rule_id_names_its_policy(engine: Engine) -> None:
    engine.put(network_policy(podSelector={}, ingress=[{}, {"ports": [{"port": 1}]}], egress=[{}]))
    rules = engine.rule_set(next(key for key in engine.workloads if key == "x/a"))
    assert [rule.id for rule in rules.ingress] == [
        "k8s/x/p/ingress/0",
        "k8s/x/p/ingress/1",
        "k8s/x/p/ingress/isolation",
    ]
    assert [rule.id for rule in rules.egress] == ["k8s/x/p/egress/0", "k8s/x/p/egress/isolation"]
