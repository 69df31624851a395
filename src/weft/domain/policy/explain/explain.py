"""Explains a verdict: the deciding rule, the rules considered, and the nearest rule that would change the verdict.

All values are ready for JSON. The rules considered are those evaluated until one decided, in order, each with the
conditions that did not match. The *nearest* rule is, of the rules with the opposite action, the one with the fewest
obstacles: a condition that does not match, audit mode, or a rule that takes precedence; at a tie the first in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.domain.policy.engine.decide import Flow, Miss, builtin_rule_for, decide, misses
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.protocols import service_name
from weft.domain.policy.model.rules import DEFAULT_ALLOW_ID, Action, Direction, FlowRule, RuleId

_Missed = dict[RuleId, tuple[str, ...]]


class Considered(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An evaluated rule. It matches if `misses` is empty; an audit rule never decides."""

    rule: RuleId
    action: Action
    tier: str
    priority: int
    misses: tuple[str, ...]
    audit: bool = False


class Side(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The verdict at one end. `audit` is the rule that would decide instead if every audit rule were enforced."""

    identity: str
    direction: Direction
    allowed: bool
    decided_by: RuleId
    considered: tuple[Considered, ...]
    nearest: Considered | None = None
    audit: Considered | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The explained verdict on a flow.

    `decidedBy` is the rule that blocks. If both ends allow, it is a policy rule rather than the default, and ingress
    rather than egress.
    """

    source: str
    target: str
    service: str
    version: int
    allowed: bool
    decided_by: RuleId
    nearest: Considered | None
    egress: Side
    ingress: Side

    def __str__(self) -> str:
        verdict = "allowed" if self.allowed else "blocked"
        text = f"{self.source} -> {self.target} {self.service}: {verdict} by {self.decided_by}"
        if self.nearest is None:
            return text
        change = "block" if self.allowed else "allow"
        return f"{text}; nearest to {change} it: {self.nearest.rule}, but {' and '.join(self.nearest.misses)}"


def explain(engine: Engine, flow: Flow) -> Explanation:
    """Return the verdict on a flow with its reasons."""
    egress, ingress = (_explain_side(engine, flow, direction) for direction in (Direction.EGRESS, Direction.INGRESS))
    allowed = egress.allowed and ingress.allowed
    deciding_sides = [side for side in (egress, ingress) if side.allowed is allowed]
    if allowed:
        deciding_sides.sort(key=lambda side: (side.decided_by == DEFAULT_ALLOW_ID, side.direction is Direction.EGRESS))
    # Either end can block an allowed flow. Of two ends that block, the first has to change before the second matters.
    nearest = [side.nearest for side in (deciding_sides if allowed else deciding_sides[:1]) if side.nearest is not None]
    return Explanation(
        source=flow.source.key,
        target=flow.target.key,
        service=service_name(flow.protocol, flow.port),
        version=flow.version,
        allowed=allowed,
        decided_by=deciding_sides[0].decided_by,
        # At a tie `min` keeps the first: that of the side which is reported as deciding.
        nearest=min(nearest, key=lambda rule: len(rule.misses), default=None),
        egress=egress,
        ingress=ingress,
    )


def _explain_side(engine: Engine, flow: Flow, direction: Direction) -> Side:
    local = flow.ends(direction)[0]
    builtin = builtin_rule_for(flow, direction)
    rules = () if builtin else engine.rule_set(local.key).of(direction)
    missed = {rule.id: _describe_misses(rule, flow, misses(rule, flow, engine.is_member)) for rule in rules}
    evaluated: list[FlowRule] = []

    def is_match(rule: FlowRule) -> bool:
        evaluated.append(rule)
        return not rule.audit and not missed[rule.id]

    decider = builtin or decide(rules, is_match, direction=direction)
    considered = tuple(_considered(rule, missed[rule.id]) for rule in evaluated)
    # The same evaluation with all audit rules enforced.
    enforced = builtin or decide(rules, lambda rule: not missed[rule.id], direction=direction)
    return Side(
        identity=local.key,
        direction=direction,
        allowed=decider.action is Action.ALLOW,
        decided_by=decider.id,
        considered=considered,
        nearest=_nearest(rules, missed, decider),
        audit=None if enforced == decider else _considered(enforced, missed.get(enforced.id, ())),
    )


def _describe_misses(rule: FlowRule, flow: Flow, missed: Iterable[Miss]) -> tuple[str, ...]:
    local, remote = flow.ends(rule.direction)
    sentences = []
    for miss in missed:
        match miss:
            case Miss.LOCAL:
                sentences.append(f"{local.key} does not match {rule.local}")
            case Miss.PEER:
                sentences.append(f"{remote.key} does not match {_alternatives(rule.peers)}")
            case Miss.SERVICE:
                service = service_name(flow.protocol, flow.port)
                sentences.append(f"{service} does not match {_alternatives(rule.services)}")
    return tuple(sentences)


def _alternatives(matches: Iterable[object] | None) -> str:
    # An empty list matches nothing.
    return " or ".join(map(str, matches or ())) or "an empty list"


def _nearest(rules: tuple[FlowRule, ...], missed: _Missed, decider: FlowRule) -> Considered | None:
    nearest: Considered | None = None
    # A pass rule never decides by itself, so it cannot be the nearest.
    opposed = (rule for rule in rules if rule.action is not Action.PASS and rule.action is not decider.action)
    for rule in sorted(opposed, key=lambda rule: len(missed[rule.id])):
        # Sorted by misses alone, so no later rule can have fewer obstacles. This avoids most of the evaluations below.
        if nearest is not None and len(nearest.misses) <= len(missed[rule.id]):
            break
        obstacles = missed[rule.id]
        if rule.audit:
            obstacles += ("the rule is in audit mode",)
        if not _would_decide(rule, rules, missed):
            obstacles += (f"{decider.id} takes precedence",)
        if nearest is None or len(obstacles) < len(nearest.misses):
            nearest = _considered(rule, obstacles)
    return nearest


def _would_decide(candidate: FlowRule, rules: tuple[FlowRule, ...], missed: _Missed) -> bool:
    """Return whether the rule would decide if it matched and nothing else changed."""
    decider = decide(
        rules,
        # Audit rules count as absent, except the candidate: its audit mode is listed as an obstacle of its own.
        lambda rule: rule is candidate or (not rule.audit and not missed[rule.id]),
        direction=candidate.direction,
    )
    return decider is candidate


def _considered(rule: FlowRule, missed: tuple[str, ...]) -> Considered:
    return Considered(
        rule=rule.id,
        action=rule.action,
        tier=rule.tier.name.lower(),
        priority=rule.priority,
        misses=missed,
        audit=rule.audit,
    )
