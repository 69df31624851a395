"""Evaluates an ordered rule list between two identities into one verdict per protocol and port range.

Only the first matching rule of each tier matters (`engine.decide`). So a port range needs no list of the rules that
match it, only the first of each *layer*: the enforced rules of a tier and, with audit rules, all rules of a tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import msgspec

from weft.domain.model import PodPort
from weft.domain.policy.engine.decide import decide
from weft.domain.policy.model.protocols import MAX_PORT, PORTED
from weft.domain.policy.model.rules import Action, Direction, FlowRule, RuleId

# The most rules of which a `RuleTable` keeps bit masks by port range: 4 MiB of them at worst.
MAX_MASKED_RULES = 4096


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

L4Verdicts = tuple[tuple[L4Match, Verdict], ...]

# The index of the first matching rule of each layer; `_NONE` if none of its rules matches.
_Firsts = tuple[int, ...]
_NONE = 1 << 62


class _Span(NamedTuple):
    """A port range matched by the rule at `rule_index` in order of precedence."""

    first: int
    last: int
    rule_index: int


class _Ports(NamedTuple):
    """The rules of one protocol: those that match all its ports, and the spans of the others."""

    all_ports: list[int]
    spans: list[_Span]


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
    rules: Iterable[FlowRule], *, direction: Direction, ports: Iterable[PodPort]
) -> Iterator[tuple[L4Match, Verdict]]:
    """Yield the verdict for any traffic, then for protocols that differ from it, then for ports that differ from their
    protocol. `ports` are the named ports of the destination.
    """
    rules = tuple(rules)
    if all(rule.services is None for rule in rules):
        # Thousands of rules for addresses alone are that many small groups, so they go the short way.
        return iter(((ANY_L4, verdict_of(sorted(rules, key=_order), direction)),))
    return iter(RuleTable(rules, direction=direction, ports=ports).verdicts())


class RuleTable:
    """Rules in order of precedence, prepared to be evaluated: all of them, or many different subsets."""

    def __init__(self, rules: Iterable[FlowRule], *, direction: Direction, ports: Iterable[PodPort]) -> None:
        self._rules = sorted(rules, key=_order)
        self._direction = direction
        self._any_l4 = [index for index, rule in enumerate(self._rules) if rule.services is None]
        self._by_protocol = _ports_by_protocol(self._rules, tuple(ports))
        self._layers = _layers(self._rules)
        # The layers of each rule.
        self._layers_of: list[list[int]] = [[] for _ in self._rules]
        for number, layer in enumerate(self._layers):
            for index in layer:
                self._layers_of[index].append(number)
        # Rules that overlap have few first ones, so most ranges share their verdict with others.
        self._verdicts: dict[_Firsts, Verdict] = {}
        self._masks: _Masks | None = None

    def verdicts(self) -> L4Verdicts:
        """Return the verdicts if all rules match the remote identity."""
        base = self._firsts(self._any_l4)
        found = [(ANY_L4, self._verdict(base))]
        for protocol, (all_ports, spans) in self._by_protocol.items():
            of_protocol = self._firsts(all_ports, base)
            found += self._of_protocol(protocol, found[0][1], of_protocol, self._sweep(spans, of_protocol))
        return tuple(found)

    def verdicts_of(self, rules: Iterable[FlowRule]) -> L4Verdicts:
        """Return the verdicts if some of the rules match the remote identity. Meant for many calls, each with many
        rules: it is fast by bit masks, which take memory. `MAX_MASKED_RULES` at most.
        """
        if self._masks is None:
            self._masks = _Masks(self._rules, self._layers, self._any_l4, self._by_protocol)
        masks = self._masks
        mask = masks.of(rules)
        base = mask & masks.any_l4
        default = self._verdict(masks.firsts(base))
        found = [(ANY_L4, default)]
        for protocol, (all_ports, some_ports, cells) in masks.by_protocol.items():
            if not mask & (all_ports | some_ports):
                continue
            of_protocol = base | mask & all_ports
            # Ports that no rule distinguishes need no look at each range.
            ranges = masks.ranges(cells, mask, of_protocol) if mask & some_ports else ()
            found += self._of_protocol(protocol, default, masks.firsts(of_protocol), ranges)
        return tuple(found)

    def _of_protocol(
        self, protocol: int, default: Verdict, of_protocol: _Firsts, ranges: Iterable[tuple[int, int, _Firsts]]
    ) -> Iterator[tuple[L4Match, Verdict]]:
        verdict = self._verdict(of_protocol)
        if verdict != default:
            yield L4Match(protocol), verdict
        for first, last, of_range in _joined((first, last, self._verdict(firsts)) for first, last, firsts in ranges):
            # A range with its protocol's verdict needs no entry: the lookup falls back to the protocol.
            if of_range is not verdict and of_range != verdict:
                yield L4Match(protocol, (first, last)), of_range

    def _firsts(self, indexes: Iterable[int], base: _Firsts = ()) -> _Firsts:
        """The first of these rules in each layer, or that of `base` if it comes before."""
        firsts = list(base or (_NONE for _ in self._layers))
        for index in indexes:
            for layer in self._layers_of[index]:
                firsts[layer] = min(firsts[layer], index)
        return tuple(firsts)

    def _verdict(self, firsts: _Firsts) -> Verdict:
        found = self._verdicts.get(firsts)
        if found is None:
            # The layers overlap: the first rule of all is often the first of the enforced ones too.
            rules = [self._rules[index] for index in sorted({index for index in firsts if index != _NONE})]
            found = self._verdicts[firsts] = verdict_of(rules, self._direction)
        return found

    def _sweep(self, spans: Sequence[_Span], base: _Firsts) -> Iterator[tuple[int, int, _Firsts]]:
        """Yield first port, last port and first rules of each maximal run that the same spans cover."""
        begins: defaultdict[int, list[int]] = defaultdict(list)
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for span in spans:
            begins[span.first].append(span.rule_index)
            ends[span.last + 1].append(span.rule_index)
        # A count per rule, because one rule may list overlapping ranges.
        depth: defaultdict[int, int] = defaultdict(int)
        # The first of many rules that come and go: a heap per layer, from which ended rules are dropped when they
        # reach its top.
        heaps: list[list[int]] = [[] for _ in self._layers]
        for first, after in pairwise(sorted(begins.keys() | ends.keys())):
            for index in ends.get(first, ()):
                depth[index] -= 1
            for index in begins.get(first, ()):
                depth[index] += 1
                for layer in self._layers_of[index]:
                    heappush(heaps[layer], index)
            for heap in heaps:
                while heap and not depth[heap[0]]:
                    heappop(heap)
            yield (
                first,
                after - 1,
                tuple(min(heap[0], top) if heap else top for heap, top in zip(heaps, base, strict=True)),
            )


class _Masks:
    """The rules of a `RuleTable` as bits of integers, the first rule as the lowest bit."""

    def __init__(
        self,
        rules: Sequence[FlowRule],
        layers: Iterable[Iterable[int]],
        any_l4: Iterable[int],
        by_protocol: Mapping[int, _Ports],
    ) -> None:
        self._index = {rule: index for index, rule in enumerate(rules)}
        self._layers = [_mask(layer) for layer in layers]
        self.any_l4 = _mask(any_l4)
        # By protocol: rules for all ports, rules for some ports, and the rules for each range of ports.
        self.by_protocol: dict[int, tuple[int, int, list[tuple[int, int, int]]]] = {
            protocol: (_mask(all_ports), _mask(span.rule_index for span in spans), list(_cells(spans)))
            for protocol, (all_ports, spans) in by_protocol.items()
        }

    def of(self, rules: Iterable[FlowRule]) -> int:
        return _mask(map(self._index.__getitem__, rules))

    def firsts(self, mask: int) -> _Firsts:
        """The first rule of each layer among the rules of a mask."""
        return tuple(_lowest(mask & layer) for layer in self._layers)

    def ranges(self, cells: list[tuple[int, int, int]], mask: int, of_protocol: int) -> list[tuple[int, int, _Firsts]]:
        """The ranges of ports with the first rules of each layer."""
        if len(self._layers) != 1:
            return [(first, last, self.firsts(of_protocol | mask & cell)) for first, last, cell in cells]
        # The same without a call per range, and with ranges of the same rule merged: this is the innermost loop where
        # many rules overlap.
        found: list[tuple[int, int, _Firsts]] = []
        begin, end, lowest = 0, -1, -1
        for first, last, cell in cells:
            matching = of_protocol | mask & cell
            low = matching & -matching
            if low == lowest and first == end + 1:
                end = last
                continue
            if end >= 0:
                found.append((begin, end, (_lowest(lowest),)))
            begin, end, lowest = first, last, low
        if end >= 0:
            found.append((begin, end, (_lowest(lowest),)))
        return found


def _layers(rules: Sequence[FlowRule]) -> list[list[int]]:
    """The indexes of the enforced rules of each tier and, with audit rules, of all rules of each tier."""
    enforced: defaultdict[int, list[int]] = defaultdict(list)
    everything: defaultdict[int, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules):
        everything[rule.tier].append(index)
        if not rule.audit:
            enforced[rule.tier].append(index)
    has_audits = len(rules) > sum(map(len, enforced.values()))
    return [*enforced.values(), *(everything.values() if has_audits else ())]


def _lowest(mask: int) -> int:
    """The index of the lowest bit, which is `x & -x`."""
    return (mask & -mask).bit_length() - 1 if mask else _NONE


def _mask(indexes: Iterable[int]) -> int:
    mask = 0
    for index in indexes:
        mask |= 1 << index
    return mask


def _cells(spans: Sequence[_Span]) -> Iterator[tuple[int, int, int]]:
    """Yield first port, last port and the mask of the rules of each maximal run that the same spans cover."""
    toggles: defaultdict[int, int] = defaultdict(int)
    for first, last, index in _disjoint(spans):
        toggles[first] ^= 1 << index
        toggles[last + 1] ^= 1 << index
    mask = 0
    for first, after in pairwise(sorted(toggles)):
        mask ^= toggles[first]
        if mask:
            yield first, after - 1, mask


def _disjoint(spans: Sequence[_Span]) -> Iterator[_Span]:
    """The spans with those of one rule merged where they overlap, so that each toggles its rule once."""
    by_rule: defaultdict[int, list[_Span]] = defaultdict(list)
    for span in sorted(spans):
        merged = by_rule[span.rule_index]
        if merged and span.first <= merged[-1].last + 1:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, span.last))
        else:
            merged.append(span)
    for merged in by_rule.values():
        yield from merged


def _order(rule: FlowRule) -> tuple[int, int, int, str]:
    return rule.order


def _always(_: FlowRule) -> bool:
    return True


def _ports_by_protocol(rules: Sequence[FlowRule], ports: Sequence[PodPort]) -> dict[int, _Ports]:
    found: defaultdict[int, _Ports] = defaultdict(lambda: _Ports([], []))
    for index, rule in enumerate(rules):
        for service in rule.services or ():
            if service.name:
                # A named port resolves on the destination. Without that name there it matches nothing.
                for port in ports:
                    if port.name == service.name and port.protocol in service.protocols:
                        found[port.protocol].spans.append(_Span(port.port, port.port, index))
                continue
            for protocol in service.protocols:
                # Packets of protocols without ports are evaluated with port 0, so only ranges from 0 match.
                if (service.first, service.last) == (0, MAX_PORT) or (protocol not in PORTED and service.first == 0):
                    found[protocol].all_ports.append(index)
                elif protocol in PORTED:
                    found[protocol].spans.append(_Span(service.first, service.last, index))
    return found


def _joined(ranges: Iterable[tuple[int, int, Verdict]]) -> list[tuple[int, int, Verdict]]:
    """Merge adjacent ranges with the same verdict."""
    joined: list[tuple[int, int, Verdict]] = []
    for first, last, verdict in ranges:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == verdict:
            joined[-1] = joined[-1][0], last, verdict
        else:
            joined.append((first, last, verdict))
    return joined
