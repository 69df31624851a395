"""L4 verdicts of a rule list, compared with evaluating every protocol and port on its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import PORTED
from weft.domain.policy.model.rules import Action, Direction, FlowRule, PortMatch, RuleId, Tier
from weft.domain.policy.policymap.l4_partition import ANY_L4, L4Match, Verdict, l4_verdicts, verdict_of

PORTS = [0, 1, 2, 79, 80, 81, 65534, 65535]
NAMED = (PodPort("http", 6, 80), PodPort("http", 17, 81), PodPort("dns", 17, 2))


@st.composite
def matches(draw: st.DrawFn) -> PortMatch:
    protocols = draw(st.sampled_from([(6,), (17,), (1, 58), (47,), PORTED]))
    if protocols[0] not in PORTED or draw(st.booleans()):
        return PortMatch(protocols=protocols)
    if draw(st.booleans()):
        return PortMatch(protocols=protocols, name=draw(st.sampled_from(["http", "dns", "none"])))
    first, last = sorted((draw(st.sampled_from(PORTS)), draw(st.sampled_from(PORTS))))
    return PortMatch(protocols=protocols, first=first, last=last)


@st.composite
def rule_lists(draw: st.DrawFn) -> list[FlowRule]:
    rules = [
        FlowRule(
            id=RuleId(str(number)),
            tier=draw(st.sampled_from(Tier)),
            direction=Direction.INGRESS,
            action=draw(st.sampled_from(Action)),
            priority=draw(st.integers(0, 2)),
            services=draw(st.none() | st.lists(matches(), max_size=2).map(tuple)),
            audit=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    return sorted(rules, key=lambda rule: rule.order)


def matches_rule(rule: FlowRule, protocol: int, port: int) -> bool:
    return rule.services is None or any(
        protocol in each.protocols
        and (PodPort(each.name, protocol, port) in NAMED if each.name else each.first <= port <= each.last)
        for each in rule.services
    )


def lookup(verdicts: dict[L4Match, Verdict], protocol: int, port: int) -> Verdict:
    """The most specific match; port ranges never overlap."""
    matching = [
        verdict
        for (of, ports), verdict in verdicts.items()
        if of == protocol and ports and ports[0] <= port <= ports[1]
    ]
    assert len(matching) <= 1
    return matching[0] if matching else verdicts.get(L4Match(protocol), verdicts[ANY_L4])


@given(rule_lists())
def test_every_port_has_the_verdict_of_the_rules_that_match_it(rules: list[FlowRule]) -> None:
    yielded = list(l4_verdicts(rules, direction=Direction.INGRESS, ports=NAMED))
    verdicts = dict(yielded)
    assert len(verdicts) == len(yielded)
    for protocol in (6, 17, 132, 1, 58, 47, 99):
        for port in PORTS if protocol in PORTED else [0]:
            matched = [rule for rule in rules if matches_rule(rule, protocol, port)]
            assert lookup(verdicts, protocol, port) == verdict_of(matched, Direction.INGRESS)


def allow(name: str, **members: object) -> FlowRule:
    defaults = {"tier": Tier.GROUP, "direction": Direction.INGRESS, "action": Action.ALLOW} | members
    return FlowRule(id=RuleId(name), **defaults)  # type: ignore[arg-type]


def test_adjacent_ranges_with_the_same_verdict_are_merged() -> None:
    wide = allow("wide", priority=2, services=(PortMatch(protocols=(6,), first=10, last=20),))
    narrow = allow("narrow", services=(PortMatch(protocols=(6,), first=15, last=15),))
    verdicts = dict(l4_verdicts([wide, narrow], direction=Direction.INGRESS, ports=()))
    assert set(verdicts) == {ANY_L4, L4Match(6, (10, 20))}


def test_only_an_audit_rule_that_would_deny_is_reported() -> None:
    denies = allow("denies", action=Action.DENY, audit=True)
    assert verdict_of([denies], Direction.INGRESS).audit_deny == "denies"
    assert verdict_of([allow("more", audit=True)], Direction.INGRESS).audit_deny is None
    enforced = allow("enforced", action=Action.DENY)
    assert verdict_of([enforced, denies], Direction.INGRESS) == Verdict(
        RuleId("enforced"), Action.DENY, Direction.INGRESS
    )
