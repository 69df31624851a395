"""Two states of the cluster side by side, compared flow by flow without looking at every flow.

Workloads that no rule of either state can tell apart are one `End`; so are addresses of the world. Services are compared
cell by cell. A pair of ends is looked at only if the change concerns one of them, and in full only if the rules of one
of them, given what these can see of the other, decide differently in the two states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator

import msgspec

from weft.domain.policy.cells import AddressCells, ServiceCell, service_cells, service_texts
from weft.domain.policy.decide import Flow
from weft.domain.policy.engine import Engine, Verdict
from weft.domain.policy.identities import Identity, IdentityKey, identity_of_world
from weft.domain.policy.ranges import AddressRange, AddressSet
from weft.domain.policy.rules import Action, Direction, FlowRule, MemberSet, RuleId, Unit, UnitId


class End(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Workloads (`members`) or addresses of the world that are alike, by one of them, as it is in each state."""

    before: Identity
    after: Identity
    members: tuple[IdentityKey, ...] = ()
    addresses: AddressRange | None = None
    changed: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """Services of one family that become allowed or blocked, by which rule."""

    allowed: bool
    decided_by: RuleId
    services: tuple[str, ...]
    version: int


class _Sight:
    """What the rules of some policies can see of an end."""

    def __init__(self, units: Iterable[Unit]) -> None:
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
        self._differences: dict[Hashable, bool] = {}

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
                members=tuple(keys),
                changed=keys[0] in self._changed,
            )

    def _world_ends(self) -> Iterator[End]:
        concerned = {unit for key in self._changed for unit in self._units_of(key)}
        cells = AddressCells(_address_sets(self._both_states(concerned)))
        for version in (4, 6):
            for addresses in cells.cells(version):
                world = identity_of_world(addresses.start)
                yield End(before=world, after=world, addresses=addresses)

    def _outcomes(self, source: End, target: End) -> Iterator[Outcome]:
        for version in (4, 6):
            ends = (source.before, source.after, target.before, target.after)
            if any(end.address(version) is None for end in ends):
                continue
            if not (
                self._differs(source, target, Direction.EGRESS, version)
                or self._differs(target, source, Direction.INGRESS, version)
            ):
                continue
            changed: dict[tuple[bool, RuleId], list[ServiceCell]] = defaultdict(list)
            for cell in self._cells(source, target, version):
                old = self._before.verdict(_flow(source.before, target.before, cell, version))
                new = self._after.verdict(_flow(source.after, target.after, cell, version))
                if old.allowed != new.allowed:
                    changed[new.allowed, _decider(new).id].append(cell)
            for (allowed, rule), cells in changed.items():
                yield Outcome(allowed, rule, service_texts(cells), version)

    def _differs(self, local: End, remote: End, direction: Direction, version: int) -> bool:
        """Whether the rules of one end may decide otherwise about the other end than before."""
        units = self._units_of(local.after.key)
        sight = self._sight(units)
        seen = (
            sight.of(remote.before, self._before.sets_of(remote.before.key), version),
            sight.of(remote.after, self._after.sets_of(remote.after.key), version),
        )
        if not local.changed and seen[0] == seen[1]:
            return False
        key = (local, direction, version, seen)
        if key not in self._differences:
            self._differences[key] = self._decides_otherwise(local, remote, direction, version)
        return self._differences[key]

    def _decides_otherwise(self, local: End, remote: End, direction: Direction, version: int) -> bool:
        source, target = (remote, local) if direction is Direction.INGRESS else (local, remote)
        for cell in self._cells(source, target, version):
            old = self._before.deciding(_flow(source.before, target.before, cell, version), direction)
            new = self._after.deciding(_flow(source.after, target.after, cell, version), direction)
            if old.action is not new.action:
                return True
        return False

    def _cells(self, source: End, target: End, version: int) -> list[ServiceCell]:
        rules: list[FlowRule] = []
        for engine, start, end in (
            (self._before, source.before, target.before),
            (self._after, source.after, target.after),
        ):
            rules += (*engine.rule_set(start.key).egress, *engine.rule_set(end.key).ingress)
        return service_cells(rules, ports=(*target.before.ports, *target.after.ports), version=version)

    def _sight(self, units: frozenset[UnitId]) -> _Sight:
        if units not in self._sights:
            self._sights[units] = _Sight(self._both_states(units))
        return self._sights[units]

    def _units_of(self, key: IdentityKey) -> frozenset[UnitId]:
        return self._before.units_of(key) | self._after.units_of(key)

    def _both_states(self, units: Iterable[UnitId]) -> Iterator[Unit]:
        for unit in units:
            for engine in (self._before, self._after):
                if unit in engine.units:
                    yield engine.units[unit]


def _flow(source: Identity, target: Identity, cell: ServiceCell, version: int) -> Flow:
    return Flow(source=source, target=target, protocol=cell.protocol, port=cell.first, version=version)


def _decider(verdict: Verdict) -> FlowRule:
    return verdict.ingress if verdict.egress.action is Action.ALLOW else verdict.egress


def _named_sets(units: Iterable[Unit]) -> set[MemberSet]:
    return {each for unit in units for each in unit.sets()}


def _address_sets(units: Iterable[Unit]) -> Iterator[AddressSet]:
    for unit in units:
        for peer in unit.peers():
            if peer.addresses is not None:
                yield peer.addresses
