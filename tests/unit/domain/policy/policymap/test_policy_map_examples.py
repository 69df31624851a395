"""The policy map by example: what each kind of rule compiles to, and which identity each address has."""

from __future__ import annotations

import pytest

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.ids import EndpointId, GroupName, NetworkName, NodeName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, PodPort, Policy, Rule
from weft.domain.policy.engine.engine import Engine, PolicyObject
from weft.domain.policy.model.identities import Host, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.rules import Action
from weft.domain.policy.policymap.policy_map import PolicyLookup, PolicyMap
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
WEB, WEB_2, CLIENT, UNGROUPED = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
HOST, OTHER_HOST, WORLD, UNKNOWN, GATEWAY = "192.0.2.1", "192.0.2.2", "198.51.100.7", "10.0.0.99", "10.0.0.254"
SUBNET = Range(4, 0x0A000000, 0x0A0000FF)


def at(text: str) -> Address:
    return parse_address(text, field="")


class Scene:
    """The groups web (two endpoints) with the policy p and client (one), an endpoint in no group, and two hosts."""

    def __init__(self, node: NodeName = NODE) -> None:
        self.engine = Engine()
        self.policy_map = PolicyMap(self.engine, tenant=DEFAULT, node=node)
        self.policy_map.set_tenant_subnets([SUBNET], [at(GATEWAY)])
        self.put(
            Host(node="n1", addresses=(HOST,)),
            Host(node="n2", addresses=(OTHER_HOST,)),
            Group(tenant=DEFAULT, name=GroupName("web"), network=NET, policies=(PolicyName("p"),)),
            Group(tenant=DEFAULT, name=GroupName("client"), network=NET),
            endpoint("w1", "web", WEB, "n1"),
            endpoint("w2", "web", WEB_2, "n2"),
            endpoint("c1", "client", CLIENT, "n1"),
            endpoint("e1", "", UNGROUPED, "n2"),
        )

    def put(self, *objects: PolicyObject) -> None:
        for value in objects:
            self.policy_map.note(self.engine.put(value))
        self.policy_map.refresh()

    def policy(self, *rules: Rule, audit: bool = False) -> None:
        self.put(Policy(tenant=DEFAULT, name=PolicyName("p"), mode="audit" if audit else "enforce"), *rules)

    def verdict(self, source: str, target: str = WEB, *, protocol: int = 6, port: int = 80) -> tuple[str, str]:
        """The action and the rule that decide at the destination."""
        _, ingress = self.policy_map.lookup(at(source), at(target), protocol=protocol, port=port)
        return ingress.action, ingress.rule.rpartition("/")[2]

    def identity(self, address: str) -> int:
        return PolicyLookup(self.policy_map.state_items).identity(at(address))

    def entries(self) -> list[PolicyEntry]:
        return [item for item in self.policy_map.state_items if isinstance(item, PolicyEntry)]


def endpoint(name: str, group: str, address: str, node: str) -> Endpoint:
    return Endpoint(
        tenant=DEFAULT, network=NET, endpoint_id=EndpointId(name), group=group, ip_address=address, host=node
    )


def rule(name: str, /, **members: object) -> Rule:
    fields = {"tenant": DEFAULT, "policy": PolicyName("p"), "rule_id": RuleId(name), "direction": "in"} | members
    return Rule(**({"action": "deny"} | fields))  # type: ignore[arg-type]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_without_policies_only_workloads_of_this_node_have_an_identity(scene: Scene) -> None:
    """The datapath opens a port when its address has an identity; no other address needs one."""
    items = list(scene.policy_map.state_items)
    assert {item.address for item in items if isinstance(item, IpIdentity)} == {at(WEB), at(CLIENT)}
    assert len(items) == 2
    assert all(item.identity & WORKLOAD for item in items if isinstance(item, IpIdentity))
    assert scene.verdict(CLIENT) == ("allow", "default")


def test_the_first_policy_gives_every_address_an_identity_and_removing_it_takes_them_back(scene: Scene) -> None:
    before = set(scene.policy_map.state_items)
    scene.policy(rule("1"))
    known = {item.address for item in scene.policy_map.state_items if isinstance(item, IpIdentity)}
    assert known == {at(text) for text in (WEB, WEB_2, CLIENT, UNGROUPED, HOST, OTHER_HOST)}
    scene.policy_map.note(scene.engine.remove_policy((DEFAULT, PolicyName("p"))))
    scene.policy_map.refresh()
    assert scene.policy_map.state_items == before


def test_workloads_that_no_rule_tells_apart_share_an_identity(scene: Scene) -> None:
    scene.policy(rule("1", protocol="tcp", port=80))
    assert scene.identity(WEB) == scene.identity(WEB_2)
    assert scene.identity(CLIENT) == scene.identity(UNGROUPED) != scene.identity(WEB)
    scene.put(rule("2", from_endpoint_group="client"))
    assert scene.identity(CLIENT) != scene.identity(UNGROUPED)
    scene.put(rule("3", to_ip_address=WEB))
    assert scene.identity(WEB) != scene.identity(WEB_2)


