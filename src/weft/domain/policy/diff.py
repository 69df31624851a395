"""What a change of the state newly allows or blocks, in terms of groups and pods.

Workloads that no rule of either state can tell apart are compared once, for all services there are, cut into cells; so
are the addresses of the world. Only pairs with an end that the change concerns are looked at. Workloads that are not in
both states are left out: their coming and going is no change of policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import msgspec

from weft.domain.policy.cells import AddressCells, ServiceCell, service_cells, service_texts
from weft.domain.policy.decide import Flow
from weft.domain.policy.engine import Engine, Verdict
from weft.domain.policy.identities import Identity, IdentityKey, identity_of_world
from weft.domain.policy.ranges import AddressRange, AddressSet, address_set
from weft.domain.policy.rules import Action, FlowRule, MemberSet, RuleId, Unit


class FlowChange(msgspec.Struct, frozen=True, kw_only=True, order=True, rename="camel"):
    """Flows from any of the sources to any of the targets, on these services, that become allowed or blocked.

    An end is `group TENANT:GROUP` or `namespace NAME` where all its workloads are meant, else a workload's key, or
    `world ADDRESSES`. `decidedBy` is the rule that decides after the change.
    """

    allowed: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    services: tuple[str, ...]
    versions: tuple[int, ...]
    decided_by: RuleId


class _End(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Ends that no rule can tell apart, by one of them, as it is in each state."""

    before: Identity
    after: Identity
    members: tuple[IdentityKey, ...] = ()
    addresses: AddressRange | None = None
    changed: bool = False


class _Outcome(msgspec.Struct, frozen=True):
    allowed: bool
    decided_by: RuleId
    services: tuple[str, ...]


