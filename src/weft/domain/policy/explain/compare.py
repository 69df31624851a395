"""Two states of the cluster side by side, compared flow by flow without looking at every flow.

Workloads that no rule of either state can tell apart are one `End`; so are addresses of the world. What the rules of
one end say is found once for all ends that look alike to these rules, and services are compared cell by cell. Only
pairs with an end that the change concerns are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.header_space import (
    AddressCells,
    ServiceCell,
    overlay,
    portless_protocols,
    service_cells,
    service_texts,
)
from weft.domain.policy.model.identities import Identity, IdentityKey, identity_of_world
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import Action, CompiledPolicy, Direction, FlowRule, MemberSet, RuleId, UnitId


class End(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Workloads (`members`) or addresses of the world that are alike, by one of them, as it is in each state."""

    before: Identity
    after: Identity
    units: frozenset[UnitId] = frozenset()
    members: tuple[IdentityKey, ...] = ()
    addresses: Range | None = None
    changed: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """Services of one family that become allowed or blocked, by which rule."""

    allowed: bool
    decided_by: RuleId
    services: tuple[str, ...]
    version: int


class _View(NamedTuple):
    """One end as seen by the rules of the other. Views with the same key are the same to these rules."""

    local: End
    remote: End
    direction: Direction
    version: int
    key: Hashable
    moved: bool

    @property
    def may_differ(self) -> bool:
        return self.local.changed or self.moved


class _Side(msgspec.Struct, frozen=True, eq=False):
    """What the rules of one end say in each state, service by service."""

    decisions: list[tuple[ServiceCell, tuple[FlowRule, FlowRule]]]
    differs: bool


class _Sight:
    """What the rules of some policies can see of an end."""

    def __init__(self, units: Iterable[CompiledPolicy]) -> None:
        units = tuple(units)
        self._sets = _named_sets(units)
        self._cells = AddressCells(_address_sets(units))

    def of(self, end: Identity, sets: frozenset[MemberSet], version: int) -> Hashable:
        """Equal for ends that the rules cannot tell apart."""
        address = end.address(version)
        return sets & self._sets, address and self._cells.cell_of(address), end.tenant, end.ports


