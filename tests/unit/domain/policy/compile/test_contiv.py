"""Contiv groups, policies and rules: the acceptance list of contiv 10.5, and Contiv defects that Weft does not have."""

from __future__ import annotations

from typing import Any

import pytest

from weft.domain.errors import Invalid
from weft.domain.ids import EndpointId, GroupKey, GroupName, NetworkKey, NetworkName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, Network, Policy, Rule
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.protocols import parse_service

DEFAULT, RED = TenantName("default"), TenantName("red")
BLUE, GREEN = NetworkName("blue"), NetworkName("green")


def endpoint(name: str, group: str, number: int, *, tenant: TenantName = DEFAULT, network: str = BLUE) -> Endpoint:
    third = 1 if network == BLUE else 2
    return Endpoint(
        tenant=tenant,
        network=NetworkName(network),
        endpoint_id=EndpointId(name),
        group=group,
        ip_address=f"10.1.{third}.{number}",
        ipv6_address=f"fd0{third}::{number}",
    )


def group(name: str, *policies: str, tenant: TenantName = DEFAULT) -> Group:
    return Group(tenant=tenant, name=GroupName(name), network=BLUE, policies=tuple(map(PolicyName, policies)))


def policy(name: str = "p", *, audit: bool = False) -> Policy:
    return Policy(tenant=DEFAULT, name=PolicyName(name), mode="audit" if audit else "enforce")


def rule(number: str, action: str, *, policy: str = "p", direction: str = "in", **members: Any) -> Rule:
    return Rule(
        tenant=DEFAULT,
        policy=PolicyName(policy),
        rule_id=RuleId(number),
        direction="in" if direction == "in" else "out",
        action="allow" if action == "allow" else "deny",
        **members,
    )


@pytest.fixture
def engine() -> Engine:
    """Group web attaches policy p; groups common and other attach nothing; one more network and tenant."""
    networks = [(BLUE, "10.1.1.0/24", "fd01::/64"), (GREEN, "10.1.2.10-10.1.2.200/24", "fd02::/64")]
    return Engine(
        [
            *(
                Network(tenant=DEFAULT, name=name, encap="vxlan", subnet=subnet, ipv6_subnet=v6)
                for name, subnet, v6 in networks
            ),
            policy(),
            group("web", "p"),
            group("common"),
            group("other"),
            endpoint("w1", "web", 1),
            endpoint("w2", "web", 2),
            endpoint("c1", "common", 3),
            endpoint("o1", "other", 4, network=GREEN),
            endpoint("r1", "web", 5, tenant=RED),
        ]
    )


def key(name: str) -> str:
    known = {"w1": "default:blue:w1", "w2": "default:blue:w2", "c1": "default:blue:c1", "o1": "default:green:o1"}
    return known.get(name, name)


def passes(engine: Engine, source: str, target: str, service: str = "tcp/80", *, version: int | None = None) -> bool:
    protocol, port = parse_service(service)
    flow = engine.directory.flow(key(source), key(target), protocol=protocol, port=port, version=version)
    return engine.verdict(flow).allowed


def test_p1_a_policy_without_rules_leaves_all_open(engine: Engine) -> None:
    assert passes(engine, "c1", "w1")
    assert passes(engine, "w1", "w2")


@pytest.mark.parametrize("version", [4, 6])
def test_p2_a_higher_priority_wins(engine: Engine, version: int) -> None:
    engine.put(rule("1", "deny", protocol="tcp", priority=1))
    engine.put(rule("2", "allow", protocol="tcp", port=8000, priority=100))
    assert passes(engine, "c1", "w1", "tcp/8000", version=version)
    assert not passes(engine, "c1", "w1", "tcp/8001", version=version)
    assert passes(engine, "c1", "w1", "udp/8001", version=version)
    assert passes(engine, "w1", "c1", "tcp/8001", version=version), "the rule is about flows into web"


def test_p3_rules_come_and_go_live(engine: Engine) -> None:
    engine.put(rule("1", "deny", protocol="tcp"))
    touched = engine.put(rule("2", "allow", protocol="tcp", port=8001, priority=10))
    assert touched.workloads == {"default:blue:w1", "default:blue:w2"}
    assert passes(engine, "c1", "w1", "tcp/8001")
    engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("2")))
    assert not passes(engine, "c1", "w1", "tcp/8001")


def test_p4_from_a_group_only(engine: Engine) -> None:
    engine.put(rule("1", "deny", protocol="tcp"))
    engine.put(rule("2", "allow", protocol="tcp", port=8001, from_endpoint_group="common", priority=10))
    assert passes(engine, "c1", "w1", "tcp/8001")
    assert not passes(engine, "o1", "w1", "tcp/8001")
    assert not passes(engine, "192.0.2.1", "w1", "tcp/8001"), "W41: what comes from outside is filtered too"