def test_a_rule_for_any_peer_becomes_entries_without_a_remote_identity(scene: Scene) -> None:
    scene.policy(rule("1", protocol="tcp", port=80))
    shared = [entry for entry in scene.entries() if entry.remote is None]
    assert {(entry.protocol, entry.ports, bool(entry.verdict_id & VERDICT_DENY)) for entry in shared} == {
        (None, None, False),
        (6, (80, 80), True),
    }
    assert scene.verdict(WORLD) == ("deny", "1")
    assert scene.verdict(WORLD, port=81) == ("allow", "default")


def test_deny_beats_allow_of_the_same_priority_and_the_greater_priority_beats_both(scene: Scene) -> None:
    scene.policy(rule("1", action="allow", from_endpoint_group="client"), rule("2", protocol="tcp"))
    assert scene.verdict(CLIENT) == ("deny", "2")
    assert scene.verdict(CLIENT, protocol=17) == ("allow", "1")
    scene.put(rule("3", action="allow", priority=2, from_endpoint_group="client", protocol="tcp", port=80))
    assert scene.verdict(CLIENT) == ("allow", "3")
    assert scene.verdict(CLIENT, port=81) == ("deny", "2")
    assert scene.verdict(UNGROUPED) == ("deny", "2")


def test_icmp_matches_both_address_families(scene: Scene) -> None:
    scene.policy(rule("1", protocol="icmp"))
    assert {entry.protocol for entry in scene.entries() if entry.verdict_id & VERDICT_DENY} == {1, 58}


def test_a_group_that_does_not_exist_matches_nothing(scene: Scene) -> None:
    """W23: for a deny rule too."""
    scene.policy(rule("1", from_endpoint_group="gone"))
    assert {scene.verdict(text) for text in (CLIENT, UNGROUPED, WORLD)} == {("allow", "default")}
    scene.put(endpoint("e1", "gone", UNGROUPED, "n2"), Group(tenant=DEFAULT, name=GroupName("gone"), network=NET))
    assert scene.verdict(UNGROUPED) == ("deny", "1")


def test_an_audit_policy_denies_nothing_and_reports_what_it_would_deny(scene: Scene) -> None:
    scene.policy(rule("1", from_endpoint_group="client"), audit=True)
    _, ingress = scene.policy_map.lookup(at(CLIENT), at(WEB), protocol=6, port=80)
    assert (ingress.action, ingress.rule, ingress.audit_deny) == (Action.ALLOW, "weft/default", "contiv/default/p/1")
    assert not any(
        item.verdict_id & VERDICT_DENY
        for item in scene.policy_map.state_items
        if isinstance(item, PolicyEntry | VerdictCounter)
    )
    assert scene.policy_map.lookup(at(UNGROUPED), at(WEB), protocol=6, port=80)[1].audit_deny is None


def test_the_host_of_the_own_node_always_reaches_a_workload(scene: Scene) -> None:
    scene.policy(rule("1"))
    assert scene.verdict(HOST) == ("allow", "own-host")
    assert scene.verdict(OTHER_HOST) == ("deny", "1")
    assert not scene.identity(HOST) & WORKLOAD
    other = Scene(NodeName("n2"))
    other.policy(rule("1"))
    assert other.verdict(OTHER_HOST, WEB_2) == ("allow", "own-host")
    assert other.verdict(HOST, WEB_2) == ("deny", "1")


def test_an_unknown_address_in_a_tenant_subnet_has_an_unknown_identity_but_a_gateway_has_none(scene: Scene) -> None:
    scene.policy(rule("1", from_ip_address="10.0.0.0/25"))
    assert scene.identity(UNKNOWN) & UNKNOWN_IDENTITY
    assert scene.identity("10.0.0.200") & UNKNOWN_IDENTITY
    assert scene.identity(UNKNOWN) != scene.identity("10.0.0.200")
    assert scene.identity(GATEWAY) == 0
    assert scene.identity(WORLD) == 0
    assert scene.verdict(UNKNOWN) == ("deny", "1")
    assert scene.verdict("10.0.0.200") == ("allow", "default")
    scene.put(endpoint("new", "", UNKNOWN, "n1"))
    assert scene.identity(UNKNOWN) & (UNKNOWN_IDENTITY | WORKLOAD) == WORKLOAD


def test_a_change_of_subnets_changes_the_unknown_identities(scene: Scene) -> None:
    scene.policy(rule("1"))
    scene.policy_map.set_tenant_subnets([], [])
    delta = scene.policy_map.refresh()
    assert scene.identity(UNKNOWN) == 0
    assert {type(item) for item in delta.drop} == {CidrIdentity}
    assert not delta.put


