"""What rules say about services, against asking about each service on its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import PORTED
from weft.domain.policy.model.rules import Action, Direction, FlowRule, PortMatch, RuleId, Tier
from weft.domain.policy.policymap.l4_partition import EVERYTHING, Outcome, Service, outcome_of, outcomes_of

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
            dry_run=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    return sorted(rules, key=lambda rule: rule.order)


def speaks(rule: FlowRule, protocol: int, port: int) -> bool:
    return rule.services is None or any(
        protocol in each.protocols
        and (PodPort(each.name, protocol, port) in NAMED if each.name else each.first <= port <= each.last)
        for each in rule.services
    )


def found(rows: dict[Service, Outcome], protocol: int, port: int) -> Outcome:
    """The narrowest row that fits; two rows of ports never do."""
    fitting = [
        outcome for (of, ports), outcome in rows.items() if of == protocol and ports and ports[0] <= port <= ports[1]
    ]
    assert len(fitting) <= 1
    return fitting[0] if fitting else rows.get(Service(protocol), rows[EVERYTHING])


@given(rule_lists())
def test_every_service_has_the_outcome_of_the_rules_about_it(rules: list[FlowRule]) -> None:
    given_rows = list(outcomes_of(rules, direction=Direction.INGRESS, ports=NAMED))
    rows = dict(given_rows)
    assert len(rows) == len(given_rows)
    for protocol in (6, 17, 132, 1, 58, 47, 99):
        for port in PORTS if protocol in PORTED else [0]:
            about = [rule for rule in rules if speaks(rule, protocol, port)]
            assert found(rows, protocol, port) == outcome_of(about, Direction.INGRESS)


def allow(name: str, **members: object) -> FlowRule:
    given_members = {"tier": Tier.GROUP, "direction": Direction.INGRESS, "action": Action.ALLOW} | members
    return FlowRule(id=RuleId(name), **given_members)  # type: ignore[arg-type]


def test_neighbours_with_the_same_outcome_are_one_row() -> None:
    wide = allow("wide", priority=2, services=(PortMatch(protocols=(6,), first=10, last=20),))
    narrow = allow("narrow", services=(PortMatch(protocols=(6,), first=15, last=15),))
    rows = dict(outcomes_of([wide, narrow], direction=Direction.INGRESS, ports=()))
    assert set(rows) == {EVERYTHING, Service(6, (10, 20))}


def test_a_dry_run_that_would_refuse_is_named_and_one_that_would_not_is_not() -> None:
    refuses = allow("refuses", action=Action.DENY, dry_run=True)
    assert outcome_of([refuses], Direction.INGRESS).would == "refuses"
    assert outcome_of([allow("more", dry_run=True)], Direction.INGRESS).would is None
    enforced = allow("enforced", action=Action.DENY)
    assert outcome_of([enforced, refuses], Direction.INGRESS) == Outcome(
        RuleId("enforced"), Action.DENY, Direction.INGRESS
    )
