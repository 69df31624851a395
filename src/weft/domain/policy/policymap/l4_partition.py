"""Evaluates an ordered rule list between two identities into one verdict per protocol and port range."""

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


class Verdict(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The action for a packet in one direction, and the rule that decides it.

    `audit_deny` is the rule that would deny an allowed packet if all audit rules were enforced, else None.
    """

    rule: RuleId
    action: Action
    direction: Direction
    audit_deny: RuleId | None = None


class L4Match(NamedTuple):
    """Any traffic, one protocol, or a port range of it."""

    protocol: int | None = None
    ports: tuple[int, int] | None = None


ANY_L4 = L4Match()


class _Span(NamedTuple):
    """A port range matched by the rule at `rule_index` in order of precedence."""

    first: int
    last: int
    rule_index: int


def verdict_of(rules: Sequence[FlowRule], direction: Direction) -> Verdict:
    """Return the verdict of rules that all match, given in order of precedence."""
    deciding_rule = decide((rule for rule in rules if not rule.audit), _always, direction=direction)
    audit_deny = None
    # Rarely true: without audit rules a second evaluation would give the same.
    if deciding_rule.action is Action.ALLOW and any(rule.audit for rule in rules):
        enforced = decide(rules, _always, direction=direction)
        audit_deny = enforced.id if enforced.action is Action.DENY else None
    return Verdict(rule=deciding_rule.id, action=deciding_rule.action, direction=direction, audit_deny=audit_deny)


def l4_verdicts(
    rules: Sequence[FlowRule], *, direction: Direction, ports: Iterable[PodPort]
) -> Iterator[tuple[L4Match, Verdict]]:
    """Yield the verdict for any traffic, then for protocols that differ from it, then for ports that differ from their
    protocol. `rules` are in order of precedence; `ports` are the named ports of the destination.
    """
    any_l4 = [index for index, rule in enumerate(rules) if rule.services is None]

    def evaluate(indexes: Iterable[int]) -> Verdict:
        return verdict_of([rules[index] for index in sorted([*any_l4, *indexes])], direction)

    default = evaluate(())
    yield ANY_L4, default
    for protocol, spans in _spans_by_protocol(rules, tuple(ports)).items():
        all_ports = {span.rule_index for span in spans if (span.first, span.last) == (0, MAX_PORT)}
        of_protocol = evaluate(all_ports)
        if of_protocol != default:
            yield L4Match(protocol), of_protocol
        # If every span covers all ports, there are no ranges to tell apart.
        if len(all_ports) < len(spans):
            for first, last, verdict in _joined(
                (first, last, evaluate(indexes)) for first, last, indexes in _partition(spans)
            ):
                # A range with its protocol's verdict needs no entry: the lookup falls back to the protocol.
                if verdict != of_protocol:
                    yield L4Match(protocol, (first, last)), verdict


def _always(_: FlowRule) -> bool:
    return True


def _spans_by_protocol(rules: Sequence[FlowRule], ports: Sequence[PodPort]) -> dict[int, list[_Span]]:
    spans: dict[int, list[_Span]] = defaultdict(list)
    for index, rule in enumerate(rules):
        for service in rule.services or ():
            if service.name:
                # A named port resolves on the destination. Without that name there it matches nothing.
                for port in ports:
                    if port.name == service.name and port.protocol in service.protocols:
                        spans[port.protocol].append(_Span(port.port, port.port, index))
                continue
            for protocol in service.protocols:
                if protocol in PORTED:
                    spans[protocol].append(_Span(service.first, service.last, index))
                elif service.first == 0:
                    # Packets of protocols without ports are evaluated with port 0, so only ranges from 0 match.
                    spans[protocol].append(_Span(0, MAX_PORT, index))
    return spans


def _partition(spans: Sequence[_Span]) -> Iterator[tuple[int, int, set[int]]]:
    """Yield first port, last port and rule indexes of each maximal run that the same spans cover; skip uncovered."""
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for span in spans:
        begins[span.first].append(span.rule_index)
        ends[span.last + 1].append(span.rule_index)
    # A count per rule, because one rule may list overlapping ranges.
    depth: dict[int, int] = defaultdict(int)
    edges = sorted(begins.keys() | ends.keys())
    for first, after in pairwise(edges):
        for index in ends.get(first, ()):
            depth[index] -= 1
            if not depth[index]:
                del depth[index]
        for index in begins.get(first, ()):
            depth[index] += 1
        if depth:
            yield first, after - 1, set(depth)


def _joined(ranges: Iterable[tuple[int, int, Verdict]]) -> list[tuple[int, int, Verdict]]:
    """Merge adjacent ranges with the same verdict."""
    joined: list[tuple[int, int, Verdict]] = []
    for first, last, verdict in ranges:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == verdict:
            joined[-1] = joined[-1][0], last, verdict
        else:
            joined.append((first, last, verdict))
    return joined