def test_an_ip_block_without_its_exceptions() -> None:
    block = {"ipBlock": {"cidr": "198.51.100.0/24", "except": ["198.51.100.0/28"]}}
    policy_map = pods_with({"podSelector": {}, "ingress": [{"from": [block]}]})
    assert [verdict_for(policy_map, text) for text in ("198.51.100.17", "198.51.100.7", "203.0.113.1")] == [
        "k8s/x/p/ingress/0",
        "k8s/x/p/ingress/isolation",
        "k8s/x/p/ingress/isolation",
    ]
    ranges = {str(item.range) for item in policy_map.state_items if isinstance(item, CidrIdentity)}
    assert ranges == {"198.51.100.16-198.51.100.255"}


def test_a_named_port_resolves_on_the_destination_in_both_directions() -> None:
    policy_map = pods_with({"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]})
    assert verdict_for(policy_map, "10.0.0.2", port=8080) == "k8s/x/p/ingress/0"
    assert verdict_for(policy_map, "10.0.0.2", port=80) == "k8s/x/p/ingress/isolation"
    policy_map = pods_with({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "http"}]}]})
    egress, _ = policy_map.lookup(at("10.0.0.2"), at("10.0.0.1"), protocol=6, port=8080)
    assert egress.rule == "k8s/x/p/egress/0"
    egress, _ = policy_map.lookup(at("10.0.0.1"), at("10.0.0.2"), protocol=6, port=8080)
    assert egress.rule == "k8s/x/p/egress/isolation"


def test_an_empty_selector_matches_all_pods_of_the_namespace_and_no_others() -> None:
    policy_map = pods_with({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]})
    assert verdict_for(policy_map, "10.0.0.2") == "k8s/x/p/ingress/0"
    assert verdict_for(policy_map, "10.0.0.3") == "k8s/x/p/ingress/isolation"
    assert verdict_for(policy_map, "198.51.100.1") == "k8s/x/p/ingress/isolation"


def pods_with(spec: dict[str, object]) -> PolicyMap:
    """Pods a (8080 is its port `http`) and b of namespace x and c of y, and a policy of x."""
    engine = Engine([Namespace(name="x"), Namespace(name="y")])
    engine.put(Pod(namespace="x", name="a", ips=("10.0.0.1",), ports=(PodPort("http", 6, 8080),), node=NODE))
    engine.put(Pod(namespace="x", name="b", ips=("10.0.0.2",), node=NODE))
    engine.put(Pod(namespace="y", name="c", ips=("10.0.0.3",), node=NODE))
    engine.put(read_network_policy({"metadata": {"name": "p", "namespace": "x"}, "spec": spec}))
    policy_map = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    policy_map.refresh()
    return policy_map


def verdict_for(policy_map: PolicyMap, source: str, *, port: int = 80) -> str:
    """The rule that decides at pod a."""
    return policy_map.lookup(at(source), at("10.0.0.1"), protocol=6, port=port)[1].rule


def test_there_are_no_entries_between_workloads_of_other_nodes() -> None:
    """Their packets never pass this node; entries would be the product of all classes (docs/adr/0007)."""
    engine = Engine([Namespace(name="x", labels={"team": "a"})])
    for number in range(1, 21):
        label = {"app": str(number)}
        engine.put(Pod(namespace="x", name=f"p{number}", labels=label, ips=(f"10.0.0.{number}",), node="n9"))
        spec = {"podSelector": {"matchLabels": label}, "ingress": [{"from": [{"podSelector": {}}]}]}
        engine.put(read_network_policy({"metadata": {"name": f"n{number}", "namespace": "x"}, "spec": spec}))
    policy_map = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    policy_map.refresh()
    assert pairs(policy_map) == set()
    here = Pod(namespace="x", name="p1", labels={"app": "1"}, ips=("10.0.0.1",), node=NODE)
    policy_map.note(engine.put(here))
    policy_map.refresh()
    assert len(pairs(policy_map)) == 20 + 19  # to it from each class, and to each other class from it
    assert verdict_for(policy_map, "10.0.0.2") == "k8s/x/n1/ingress/0"
    policy_map.note(engine.remove_pod("x", "p1"))
    policy_map.refresh()
    assert pairs(policy_map) == set()


def pairs(policy_map: PolicyMap) -> set[tuple[int, int]]:
    """The pairs of identities that have entries of their own."""
    return {
        (item.local, item.remote)
        for item in policy_map.state_items
        if isinstance(item, PolicyEntry) and item.remote is not None
    }


