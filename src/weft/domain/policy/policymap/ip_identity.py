"""Which class is at each known address and in each range of the rest, kept up to date change by change.

A tenant without policies needs no classes but one: that of its workloads on this node, whose ports open by it. With the
first policy every known address gets its class, and so do the ranges that rules tell apart and the tenant's own
networks, where whoever is not known is a stranger.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Literal

from weft.domain.addresses import Address, Range
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.identities import Identity, IdentityKey, Kind
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import FlowRule
from weft.domain.policy.policymap.identity_classes import IdentityClass, IdentityKind
from weft.domain.policy.policymap.interval_map import IntervalMap, Relabelled

Place = Address | Range

_Label = AddressSet | Literal["ours"]


class IpIdentityMap:
    """See the module."""

    def __init__(self, engine: Engine, *, tenant: TenantName, node: NodeName) -> None:
        self._engine, self._tenant, self._node = engine, tenant, node
        self._guarded = False
        self._ground = AddressSet()
        self._labels: IntervalMap[_Label] = IntervalMap()
        self._uses: Counter[AddressSet | str] = Counter()
        self._known: dict[IdentityKey, Identity] = {}
        self._holders: Index[Address, IdentityKey] = Index()
        self._addresses: list[Address] = []
        self._by_port_name: Index[str, IdentityKey] = Index()
        self._class_at: dict[Place, IdentityClass] = {}
        self._places_of: Index[IdentityClass, Place] = Index()
        self._stale: set[Address] = set()
        self._near: set[Address] = set()
        self._here: Counter[IdentityClass] = Counter()
        # Classes of which workloads came to this node or left it, until the reader clears it.
        self.moved: set[IdentityClass] = set()
        # Places that have another class than before, with the one before, until the reader clears it.
        self.changed: dict[Place, IdentityClass | None] = {}

    def __getitem__(self, of: IdentityClass) -> Set[Place]:
        """Where a class is."""
        return self._places_of[of]

    def get(self, place: Place) -> IdentityClass | None:
        return self._class_at.get(place)

    def is_here(self, each: IdentityClass) -> bool:
        """Whether a workload of this node is of the class."""
        return self._here[each] > 0

    def set_guarded(self, guarded: bool) -> None:
        """Say whether the tenant has any policy."""
        if guarded is not self._guarded:
            self._lift_ground()
            self._guarded = guarded
            self._lay_ground()
            self._stale.update(self._addresses)

    def set_ground(self, ground: AddressSet) -> None:
        """Say which addresses are strangers' when nobody is known to have them."""
        if ground != self._ground:
            self._lift_ground()
            self._ground = ground
            self._lay_ground()

    def use(self, rules: Iterable[FlowRule]) -> None:
        """Tell apart what these rules do."""
        for each in _distinctions(rules):
            self._uses[each] += 1
            if self._uses[each] > 1:
                continue
            if isinstance(each, AddressSet):
                self._relabel(self._labels.add(each, each.ranges))
            else:
                self._touch_port(each)

    def disuse(self, rules: Iterable[FlowRule]) -> None:
        """Undo one `use`."""
        for each in _distinctions(rules):
            self._uses[each] -= 1
            if self._uses[each]:
                continue
            del self._uses[each]
            if isinstance(each, AddressSet):
                self._relabel(self._labels.remove(each, each.ranges))
            else:
                self._touch_port(each)

    def touch(self, key: IdentityKey) -> None:
        """Look at an identity again: it may have come, gone, moved, or be in other sets."""
        before = self._known.pop(key, None)
        after = self._engine.directory.get(key)
        if after is not None and after.kind is Kind.WORKLOAD and after.tenant != self._tenant:
            after = None
        if before is not None:
            self._forget(before)
        if after is not None:
            self._learn(after)

    def settle(self) -> None:
        """Give every address that was touched its class."""
        for address in self._stale:
            self._leave(address)
            self._place(address, self._class_of(address))
            self._arrive(address)
        self._stale.clear()

    def _leave(self, address: Address) -> None:
        if address in self._near:
            self._near.discard(address)
            self._count_here(self._class_at[address], -1)

    def _arrive(self, address: Address) -> None:
        if address in self._class_at and self._is_near(address):
            self._near.add(address)
            self._count_here(self._class_at[address], 1)

    def _is_near(self, address: Address) -> bool:
        identity = self._engine.directory.at(address, tenant=self._tenant)
        return identity.kind is Kind.WORKLOAD and identity.node == self._node

    def _count_here(self, each: IdentityClass, step: int) -> None:
        self._here[each] += step
        if not self._here[each]:
            del self._here[each]
        self.moved.add(each)

    def _learn(self, identity: Identity) -> None:
        self._known[identity.key] = identity
        for address in identity.addresses:
            if not self._holders[address]:
                insort(self._addresses, address)
            self._holders.add(address, identity.key)
            self._stale.add(address)
        for port in identity.ports:
            self._by_port_name.add(port.name, identity.key)

    def _forget(self, identity: Identity) -> None:
        for address in identity.addresses:
            self._holders.discard(address, identity.key)
            if not self._holders[address]:
                self._addresses.pop(bisect_left(self._addresses, address))
            self._stale.add(address)
        for port in identity.ports:
            self._by_port_name.discard(port.name, identity.key)

    def _class_of(self, address: Address) -> IdentityClass | None:
        if not self._holders[address]:
            return None
        identity = self._engine.directory.at(address, tenant=self._tenant)
        workload = identity.kind is Kind.WORKLOAD
        if not self._guarded and not (workload and identity.node == self._node):
            return None
        return IdentityClass(
            standing=IdentityKind(identity.kind),
            sets=self._engine.sets_of(identity.key),
            addresses=frozenset(each for each in self._labels.at(address) if isinstance(each, AddressSet)),
            ports=frozenset(port for port in identity.ports if port.name in self._uses),
            node="" if workload else identity.node,
        )

    def _place(self, place: Place, new: IdentityClass | None) -> None:
        old = self._class_at.get(place)
        if old == new:
            return
        self.changed.setdefault(place, old)
        if old is not None:
            del self._class_at[place]
            self._places_of.discard(old, place)
        if new is not None:
            self._class_at[place] = new
            self._places_of.add(new, place)

    def _touch_port(self, name: str) -> None:
        for key in self._by_port_name[name]:
            self._stale.update(self._known[key].addresses)

    def _lay_ground(self) -> None:
        if self._guarded:
            self._relabel(self._labels.add("ours", self._ground.ranges))

    def _lift_ground(self) -> None:
        if self._guarded:
            self._relabel(self._labels.remove("ours", self._ground.ranges))

    def _relabel(self, changes: Iterator[Relabelled[_Label]]) -> None:
        for change in changes:
            for span, _ in change.before:
                self._place(span, None)
            for span, labels in change.after:
                self._place(span, _class_of_range(labels))
            first, last = change.after[0][0], change.after[-1][0]
            begin = bisect_left(self._addresses, Address(first.family, first.first))
            end = bisect_right(self._addresses, Address(last.family, last.last))
            self._stale.update(self._addresses[begin:end])


def _class_of_range(labels: frozenset[_Label]) -> IdentityClass | None:
    """The class of whoever is in a range that nobody is known in; None for the world that no rule speaks about."""
    if not labels:
        return None
    return IdentityClass(
        standing=IdentityKind.UNKNOWN_IDENTITY if "ours" in labels else IdentityKind.WORLD,
        addresses=frozenset(each for each in labels if isinstance(each, AddressSet)),
    )


def _distinctions(rules: Iterable[FlowRule]) -> Iterator[AddressSet | str]:
    """The sets of addresses and the names of ports in rules, as often as they are there."""
    for rule in rules:
        for peer in (*(rule.peers or ()), *((rule.local,) if rule.local else ())):
            if peer.addresses is not None:
                yield peer.addresses
        for service in rule.services or ():
            if service.name:
                yield service.name
