"""Why a flow passes or not: the deciding rule, the rules considered, and the nearest rule that would change it.

All values are ready for JSON. The rules considered are those asked until one decided, in order, each with what kept it
from matching. The *nearest* rule is, of the rules with the opposite effect, the one that fewest things keep from
deciding: a condition that does not hold, a dry run, or a rule that outranks it; at a tie the first in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.domain.policy.engine.decide import Flow, Miss, decide, first_word, misses
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.protocols import service_name
from weft.domain.policy.model.rules import DEFAULT_ALLOW_ID, Action, Direction, FlowRule, RuleId

_Missed = dict[RuleId, tuple[str, ...]]


class Considered(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A rule as it was looked at. It matches when `misses` is empty; a rule of a dry run does not decide even then."""

    rule: RuleId
    action: Action
    tier: str
    priority: int
    misses: tuple[str, ...]
    dry_run: bool = False


class Side(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One end's decision. `dry_run` is the rule that would decide instead if every dry run were in force."""

    identity: str
    direction: Direction
    allowed: bool
    decided_by: RuleId
    considered: tuple[Considered, ...]
    nearest: Considered | None = None
    dry_run: Considered | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole answer. `decidedBy` is the rule that blocks, or where both ends allow, the more telling of the two."""

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
    """The verdict on a flow, with its reasons."""
    egress, ingress = (_explain_side(engine, flow, direction) for direction in (Direction.EGRESS, Direction.INGRESS))
    allowed = egress.allowed and ingress.allowed
    telling = [side for side in (egress, ingress) if side.allowed is allowed]
    if allowed:
        telling.sort(key=lambda side: (side.decided_by == DEFAULT_ALLOW_ID, side.direction is Direction.EGRESS))
    nearest = [side.nearest for side in (telling if allowed else telling[:1]) if side.nearest is not None]
    return Explanation(
        source=flow.source.key,
        target=flow.target.key,
        service=service_name(flow.protocol, flow.port),
        version=flow.version,
        allowed=allowed,
        decided_by=telling[0].decided_by,
        nearest=min(nearest, key=lambda rule: len(rule.misses), default=None),
        egress=egress,
        ingress=ingress,
    )


def _explain_side(engine: Engine, flow: Flow, direction: Direction) -> Side:
    local = flow.ends(direction)[0]
    own = first_word(flow, direction)
    rules = () if own else engine.rule_set(local.key).of(direction)
    missed = {rule.id: _in_words(rule, flow, misses(rule, flow, engine.is_member)) for rule in rules}
    asked: list[FlowRule] = []

    def speaks(rule: FlowRule) -> bool:
        asked.append(rule)
        return not rule.dry_run and not missed[rule.id]

    decider = own or decide(rules, speaks, direction=direction)
    considered = tuple(_considered(rule, missed[rule.id]) for rule in asked)
    shadow = own or decide(rules, lambda rule: not missed[rule.id], direction=direction)
    return Side(
        identity=local.key,
        direction=direction,
        allowed=decider.action is Action.ALLOW,
        decided_by=decider.id,
        considered=considered,
        nearest=_nearest(rules, missed, decider),
        dry_run=None if shadow == decider else _considered(shadow, missed.get(shadow.id, ())),
    )


def _in_words(rule: FlowRule, flow: Flow, missed: Iterable[Miss]) -> tuple[str, ...]:
    local, remote = flow.ends(rule.direction)
    words = []
    for miss in missed:
        match miss:
            case Miss.LOCAL:
                words.append(f"{local.key} is not {rule.local}")
            case Miss.PEER:
                words.append(f"{remote.key} is not {_either(rule.peers)}")
            case Miss.SERVICE:
                words.append(f"{service_name(flow.protocol, flow.port)} is not {_either(rule.services)}")
    return tuple(words)


def _either(parts: Iterable[object] | None) -> str:
    return " or ".join(map(str, parts or ())) or "possible"


def _nearest(rules: tuple[FlowRule, ...], missed: _Missed, decider: FlowRule) -> Considered | None:
    nearest: Considered | None = None
    opposed = (rule for rule in rules if rule.action is not Action.PASS and rule.action is not decider.action)
    for rule in sorted(opposed, key=lambda rule: len(missed[rule.id])):
        if nearest is not None and len(nearest.misses) <= len(missed[rule.id]):
            break
        obstacles = missed[rule.id]
        if rule.dry_run:
            obstacles += ("it is a dry run",)
        if not _would_decide(rule, rules, missed):
            obstacles += (f"{decider.id} outranks it",)
        if nearest is None or len(obstacles) < len(nearest.misses):
            nearest = _considered(rule, obstacles)
    return nearest


def _would_decide(candidate: FlowRule, rules: tuple[FlowRule, ...], missed: _Missed) -> bool:
    """Whether the rule would decide if it matched and all else stayed as it is."""
    decider = decide(
        rules,
        lambda rule: rule is candidate or (not rule.dry_run and not missed[rule.id]),
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
        dry_run=rule.dry_run,
    )