def test_a_retired_verdict_id_stays_resolvable_for_a_while(scene: Scene) -> None:
    """The drop log may report a drop after its rule was removed."""
    scene.policy(rule("1"))
    (number,) = (
        item.verdict_id
        for item in scene.policy_map.state_items
        if isinstance(item, VerdictCounter) and item.verdict_id & VERDICT_DENY
    )
    scene.policy_map.note(scene.engine.remove_rule((DEFAULT, PolicyName("p"), RuleId("1"))))
    scene.policy_map.refresh()
    assert VerdictCounter(DEFAULT, number) not in scene.policy_map.state_items
    assert scene.policy_map.verdicts[number].rule == "contiv/default/p/1"


def test_a_change_rewrites_only_what_it_affects(scene: Scene) -> None:
    scene.policy(rule("1", from_endpoint_group="client", protocol="tcp"), rule("2", from_ip_address="198.51.100.0/24"))
    scene.policy_map.note(scene.engine.put(rule("3", from_endpoint_group="client", protocol="udp")))
    delta = scene.policy_map.refresh()
    assert not delta.drop
    assert sorted(type(item).__name__ for item in delta.put) == ["PolicyEntry", "VerdictCounter"]
    scene.policy_map.note(scene.engine.put(endpoint("w3", "web", "10.0.0.5", "n1")))
    delta = scene.policy_map.refresh()
    assert [type(item) for item in delta.put] == [IpIdentity]
    assert not delta.drop


def overlapping_rules(count: int) -> list[dict[str, object]]:
    """Rules of which every two overlap, in addresses and in ports, and none covers another."""
    return [
        {
            "from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"172.{16 + (i >> 8)}.{i & 255}.0/24"]}}],
            "ports": [{"protocol": "TCP", "port": 1000 + i, "endPort": 1000 + count + i}],
        }
        for i in range(count)
    ]


def kube_policy(rules: list[dict[str, object]]) -> PolicyObject:
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": rules}
    return read_network_policy({"metadata": {"name": "p", "namespace": "ns"}, "spec": spec})


@pytest.mark.parametrize("count", [12, 200])
def test_H6_overlapping_rules_give_the_verdicts_of_the_engine(count: int) -> None:
    """500 of them took a minute. A dozen is evaluated rule by rule, hundreds by bit masks."""
    engine = Engine([Namespace(name="ns"), Pod(namespace="ns", name="web", ips=(WEB,), node="n1")])
    policy_map = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    policy_map.note(engine.put(kube_policy(overlapping_rules(count))))
    policy_map.refresh()
    for source in ("198.51.100.7", "172.16.0.1", "172.16.7.1", "172.17.3.9"):
        for port in (999, 1000, 1001, 1007, 1000 + count, 999 + 2 * count, 1000 + 2 * count):
            _, ingress = policy_map.lookup(at(source), at(WEB), protocol=6, port=port)
            deciding = engine.verdict(engine.directory.flow(source, "ns/web", protocol=6, port=port)).ingress
            assert (ingress.rule, ingress.action) == (deciding.id, deciding.action), (source, port)


def test_H6_many_cidrs_of_one_entry_are_one_identity() -> None:
    """30,000 took 44 s: each was an identity, and each identity was compared with each CIDR."""
    blocks = [{"ipBlock": {"cidr": f"100.{64 + (i >> 8)}.{i & 255}.0/25"}} for i in range(3000)]
    engine = Engine([Namespace(name="ns"), Pod(namespace="ns", name="web", ips=(WEB,), node="n1")])
    policy_map = PolicyMap(engine, tenant=DEFAULT, node=NODE)
    policy_map.note(engine.put(kube_policy([{"from": blocks}])))
    ranges = [item for item in policy_map.refresh().put if isinstance(item, CidrIdentity)]
    assert (len(ranges), len({item.identity for item in ranges})) == (3000, 1)


def test_H6_a_policy_past_the_bound_fails_closed_alone() -> None:
    """Its own pods get nothing but what other policies allow them, and other pods notice nothing."""
    engine = Engine([
        Namespace(name="ns"),
        Pod(namespace="ns", name="web", ips=(WEB,), node="n1", labels={"app": "web"}),
        Pod(namespace="ns", name="db", ips=(WEB_2,), node="n1"),
    ])  # fmt: skip
    spec = {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": overlapping_rules(2000)}
    engine.put(read_network_policy({"metadata": {"name": "big", "namespace": "ns"}, "spec": spec}))
    flow = engine.directory.flow(WORLD, "ns/web", protocol=6, port=2500)
    assert engine.verdict(flow).ingress.id == "k8s/ns/big/ingress/isolation"
    assert engine.verdict(engine.directory.flow(WORLD, "ns/db", protocol=6, port=2500)).allowed
    small = {"podSelector": {}, "ingress": [{"ports": [{"port": 2500}]}]}
    engine.put(read_network_policy({"metadata": {"name": "small", "namespace": "ns"}, "spec": small}))
    assert engine.verdict(flow).allowed