class Comparison:
    """Gives every pair of ends between which something changes, and what."""

    def __init__(self, before: Engine, after: Engine) -> None:
        self._before, self._after = before, after
        self.workloads = sorted(before.workloads.keys() & after.workloads.keys())
        units = before.units.keys() | after.units.keys()
        self._altered = {unit for unit in units if before.units.get(unit) != after.units.get(unit)}
        self._lasting = _named_sets(before.units.values()) & _named_sets(after.units.values())
        self._changed = {key for key in self.workloads if self._is_changed(key)}
        self._sights: dict[frozenset[UnitId], _Sight] = {}
        self._sides: dict[Hashable, _Side] = {}
        self._joint: dict[tuple[_Side, _Side], list[Outcome]] = {}
        self._portless = portless_protocols(rule for unit in self._both_states(units) for rule in unit.rules)

    def changes(self) -> Iterator[tuple[End, End, Outcome]]:
        """Source, target, and what becomes allowed or blocked between them."""
        ends = [*self._workload_ends(), *self._world_ends()]
        for changed in (end for end in ends if end.changed):
            for other in ends:
                pairs = [(changed, other)] if other.changed else [(changed, other), (other, changed)]
                for source, target in pairs:
                    for outcome in self._outcomes(source, target):
                        yield source, target, outcome

    def _is_changed(self, key: IdentityKey) -> bool:
        """Whether other rules apply to the workload, or lasting rules see it differently."""
        units = self._after.units_of(key)
        if units != self._before.units_of(key) or not self._altered.isdisjoint(units):
            return True
        moved = self._before.sets_of(key) ^ self._after.sets_of(key)
        old, new = self._before.workloads[key], self._after.workloads[key]
        return not moved.isdisjoint(self._lasting) or (
            (old.tenant, old.addresses, old.ports) != (new.tenant, new.addresses, new.ports)
        )

    def _workload_ends(self) -> Iterator[End]:
        everywhere = AddressCells(_address_sets([*self._before.units.values(), *self._after.units.values()]))
        alike: dict[Hashable, list[IdentityKey]] = defaultdict(list)
        for key in self.workloads:
            old, new = self._before.workloads[key], self._after.workloads[key]
            cells = tuple(everywhere.cell_of(address) for address in (*old.addresses, *new.addresses))
            sets = self._before.sets_of(key), self._after.sets_of(key)
            alike[old.tenant, new.tenant, old.ports, new.ports, cells, sets].append(key)
        for keys in alike.values():
            yield End(
                before=self._before.workloads[keys[0]],
                after=self._after.workloads[keys[0]],
                units=self._units_of(keys[0]),
                members=tuple(keys),
                changed=keys[0] in self._changed,
            )

    def _world_ends(self) -> Iterator[End]:
        concerned = {unit for key in self._changed for unit in self._units_of(key)}
        cells = AddressCells(_address_sets(self._both_states(concerned)))
        for version in (4, 6):
            for addresses in cells.cells(version):
                world = identity_of_world(Address(version, addresses.first))
                yield End(before=world, after=world, addresses=addresses)

    def _outcomes(self, source: End, target: End) -> Iterator[Outcome]:
        for version in (4, 6):
            ends = (source.before, source.after, target.before, target.after)
            if any(end.address(version) is None for end in ends):
                continue
            views = (
                self._view(source, target, Direction.EGRESS, version),
                self._view(target, source, Direction.INGRESS, version),
            )
            if any(view.may_differ and self._side(view).differs for view in views):
                yield from self._joint_outcomes(self._side(views[0]), self._side(views[1]), version)

    def _view(self, local: End, remote: End, direction: Direction, version: int) -> _View:
        sight = self._sights.get(local.units)
        if sight is None:
            sight = self._sights[local.units] = _Sight(self._both_states(local.units))
        old = sight.of(remote.before, self._before.sets_of(remote.before.key), version)
        new = sight.of(remote.after, self._after.sets_of(remote.after.key), version)
        # An end without rules is like every other one of its tenant.
        local_key = local if local.units else (local.before.tenant, local.after.tenant)
        return _View(local, remote, direction, version, (local_key, direction, version, old, new), old != new)

    def _side(self, view: _View) -> _Side:
        if view.key not in self._sides:
            self._sides[view.key] = self._decide_side(view.local, view.remote, view.direction, view.version)
        return self._sides[view.key]

    def _decide_side(self, local: End, remote: End, direction: Direction, version: int) -> _Side:
        source, target = (remote, local) if direction is Direction.INGRESS else (local, remote)
        cells = service_cells(
            (
                *self._before.rule_set(local.before.key).of(direction),
                *self._after.rule_set(local.after.key).of(direction),
            ),
            ports=(*target.before.ports, *target.after.ports),
            portless=self._portless,
            version=version,
        )
        decisions = [
            (
                cell,
                (
                    self._before.deciding(_flow(source.before, target.before, cell, version), direction),
                    self._after.deciding(_flow(source.after, target.after, cell, version), direction),
                ),
            )
            for cell in cells
        ]
        return _Side(decisions, any(old.action is not new.action for _, (old, new) in decisions))

    def _joint_outcomes(self, egress: _Side, ingress: _Side, version: int) -> list[Outcome]:
        key = (egress, ingress)
        if key not in self._joint:
            changed: dict[tuple[bool, RuleId], list[ServiceCell]] = defaultdict(list)
            for cell, (old_out, new_out), (old_in, new_in) in overlay(egress.decisions, ingress.decisions):
                allowed = _both_allow(new_out, new_in)
                if allowed != _both_allow(old_out, old_in):
                    decider = new_in if new_out.action is Action.ALLOW else new_out
                    changed[allowed, decider.id].append(cell)
            self._joint[key] = [
                Outcome(allowed, rule, service_texts(cells), version) for (allowed, rule), cells in changed.items()
            ]
        return self._joint[key]

    def _units_of(self, key: IdentityKey) -> frozenset[UnitId]:
        return self._before.units_of(key) | self._after.units_of(key)

    def _both_states(self, units: Iterable[UnitId]) -> Iterator[CompiledPolicy]:
        for unit in units:
            for engine in (self._before, self._after):
                if unit in engine.units:
                    yield engine.units[unit]


def _flow(source: Identity, target: Identity, cell: ServiceCell, version: int) -> Flow:
    return Flow(source=source, target=target, protocol=cell.protocol, port=cell.first, version=version)


def _both_allow(egress: FlowRule, ingress: FlowRule) -> bool:
    return egress.action is Action.ALLOW and ingress.action is Action.ALLOW


def _named_sets(units: Iterable[CompiledPolicy]) -> set[MemberSet]:
    return {each for unit in units for each in unit.sets()}


def _address_sets(units: Iterable[CompiledPolicy]) -> Iterator[AddressSet]:
    for unit in units:
        for peer in unit.peers():
            if peer.addresses is not None:
                yield peer.addresses