@pytest.mark.parametrize("version", [4, 6])
def test_p5_from_a_network(engine: Engine, version: int) -> None:
    """A network stands for its whole subnets of both families, even if it allocates only a range of them."""
    engine.put(rule("1", "allow", from_network="blue", priority=10))
    engine.put(rule("2", "deny", from_network="green", priority=10))
    assert passes(engine, "c1", "w1", version=version)
    assert not passes(engine, "o1", "w1", version=version)


@pytest.mark.parametrize(
    ("address", "blocked"),
    [
        ("10.1.1.3", {"c1"}),
        ("10.1.1.0/24", {"c1", "w2"}),
        ("10.1.1.2-3", {"c1", "w2"}),
        ("10.1.1.3-200", {"c1"}),
        ("fd01::3", set()),
        ("0.0.0.0/0", {"c1", "w2", "o1", "192.0.2.1"}),
    ],
)
def test_p6_from_an_address(engine: Engine, address: str, blocked: set[str]) -> None:
    engine.put(rule("1", "deny", from_ip_address=address))
    assert {each for each in ("c1", "w2", "o1", "192.0.2.1") if not passes(engine, each, "w1", version=4)} == blocked


def test_p6_from_a_v6_address(engine: Engine) -> None:
    engine.put(rule("1", "deny", from_ip_address="fd01::3"))
    assert not passes(engine, "c1", "w1", version=6)
    assert passes(engine, "c1", "w1", version=4)


@pytest.mark.parametrize(
    ("members", "blocked"),
    [
        ({"to_endpoint_group": "common"}, {"c1"}),
        ({"to_network": "green"}, {"o1"}),
        ({"to_ip_address": "10.1.1.2"}, {"w2"}),
        ({"to_ip_address": "192.0.2.0/24"}, {"192.0.2.1"}),
        ({}, {"c1", "o1", "w2", "192.0.2.1"}),
    ],
)
def test_p7_egress(engine: Engine, members: dict[str, str], blocked: set[str]) -> None:
    engine.put(rule("1", "deny", direction="out", protocol="tcp", **members))
    assert {each for each in ("c1", "o1", "w2", "192.0.2.1") if not passes(engine, "w1", each)} == blocked
    assert passes(engine, "c1", "w1")


@pytest.mark.parametrize("version", [4, 6])
def test_p8_icmp_of_both_families(engine: Engine, version: int) -> None:
    engine.put(rule("1", "deny", protocol="icmp"))
    engine.put(rule("2", "allow", protocol="icmp", from_endpoint_group="common", priority=2))
    assert passes(engine, "c1", "w1", "icmp", version=version)
    assert not passes(engine, "o1", "w1", "icmp", version=version)
    assert passes(engine, "o1", "w1", "tcp/80", version=version)
    engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("1")))
    assert passes(engine, "o1", "w1", "icmp", version=version)


def test_p9_endpoints_before_and_after_the_policy_behave_equally(engine: Engine) -> None:
    engine.put(rule("1", "deny"))
    engine.put(endpoint("w3", "web", 9))
    assert not passes(engine, "c1", "w1")
    assert not passes(engine, "c1", "default:blue:w3")


def test_p10_policies_are_exchanged_live(engine: Engine) -> None:
    engine.put(rule("1", "deny"))
    engine.put(policy("q"))
    engine.put(rule("1", "deny", policy="q", protocol="udp"))
    touched = engine.put(group("web", "q"))
    assert touched.workloads == {"default:blue:w1", "default:blue:w2"}
    assert passes(engine, "c1", "w1", "tcp/80")
    assert not passes(engine, "c1", "w1", "udp/80")
    engine.put(group("web"))
    assert passes(engine, "c1", "w1", "udp/80")


def test_w23_a_group_that_vanished_matches_nothing(engine: Engine) -> None:
    engine.put(rule("1", "deny", from_endpoint_group="common"))
    engine.put(rule("2", "deny", from_network="green"))
    assert not passes(engine, "c1", "w1")
    assert not passes(engine, "o1", "w1")
    engine.remove_group(GroupKey(DEFAULT, GroupName("common")))
    engine.remove_network(NetworkKey(DEFAULT, GREEN))
    for each in ("c1", "o1", "w2", "192.0.2.1"):
        assert passes(engine, each, "w1")
    engine.put(group("common"))
    assert not passes(engine, "c1", "w1")


def test_w23_a_dangling_allow_opens_nothing(engine: Engine) -> None:
    engine.put(rule("1", "deny"))
    engine.put(rule("2", "allow", from_endpoint_group="never-was", priority=100))
    engine.put(rule("3", "allow", from_network="never-was", priority=100))
    for each in ("c1", "o1", "w2", "192.0.2.1"):
        assert not passes(engine, each, "w1")


