"""What some rules, which all speak about the same two ends, say about each service between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from weft.domain.model import PodPort
from weft.domain.policy.engine.decide import decide
from weft.domain.policy.model.protocols import MAX_PORT, PORTED
from weft.domain.policy.model.rules import Action, Direction, FlowRule, RuleId


class Outcome(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """What becomes of a packet and by which rule.

    `would` is the rule that would refuse what passes if the dry runs were in force, else None.
    """

    rule: RuleId
    action: Action
    direction: Direction
    would: RuleId | None = None


class Service(NamedTuple):
    """Everything, a protocol, or some ports of it."""

    protocol: int | None = None
    ports: tuple[int, int] | None = None


EVERYTHING = Service()


class _Span(NamedTuple):
    """Ports that the rule at `place` in the order of precedence speaks about."""

    first: int
    last: int
    place: int


def outcome_of(rules: Sequence[FlowRule], direction: Direction) -> Outcome:
    """What rules that all match decide; they are in order of precedence."""
    deciding = decide((rule for rule in rules if not rule.dry_run), _always, direction=direction)
    would = None
    if deciding.action is Action.ALLOW and any(rule.dry_run for rule in rules):
        enforced = decide(rules, _always, direction=direction)
        would = enforced.id if enforced.action is Action.DENY else None
    return Outcome(rule=deciding.id, action=deciding.action, direction=direction, would=would)


def outcomes_of(
    rules: Sequence[FlowRule], *, direction: Direction, ports: Iterable[PodPort]
) -> Iterator[tuple[Service, Outcome]]:
    """The outcome for everything, then those of the protocols that differ from it, and of the ports that differ from
    their protocol. `rules` are in order of precedence, `ports` are those that the target gives a name.
    """
    always = [place for place, rule in enumerate(rules) if rule.services is None]

    def judged(places: Iterable[int]) -> Outcome:
        return outcome_of([rules[place] for place in sorted([*always, *places])], direction)

    everything = judged(())
    yield EVERYTHING, everything
    for protocol, spans in _spans_by_protocol(rules, tuple(ports)).items():
        whole = {span.place for span in spans if (span.first, span.last) == (0, MAX_PORT)}
        of_protocol = judged(whole)
        if of_protocol != everything:
            yield Service(protocol), of_protocol
        if len(whole) < len(spans):
            for first, last, outcome in _joined((first, last, judged(places)) for first, last, places in _cells(spans)):
                if outcome != of_protocol:
                    yield Service(protocol, (first, last)), outcome


def _always(_: FlowRule) -> bool:
    return True


def _spans_by_protocol(rules: Sequence[FlowRule], ports: Sequence[PodPort]) -> dict[int, list[_Span]]:
    spans: dict[int, list[_Span]] = defaultdict(list)
    for place, rule in enumerate(rules):
        for service in rule.services or ():
            if service.name:
                for port in ports:
                    if port.name == service.name and port.protocol in service.protocols:
                        spans[port.protocol].append(_Span(port.port, port.port, place))
                continue
            for protocol in service.protocols:
                if protocol in PORTED:
                    spans[protocol].append(_Span(service.first, service.last, place))
                elif service.first == 0:
                    spans[protocol].append(_Span(0, MAX_PORT, place))
    return spans


def _cells(spans: Sequence[_Span]) -> Iterator[tuple[int, int, set[int]]]:
    """First port, last port and places for each run of ports about which the same spans speak, where any does."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for span in spans:
        begins[span.first].append(span.place)
        ends[span.last + 1].append(span.place)
    depth: dict[int, int] = defaultdict(int)
    edges = sorted(begins.keys() | ends.keys())
    for first, after in pairwise(edges):
        for place in ends.get(first, ()):
            depth[place] -= 1
            if not depth[place]:
                del depth[place]
        for place in begins.get(first, ()):
            depth[place] += 1
        if depth:
            yield first, after - 1, set(depth)


def _joined(cells: Iterable[tuple[int, int, Outcome]]) -> list[tuple[int, int, Outcome]]:
    """Neighbours with the same outcome as one."""
    joined: list[tuple[int, int, Outcome]] = []
    for first, last, outcome in cells:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == outcome:
            joined[-1] = joined[-1][0], last, outcome
        else:
            joined.append((first, last, outcome))
    return joined
