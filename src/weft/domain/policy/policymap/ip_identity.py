"""The identity class of every known address and of the remaining ranges, updated incrementally.

A tenant without policies needs only the class of its workloads on this node: the datapath opens a port by it. From the
first policy on, every known address has a class, and so have the ranges that rules tell apart and the tenant's subnets,
where an address without a known endpoint is an unknown identity.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Literal

from weft.domain.addresses import Address, Range
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.model.identities import Identity, IdentityKey, Kind
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import FlowRule
from weft.domain.policy.policymap.identity_classes import IdentityClass, IdentityKind
from weft.domain.policy.policymap.interval_map import IntervalChange, IntervalMap

# What a class is assigned to: the key of an `IpIdentity` or of a `CidrIdentity`.
IpKey = Address | Range

_SUBNET: Literal["tenant-subnet"] = "tenant-subnet"
_Label = AddressSet | Literal["tenant-subnet"]


class IpIdentityMap:
    """Maps addresses and ranges of one tenant to identity classes."""

    def __init__(self, engine: Engine, *, tenant: TenantName, node: NodeName) -> None:
        self._engine, self._tenant, self._node = engine, tenant, node
        self._has_policy = False
        self._tenant_subnets = AddressSet()
        self._labels: IntervalMap[_Label] = IntervalMap()
        # How many rules use an address set or a port name.
        self._refcounts: Counter[AddressSet | str] = Counter()
        # Address sets and port names whose count has changed, and whether they were in use at the last `update_labels`.
        self._recounted: dict[AddressSet | str, bool] = {}
        self._known: dict[IdentityKey, Identity] = {}
        self._identities_at: Multimap[Address, IdentityKey] = Multimap()
        # Sorted, so that a range change finds the addresses in it by bisection.
        self._addresses: list[Address] = []
        self._by_port_name: Multimap[str, IdentityKey] = Multimap()
        self._class_at: dict[IpKey, IdentityClass] = {}
        self._keys_of: Multimap[IdentityClass, IpKey] = Multimap()
        self._canonical: dict[IdentityClass, IdentityClass] = {}
        self._stale: set[Address] = set()
        # Addresses of workloads on this node, and how many of them each class has.
        self._local_addresses: set[Address] = set()
        self._local_counts: Counter[IdentityClass] = Counter()
        # Classes whose number of workloads on this node has changed. The reader clears it.
        self.locality_changed: set[IdentityClass] = set()
        # Keys with another class than before, with their former class. The reader clears it.
        self.changed: dict[IpKey, IdentityClass | None] = {}

    def __getitem__(self, identity_class: IdentityClass) -> Set[IpKey]:
        """Return the addresses and ranges of a class."""
        return self._keys_of[identity_class]

    def get(self, key: IpKey) -> IdentityClass | None:
        return self._class_at.get(key)

    def is_local(self, identity_class: IdentityClass) -> bool:
        """Return whether the class has a workload on this node."""
        return self._local_counts[identity_class] > 0

    def set_has_policy(self, has_policy: bool) -> None:
        """Set whether the tenant has any policy."""
        if has_policy is not self._has_policy:
            self._unlabel_subnets()
            self._has_policy = has_policy
            self._label_subnets()
            self._stale.update(self._addresses)

    def set_tenant_subnets(self, subnets: AddressSet) -> None:
        """Set the addresses that are unknown identities unless an endpoint has them."""
        if subnets != self._tenant_subnets:
            self._unlabel_subnets()
            self._tenant_subnets = subnets
            self._label_subnets()

    def add_rules(self, rules: Iterable[FlowRule]) -> None:
        """Distinguish the address sets and port names that these rules use, from the next `update_labels` on."""
        for match in _matches_in(rules):
            self._recounted.setdefault(match, match in self._refcounts)
            self._refcounts[match] += 1

    def remove_rules(self, rules: Iterable[FlowRule]) -> None:
        """Undo one `add_rules`."""
        for match in _matches_in(rules):
            self._recounted.setdefault(match, True)
            self._refcounts[match] -= 1
            if not self._refcounts[match]:
                del self._refcounts[match]

    def update_labels(self) -> None:
        """Take up the rules that were added and removed, all at once: each range is split and classified only once."""
        added: dict[_Label, Iterable[Range]] = {}
        removed: dict[_Label, Iterable[Range]] = {}
        for match, was_used in self._recounted.items():
            if was_used is (match in self._refcounts):
                continue
            if isinstance(match, AddressSet):
                (removed if was_used else added)[match] = match.ranges
            else:
                self._mark_port_stale(match)
        self._recounted.clear()
        self._apply_labels(self._labels.change(added, removed))

    def update_identity(self, key: IdentityKey) -> None:
        """Re-read an identity from the engine: it may be new, deleted, on another node, or in other sets."""
        before = self._known.pop(key, None)
        after = self._engine.directory.get(key)
        # Workloads of other tenants may have the same addresses; they are not part of this tenant's map.
        if after is not None and after.kind is Kind.WORKLOAD and after.tenant != self._tenant:
            after = None
        if before is not None:
            self._remove_identity(before)
        if after is not None:
            self._add_identity(after)

    def reassign_stale(self) -> None:
        """Assign a class to every stale address."""
        # Counted by class, so each address leaves its old class before it joins the new one.
        for address in self._stale:
            self._uncount_local(address)
            self._assign(address, self._class_of(address))
            self._count_local(address)
        self._stale.clear()

    def _uncount_local(self, address: Address) -> None:
        if address in self._local_addresses:
            self._local_addresses.discard(address)
            self._change_local_count(self._class_at[address], -1)

    def _count_local(self, address: Address) -> None:
        if address in self._class_at and self._is_on_node(address):
            self._local_addresses.add(address)
            self._change_local_count(self._class_at[address], 1)

    def _is_on_node(self, address: Address) -> bool:
        identity = self._engine.directory.at(address, tenant=self._tenant)
        return identity.kind is Kind.WORKLOAD and identity.node == self._node

    def _change_local_count(self, identity_class: IdentityClass, step: int) -> None:
        self._local_counts[identity_class] += step
        if not self._local_counts[identity_class]:
            del self._local_counts[identity_class]
        self.locality_changed.add(identity_class)

    def _add_identity(self, identity: Identity) -> None:
        self._known[identity.key] = identity
        for address in identity.addresses:
            if not self._identities_at[address]:
                insort(self._addresses, address)
            self._identities_at.add(address, identity.key)
            self._stale.add(address)
        for port in identity.ports:
            self._by_port_name.add(port.name, identity.key)

    def _remove_identity(self, identity: Identity) -> None:
        for address in identity.addresses:
            self._identities_at.discard(address, identity.key)
            if not self._identities_at[address]:
                # Bisection, because `list.remove` would scan all addresses.
                self._addresses.pop(bisect_left(self._addresses, address))
            self._stale.add(address)
        for port in identity.ports:
            self._by_port_name.discard(port.name, identity.key)

    def _class_of(self, address: Address) -> IdentityClass | None:
        if not self._identities_at[address]:
            return None
        identity = self._engine.directory.at(address, tenant=self._tenant)
        workload = identity.kind is Kind.WORKLOAD
        if not self._has_policy and not (workload and identity.node == self._node):
            return None
        return IdentityClass(
            kind=IdentityKind(identity.kind),
            sets=self._engine.sets_of(identity.key),
            addresses=_address_sets(self._labels.at(address)),
            ports=frozenset(port for port in identity.ports if port.name in self._refcounts),
            # The node of a workload is not part of its class: policy does not depend on placement.
            node="" if workload else identity.node,
        )

    def _assign(self, key: IpKey, new: IdentityClass | None) -> None:
        old = self._class_at.get(key)
        if old is new or old == new:
            return
        # Keep the class from before the first of several changes: that is the one the reader knows.
        self.changed.setdefault(key, old)
        if old is not None:
            del self._class_at[key]
            self._keys_of.discard(old, key)
            if not self._keys_of[old]:
                self._canonical.pop(old, None)
        if new is not None:
            # One object per class: a dict finds it by identity, without a comparison of all its sets.
            new = self._canonical.setdefault(new, new)
            self._class_at[key] = new
            self._keys_of.add(new, key)

    def _mark_port_stale(self, name: str) -> None:
        for key in self._by_port_name[name]:
            self._stale.update(self._known[key].addresses)

    def _label_subnets(self) -> None:
        if self._has_policy:
            self._apply_labels(self._labels.change({_SUBNET: self._tenant_subnets.ranges}, {}))

    def _unlabel_subnets(self) -> None:
        if self._has_policy:
            self._apply_labels(self._labels.change({}, {_SUBNET: self._tenant_subnets.ranges}))

    def _apply_labels(self, changes: Iterator[IntervalChange[_Label]]) -> None:
        for change in changes:
            for span, _ in change.before:
                self._assign(span, None)
            for span, labels in change.after:
                self._assign(span, _class_of_range(labels))
            first, last = change.after[0][0], change.after[-1][0]
            begin = bisect_left(self._addresses, Address(first.family, first.first))
            end = bisect_right(self._addresses, Address(last.family, last.last))
            self._stale.update(self._addresses[begin:end])


def _class_of_range(labels: frozenset[_Label]) -> IdentityClass | None:
    """Return the class of unknown addresses in a range; None for world addresses that no rule matches on."""
    if not labels:
        return None
    return IdentityClass(
        kind=IdentityKind.UNKNOWN_IDENTITY if _SUBNET in labels else IdentityKind.WORLD,
        addresses=_address_sets(labels),
    )


def _address_sets(labels: frozenset[_Label]) -> frozenset[AddressSet]:
    # Without the other label it is the very same set, with its hash: a copy would cost much where many rules overlap.
    return labels - {_SUBNET} if _SUBNET in labels else labels  # type: ignore[return-value]


def _matches_in(rules: Iterable[FlowRule]) -> Iterator[AddressSet | str]:
    """Yield the address sets and port names in rules, as often as they occur."""
    for rule in rules:
        for peer in (*(rule.peers or ()), *((rule.local,) if rule.local else ())):
            if peer.addresses is not None:
                yield peer.addresses
        for service in rule.services or ():
            if service.name:
                yield service.name