def test_w24_removing_an_absent_object_is_no_error(engine: Engine) -> None:
    engine.put(rule("1", "deny"))
    engine.remove_policy((DEFAULT, PolicyName("p")))
    assert passes(engine, "c1", "w1"), "a policy that does not exist has no rules"
    for _ in range(2):
        assert not engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("1"))).workloads
    engine.put(policy())
    assert passes(engine, "c1", "w1")


def test_w41_the_same_rule_in_two_policies_of_a_group_is_fine(engine: Engine) -> None:
    engine.put(policy("q"))
    engine.put(group("web", "p", "q"))
    for name in ("p", "q"):
        engine.put(rule("1", "deny", policy=name, protocol="tcp"))
    assert not passes(engine, "c1", "w1")
    engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("1")))
    assert not passes(engine, "c1", "w1"), "the other policy still denies"
    engine.remove_rule((DEFAULT, PolicyName("q"), RuleId("1")))
    assert passes(engine, "c1", "w1")


def test_at_equal_priority_deny_comes_first_in_any_order(engine: Engine) -> None:
    for numbers in (("1", "2"), ("2", "1")):
        engine.put(rule(numbers[0], "deny", protocol="tcp", priority=7))
        engine.put(rule(numbers[1], "allow", protocol="tcp", port=80, priority=7))
        assert not passes(engine, "c1", "w1")


def test_group_and_address_together_must_both_match(engine: Engine) -> None:
    engine.put(rule("1", "deny", from_endpoint_group="web", from_ip_address="10.1.1.2"))
    assert not passes(engine, "w2", "w1")
    assert passes(engine, "c1", "w1")
    engine.put(rule("1", "deny", from_endpoint_group="common", from_ip_address="10.1.1.2"))
    for each in ("w2", "c1", "o1"):
        assert passes(engine, each, "w1")


def test_an_ingress_rule_may_name_the_members_own_address(engine: Engine) -> None:
    engine.put(rule("1", "deny", to_ip_address="10.1.1.2"))
    assert not passes(engine, "c1", "w2")
    assert passes(engine, "c1", "w1")


def test_a_port_without_protocol_matches_every_protocol_with_ports(engine: Engine) -> None:
    engine.put(rule("1", "deny", port=80))
    for service, open_service in (
        ("tcp/80", False),
        ("udp/80", False),
        ("sctp/80", False),
        ("tcp/81", True),
        ("icmp", True),
    ):
        assert passes(engine, "c1", "w1", service) is open_service


@pytest.mark.parametrize(
    ("protocol", "service"), [("6", "tcp/80"), ("132", "sctp/80"), ("47", "ip/47"), ("255", "ip/255")]
)
def test_protocols_by_number(engine: Engine, protocol: str, service: str) -> None:
    engine.put(rule("1", "deny", protocol=protocol))
    assert not passes(engine, "c1", "w1", service)
    assert passes(engine, "c1", "w1", "udp/80")


def test_tenants_are_isolated_from_each_other(engine: Engine) -> None:
    assert not passes(engine, "c1", "red:blue:r1")
    assert not passes(engine, "red:blue:r1", "c1")
    engine.put(rule("1", "deny", from_ip_address="10.1.1.5"))
    assert engine.verdict(engine.directory.flow("red:blue:r1", key("w1"), protocol=1)).ingress.id == "weft/tenants"


def test_an_audit_policy_never_decides(engine: Engine) -> None:
    engine.put(rule("1", "deny"))
    engine.put(policy(audit=True))
    assert passes(engine, "c1", "w1")
    engine.put(policy(audit=False))
    assert not passes(engine, "c1", "w1")


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"from_ip_address": "10.1.1"}, "fromIpAddress"),
        ({"to_ip_address": "fe80::1%e"}, "toIpAddress"),
        ({"protocol": "x"}, "protocol"),
    ],
)
def test_a_rule_that_cannot_be_compiled_changes_nothing(engine: Engine, members: dict[str, str], field: str) -> None:
    engine.put(rule("1", "deny"))
    with pytest.raises(Invalid) as refusal:
        engine.put(rule("1", "allow", **members))
    assert refusal.value.field == field
    assert not passes(engine, "c1", "w1")


def test_a_network_that_cannot_be_compiled_changes_nothing(engine: Engine) -> None:
    engine.put(rule("1", "deny", from_network="blue"))
    with pytest.raises(Invalid):
        engine.put(Network(tenant=DEFAULT, name=BLUE, encap="vxlan", subnet="nonsense"))
    assert not passes(engine, "c1", "w1")
