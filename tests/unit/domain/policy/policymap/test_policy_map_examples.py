"""The tables by example: what each kind of rule becomes, and who has which number."""

from __future__ import annotations

import pytest

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.ids import EndpointId, GroupName, NetworkName, NodeName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, PodPort, Policy, Rule
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.facts import Fact
from weft.domain.policy.model.identities import Host, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.rules import Action
from weft.domain.policy.policymap.lookup import Lookup
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import (
    UNKNOWN_IDENTITY,
    VERDICT_DENY,
    WORKLOAD,
    CidrIdentity,
    IpIdentity,
    PolicyEntry,
    VerdictCounter,
)

DEFAULT, NET, NODE = TenantName("default"), NetworkName("net"), NodeName("n1")
WEB, WEB_AGAIN, CLIENT, LONER = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
HOST, OTHER_HOST, WORLD, NOBODY, GATEWAY = "192.0.2.1", "192.0.2.2", "198.51.100.7", "10.0.0.99", "10.0.0.254"
SUBNET = Range(4, 0x0A000000, 0x0A0000FF)


def at(text: str) -> Address:
    return parse_address(text, field="")


class Shop:
    """The groups web (two endpoints) with the policy p and client (one), an endpoint in no group, and two hosts."""

    def __init__(self, node: NodeName = NODE) -> None:
        self.engine = Engine()
        self.tables = PolicyMap(self.engine, tenant=DEFAULT, node=node)
        self.tables.set_ground([SUBNET], [at(GATEWAY)])
        self.put(
            Host(node="n1", addresses=(HOST,)),
            Host(node="n2", addresses=(OTHER_HOST,)),
            Group(tenant=DEFAULT, name=GroupName("web"), network=NET, policies=(PolicyName("p"),)),
            Group(tenant=DEFAULT, name=GroupName("client"), network=NET),
            endpoint("w1", "web", WEB, "n1"),
            endpoint("w2", "web", WEB_AGAIN, "n2"),
            endpoint("c1", "client", CLIENT, "n1"),
            endpoint("e1", "", LONER, "n2"),
        )

    def put(self, *facts: Fact) -> None:
        for fact in facts:
            self.tables.note(self.engine.put(fact))
        self.tables.refresh()

    def policy(self, *rules: Rule, dry_run: bool = False) -> None:
        self.put(Policy(tenant=DEFAULT, name=PolicyName("p"), dry_run=dry_run), *rules)

    def says(self, source: str, target: str = WEB, *, protocol: int = 6, port: int = 80) -> tuple[str, str]:
        """What the target's rules do with a flow, and which."""
        _, ingress = self.tables.lookup(at(source), at(target), protocol=protocol, port=port)
        return ingress.action, ingress.rule.rpartition("/")[2]

    def number(self, address: str) -> int:
        return Lookup(self.tables.parts).number(at(address))

    def rows(self) -> list[PolicyEntry]:
        return [part for part in self.tables.parts if isinstance(part, PolicyEntry)]


def endpoint(name: str, group: str, address: str, node: str) -> Endpoint:
    return Endpoint(
        tenant=DEFAULT, network=NET, endpoint_id=EndpointId(name), group=group, ip_address=address, host=node
    )


def rule(name: str, /, **members: object) -> Rule:
    given = {"tenant": DEFAULT, "policy": PolicyName("p"), "rule_id": RuleId(name), "direction": "in"} | members
    return Rule(**({"action": "deny"} | given))  # type: ignore[arg-type]


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_without_policies_there_are_only_the_workloads_of_this_node(shop: Shop) -> None:
    """A port opens when its address has a number; nobody else needs one."""
    parts = list(shop.tables.parts)
    assert {part.address for part in parts if isinstance(part, IpIdentity)} == {at(WEB), at(CLIENT)}
    assert len(parts) == 2
    assert all(part.number & WORKLOAD for part in parts if isinstance(part, IpIdentity))
    assert shop.says(CLIENT) == ("allow", "default")


def test_with_the_first_policy_everyone_has_a_number_and_with_the_last_nobody_else_again(shop: Shop) -> None:
    before = set(shop.tables.parts)
    shop.policy(rule("1"))
    known = {part.address for part in shop.tables.parts if isinstance(part, IpIdentity)}
    assert known == {at(text) for text in (WEB, WEB_AGAIN, CLIENT, LONER, HOST, OTHER_HOST)}
    shop.tables.note(shop.engine.remove_policy((DEFAULT, PolicyName("p"))))
    shop.tables.refresh()
    assert shop.tables.parts == before


def test_workloads_that_no_rule_tells_apart_share_a_number(shop: Shop) -> None:
    shop.policy(rule("1", protocol="tcp", port=80))
    assert shop.number(WEB) == shop.number(WEB_AGAIN)
    assert shop.number(CLIENT) == shop.number(LONER) != shop.number(WEB)
    shop.put(rule("2", from_endpoint_group="client"))
    assert shop.number(CLIENT) != shop.number(LONER)
    shop.put(rule("3", to_ip_address=WEB))
    assert shop.number(WEB) != shop.number(WEB_AGAIN)