def diff(before: Engine, after: Engine) -> tuple[FlowChange, ...]:
    """Every flow whose verdict differs between the two states."""
    comparison = _Comparison(before, after)
    ends = [*comparison.workload_ends(), *comparison.world_ends()]
    targets_of: dict[tuple[_Outcome, int, _End], list[_End]] = defaultdict(list)
    for source in ends:
        for target in ends:
            if source.changed or target.changed:
                for outcome, version in comparison.outcomes(source, target):
                    targets_of[outcome, version, source].append(target)
    sources_of: dict[tuple[_Outcome, int, tuple[_End, ...]], list[_End]] = defaultdict(list)
    for (outcome, version, source), targets in targets_of.items():
        sources_of[outcome, version, tuple(targets)].append(source)
    versions_of: dict[tuple[_Outcome, tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
    for (outcome, version, targets), sources in sources_of.items():
        versions_of[outcome, comparison.names(sources), comparison.names(targets)].append(version)
    return tuple(
        sorted(
            FlowChange(
                allowed=outcome.allowed,
                sources=sources,
                targets=targets,
                services=outcome.services,
                versions=tuple(sorted(versions)),
                decided_by=outcome.decided_by,
            )
            for (outcome, sources, targets), versions in versions_of.items()
        )
    )


class _Comparison:
    """Two states side by side."""

    def __init__(self, before: Engine, after: Engine) -> None:
        self.before, self.after = before, after
        self._common = sorted(before.workloads.keys() & after.workloads.keys())
        self._units = [*before.units.values(), *after.units.values()]
        self._altered = {
            unit for unit in before.units.keys() | after.units.keys() if before.units.get(unit) != after.units.get(unit)
        }
        self._lasting = _named_sets(before.units.values()) & _named_sets(after.units.values())
        self._changed = {key for key in self._common if self._is_changed(key)}
        self._collectives: dict[str, set[IdentityKey]] = defaultdict(set)
        for key in self._common:
            workload = after.workloads[key]
            if workload.group:
                self._collectives[f"group {workload.group_key}"].add(key)
            elif workload.namespace:
                self._collectives[f"namespace {workload.namespace}"].add(key)

    def _is_changed(self, key: IdentityKey) -> bool:
        units = self.before.units_of(key), self.after.units_of(key)
        if units[0] != units[1] or not self._altered.isdisjoint(units[1]):
            return True
        moved = self.before.sets_of(key) ^ self.after.sets_of(key)
        old, new = self.before.workloads[key], self.after.workloads[key]
        return not moved.isdisjoint(self._lasting) or _nature(old) != _nature(new)

    def workload_ends(self) -> Iterator[_End]:
        """Workloads, those together that are alike in every respect a rule can see."""
        everywhere = AddressCells(_address_sets(self._units))
        near = self._near()
        alike: dict[Hashable, list[IdentityKey]] = defaultdict(list)
        for key in self._common:
            changed = key in self._changed
            old, new = self.before.workloads[key], self.after.workloads[key]
            cells = everywhere if changed else near
            seen = tuple(cells.cell_of(address) for address in (*old.addresses, *new.addresses))
            sets = self.before.sets_of(key), self.after.sets_of(key)
            alike[changed, old.tenant, new.tenant, old.ports, new.ports, seen, sets].append(key)
        for keys in alike.values():
            yield _End(
                before=self.before.workloads[keys[0]],
                after=self.after.workloads[keys[0]],
                members=tuple(keys),
                changed=keys[0] in self._changed,
            )

    def world_ends(self) -> Iterator[_End]:
        """The addresses of the world, as far as rules of changed workloads tell them apart."""
        cells = self._near()
        for version in (4, 6) if self._changed else ():
            for addresses in cells.cells(version):
                world = identity_of_world(addresses.start)
                yield _End(before=world, after=world, addresses=addresses)

    def _near(self) -> AddressCells:
        """Cells of what rules of changed workloads, and rules about a workload's own address, can tell apart."""
        concerned = {unit for key in self._changed for unit in self.before.units_of(key) | self.after.units_of(key)}
        own = (rule.local.addresses for unit in self._units for rule in unit.rules if rule.local is not None)
        return AddressCells(
            [
                *_address_sets(unit for unit in self._units if unit.id in concerned),
                *(addresses for addresses in own if addresses is not None),
            ]
        )

    def outcomes(self, source: _End, target: _End) -> Iterator[tuple[_Outcome, int]]:
        """What changes between two ends, for each family."""
        for version in (4, 6):
            ends = (source.before, source.after, target.before, target.after)
            if any(end.address(version) is None for end in ends):
                continue
            changed: dict[tuple[bool, RuleId], list[ServiceCell]] = defaultdict(list)
            for cell in self._cells(source, target, version):
                old = self.before.verdict(_flow(source.before, target.before, cell, version))
                new = self.after.verdict(_flow(source.after, target.after, cell, version))
                if old.allowed != new.allowed:
                    changed[new.allowed, _decider(new).id].append(cell)
            for (allowed, rule), cells in changed.items():
                yield _Outcome(allowed, rule, service_texts(cells)), version

    def _cells(self, source: _End, target: _End, version: int) -> list[ServiceCell]:
        rules: list[FlowRule] = []
        for engine, start, end in (
            (self.before, source.before, target.before),
            (self.after, source.after, target.after),
        ):
            rules += (*engine.rule_set(start.key).egress, *engine.rule_set(end.key).ingress)
        return service_cells(rules, ports=(*target.before.ports, *target.after.ports), version=version)

    def names(self, ends: Iterable[_End]) -> tuple[str, ...]:
        """The ends in words: groups and namespaces where they are complete, else workloads, then the world."""
        ends = tuple(ends)
        meant = {key for end in ends for key in end.members}
        complete = [name for name, members in self._collectives.items() if members <= meant]
        rest = meant.difference(*(self._collectives[name] for name in complete))
        world = address_set(end.addresses for end in ends if end.addresses is not None)
        return (*complete, *sorted(rest), *(f"world {addresses}" for addresses in world.ranges))


def _flow(source: Identity, target: Identity, cell: ServiceCell, version: int) -> Flow:
    return Flow(source=source, target=target, protocol=cell.protocol, port=cell.first, version=version)


def _decider(verdict: Verdict) -> FlowRule:
    return verdict.ingress if verdict.egress.action is Action.ALLOW else verdict.egress


def _nature(workload: Identity) -> tuple[object, ...]:
    """What a rule can see of a workload beside its sets."""
    return workload.tenant, workload.addresses, workload.ports


def _named_sets(units: Iterable[Unit]) -> set[MemberSet]:
    return {each for unit in units for each in unit.sets()}


def _address_sets(units: Iterable[Unit]) -> Iterator[AddressSet]:
    for unit in units:
        for peer in unit.peers():
            if peer.addresses is not None:
                yield peer.addresses