def test_a_rule_about_everyone_is_rows_without_a_remote_number(shop: Shop) -> None:
    shop.policy(rule("1", protocol="tcp", port=80))
    shared = [row for row in shop.rows() if row.remote is None]
    assert {(row.protocol, row.ports, bool(row.outcome & VERDICT_DENY)) for row in shared} == {
        (None, None, False),
        (6, (80, 80), True),
    }
    assert shop.says(WORLD) == ("deny", "1")
    assert shop.says(WORLD, port=81) == ("allow", "default")


def test_deny_beats_allow_of_the_same_priority_and_the_greater_priority_beats_both(shop: Shop) -> None:
    shop.policy(rule("1", action="allow", from_endpoint_group="client"), rule("2", protocol="tcp"))
    assert shop.says(CLIENT) == ("deny", "2")
    assert shop.says(CLIENT, protocol=17) == ("allow", "1")
    shop.put(rule("3", action="allow", priority=2, from_endpoint_group="client", protocol="tcp", port=80))
    assert shop.says(CLIENT) == ("allow", "3")
    assert shop.says(CLIENT, port=81) == ("deny", "2")
    assert shop.says(LONER) == ("deny", "2")


def test_icmp_means_that_of_both_families(shop: Shop) -> None:
    shop.policy(rule("1", protocol="icmp"))
    assert {row.protocol for row in shop.rows() if row.outcome & VERDICT_DENY} == {1, 58}


def test_a_group_that_does_not_exist_matches_nobody(shop: Shop) -> None:
    """W23: for a deny rule too."""
    shop.policy(rule("1", from_endpoint_group="gone"))
    assert {shop.says(text) for text in (CLIENT, LONER, WORLD)} == {("allow", "default")}
    shop.put(endpoint("e1", "gone", LONER, "n2"), Group(tenant=DEFAULT, name=GroupName("gone"), network=NET))
    assert shop.says(LONER) == ("deny", "1")


def test_a_dry_run_refuses_nothing_and_says_what_it_would(shop: Shop) -> None:
    shop.policy(rule("1", from_endpoint_group="client"), dry_run=True)
    _, ingress = shop.tables.lookup(at(CLIENT), at(WEB), protocol=6, port=80)
    assert (ingress.action, ingress.rule, ingress.would) == (Action.ALLOW, "weft/default", "contiv/default/p/1")
    assert not any(
        part.outcome & VERDICT_DENY for part in shop.tables.parts if isinstance(part, PolicyEntry | VerdictCounter)
    )
    assert shop.tables.lookup(at(LONER), at(WEB), protocol=6, port=80)[1].would is None


def test_the_host_of_its_own_node_reaches_a_workload_whatever_the_rules(shop: Shop) -> None:
    shop.policy(rule("1"))
    assert shop.says(HOST) == ("allow", "own-host")
    assert shop.says(OTHER_HOST) == ("deny", "1")
    assert not shop.number(HOST) & WORKLOAD
    other = Shop(NodeName("n2"))
    other.policy(rule("1"))
    assert other.says(OTHER_HOST, WEB_AGAIN) == ("allow", "own-host")
    assert other.says(HOST, WEB_AGAIN) == ("deny", "1")


def test_an_unknown_address_of_the_networks_is_a_stranger_and_a_gateway_is_not(shop: Shop) -> None:
    shop.policy(rule("1", from_ip_address="10.0.0.0/25"))
    assert shop.number(NOBODY) & UNKNOWN_IDENTITY
    assert shop.number("10.0.0.200") & UNKNOWN_IDENTITY
    assert shop.number(NOBODY) != shop.number("10.0.0.200")
    assert shop.number(GATEWAY) == 0
    assert shop.number(WORLD) == 0
    assert shop.says(NOBODY) == ("deny", "1")
    assert shop.says("10.0.0.200") == ("allow", "default")
    shop.put(endpoint("new", "", NOBODY, "n1"))
    assert shop.number(NOBODY) & (UNKNOWN_IDENTITY | WORKLOAD) == WORKLOAD


def test_networks_that_change_move_the_strangers(shop: Shop) -> None:
    shop.policy(rule("1"))
    shop.tables.set_ground([], [])
    difference = shop.tables.refresh()
    assert shop.number(NOBODY) == 0
    assert {type(part) for part in difference.drop} == {CidrIdentity}
    assert not difference.put


def test_an_address_block_without_its_exceptions() -> None:
    block = {"ipBlock": {"cidr": "198.51.100.0/24", "except": ["198.51.100.0/28"]}}
    tables = pods_with({"podSelector": {}, "ingress": [{"from": [block]}]})
    assert [outcome_for(tables, text) for text in ("198.51.100.17", "198.51.100.7", "203.0.113.1")] == [
        "k8s/x/p/ingress/0",
        "k8s/x/p/ingress/isolation",
        "k8s/x/p/ingress/isolation",
    ]
    ranges = {str(part.range) for part in tables.parts if isinstance(part, CidrIdentity)}
    assert ranges == {"198.51.100.16-198.51.100.255"}


def test_a_named_port_is_the_targets_in_both_directions() -> None:
    tables = pods_with({"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]})
    assert outcome_for(tables, "10.0.0.2", port=8080) == "k8s/x/p/ingress/0"
    assert outcome_for(tables, "10.0.0.2", port=80) == "k8s/x/p/ingress/isolation"
    tables = pods_with({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "http"}]}]})
    egress, _ = tables.lookup(at("10.0.0.2"), at("10.0.0.1"), protocol=6, port=8080)
    assert egress.rule == "k8s/x/p/egress/0"
    egress, _ = tables.lookup(at("10.0.0.1"), at("10.0.0.2"), protocol=6, port=8080)
    assert egress.rule == "k8s/x/p/egress/isolation"


def test_an_empty_selector_is_everyone_of_the_namespace_and_no_more() -> None:
    tables = pods_with({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]})
    assert outcome_for(tables, "10.0.0.2") == "k8s/x/p/ingress/0"
    assert outcome_for(tables, "10.0.0.3") == "k8s/x/p/ingress/isolation"
    assert outcome_for(tables, "198.51.100.1") == "k8s/x/p/ingress/isolation"


def pods_with(spec: dict[str, object]) -> PolicyMap:
    """Pods a (which calls 8080 http) and b of the namespace x and c of y, and a policy of x."""
    engine = Engine([Namespace(name="x"), Namespace(name="y")])
    engine.put(Pod(namespace="x", name="a", ips=("10.0.0.1",), ports=(PodPort("http", 6, 8080),), node=NODE))
    engine.put(Pod(namespace="x", name="b", ips=("10.0.0.2",), node=NODE))
    engine.put(Pod(namespace="y", name="c", ips=("10.0.0.3",), node=NODE))
    engine.put(read_network_policy({"metadata": {"name": "p", "namespace": "x"}, "spec": spec}))
    tables = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    tables.refresh()
    return tables


def outcome_for(tables: PolicyMap, source: str, *, port: int = 80) -> str:
    """The rule that decides at the pod a."""
    return tables.lookup(at(source), at("10.0.0.1"), protocol=6, port=port)[1].rule


def test_workloads_of_other_nodes_are_not_told_apart_from_each_other() -> None:
    """They never meet here: rows would be the product of all classes (docs/adr/0007)."""
    engine = Engine([Namespace(name="x", labels={"team": "a"})])
    for number in range(1, 21):
        label = {"app": str(number)}
        engine.put(Pod(namespace="x", name=f"p{number}", labels=label, ips=(f"10.0.0.{number}",), node="elsewhere"))
        spec = {"podSelector": {"matchLabels": label}, "ingress": [{"from": [{"podSelector": {}}]}]}
        engine.put(read_network_policy({"metadata": {"name": f"n{number}", "namespace": "x"}, "spec": spec}))
    tables = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    tables.refresh()
    assert pairs(tables) == set()
    here = Pod(namespace="x", name="p1", labels={"app": "1"}, ips=("10.0.0.1",), node=NODE)
    tables.note(engine.put(here))
    tables.refresh()
    assert len(pairs(tables)) == 20 + 19  # to it from each class, and to each other class from it
    assert outcome_for(tables, "10.0.0.2") == "k8s/x/n1/ingress/0"
    tables.note(engine.remove_pod("x", "p1"))
    tables.refresh()
    assert pairs(tables) == set()


def pairs(tables: PolicyMap) -> set[tuple[int, int]]:
    """The numbers of those whom rows tell apart."""
    return {
        (part.local, part.remote) for part in tables.parts if isinstance(part, PolicyEntry) and part.remote is not None
    }


def test_an_outcome_that_is_in_no_row_any_more_keeps_its_name_for_a_while(shop: Shop) -> None:
    """A drop may be told after the rule that did it went."""
    shop.policy(rule("1"))
    (number,) = (
        part.outcome for part in shop.tables.parts if isinstance(part, VerdictCounter) and part.outcome & VERDICT_DENY
    )
    shop.tables.note(shop.engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("1"))))
    shop.tables.refresh()
    assert VerdictCounter(DEFAULT, number) not in shop.tables.parts
    assert shop.tables.outcomes[number].rule == "contiv/default/p/1"


def test_a_change_rewrites_only_what_it_concerns(shop: Shop) -> None:
    shop.policy(rule("1", from_endpoint_group="client", protocol="tcp"), rule("2", from_ip_address="198.51.100.0/24"))
    shop.tables.note(shop.engine.put(rule("3", from_endpoint_group="client", protocol="udp")))
    difference = shop.tables.refresh()
    assert not difference.drop
    assert sorted(type(part).__name__ for part in difference.put) == ["PolicyEntry", "VerdictCounter"]
    shop.tables.note(shop.engine.put(endpoint("w3", "web", "10.0.0.5", "n1")))
    difference = shop.tables.refresh()
    assert [type(part) for part in difference.put] == [IpIdentity]
    assert not difference.drop
