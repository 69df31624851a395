"""The members of every set that rules name, updated incrementally.

This is the dependency index of the engine. A workload is matched against the sets of its own namespace, its own group,
and the few multi-namespace sets that `NamespaceSelectorIndex` finds. A set is kept while some policy watches it.

`SelectorIndex` finds the selectors that match some labels without trying all of them. `NamespaceSelectorIndex` combines
two of them for sets with a namespace selector and a pod selector: a pod is in a set if both match. Thousands of sets
then cost a pod update almost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Self

from weft.domain.ids import GroupKey
from weft.domain.policy.model.identities import Identity, IdentityKey, Namespace
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.rules import GroupMembers, MemberSet, PodsOfNamespace, PodsOfNamespaces
from weft.domain.selectors import Operator, Selector

# For each affected workload: the sets it joined or left, or in which its addresses or ports changed.
MembershipChanges = dict[IdentityKey, Set[MemberSet]]

# What labels must contain for a selector to match: (key, value), (key,), or () for no such condition.
_IndexKey = tuple[str, ...]
_UNCONDITIONAL: _IndexKey = ()


class SelectorIndex:
    """Selectors, indexed by a condition that labels must meet."""

    def __init__(self) -> None:
        self._selectors: Multimap[_IndexKey, Selector] = Multimap()

    def add(self, selector: Selector) -> None:
        for key in _index_keys(selector):
            self._selectors.add(key, selector)

    def discard(self, selector: Selector) -> None:
        for key in _index_keys(selector):
            self._selectors.discard(key, selector)

    def matching(self, labels: Mapping[str, str]) -> Iterator[Selector]:
        """Yield every selector that matches the labels, each once."""
        for key in (_UNCONDITIONAL, *((label,) for label in labels), *labels.items()):
            for selector in self._selectors[key]:
                if selector.matches(labels):
                    yield selector

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        twin._selectors = self._selectors.copy()
        return twin


def _index_keys(selector: Selector) -> list[_IndexKey]:
    # `In` is tried before `Exists`, as key and value together leave fewer candidates than a key alone. One condition is
    # enough: labels hold one value per key, so a selector is found under at most one of its index keys.
    for requirement in selector.requirements:
        if requirement.operator is Operator.IN:
            return [(requirement.key, value) for value in requirement.values]
    for requirement in selector.requirements:
        if requirement.operator is Operator.EXISTS:
            return [(requirement.key,)]
    return [_UNCONDITIONAL]


class NamespaceSelectorIndex:
    """Namespaces, and the pod sets that select them."""

    def __init__(self) -> None:
        self._labels: dict[str, Mapping[str, str]] = {}
        self._sets: dict[tuple[Selector, Selector], PodsOfNamespaces] = {}
        # Which namespace selectors and pod selectors occur together in a set.
        self._ns_selectors_by_pods: Multimap[Selector, Selector] = Multimap()
        self._pod_selectors_by_ns: Multimap[Selector, Selector] = Multimap()
        self._pod_selectors = SelectorIndex()
        self._ns_selectors = SelectorIndex()
        # Which namespace selectors match which namespaces.
        self._ns_selectors_of: Multimap[str, Selector] = Multimap()
        self._namespaces_of: Multimap[Selector, str] = Multimap()

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    def put_namespace(self, name: str, labels: Mapping[str, str]) -> None:
        self.remove_namespace(name)
        self._labels[name] = labels
        for selector in self._ns_selectors.matching(labels):
            self._link(selector, name)

    def remove_namespace(self, name: str) -> None:
        """Remove the namespace. Its pods leave all sets, as its labels are unknown now."""
        self._labels.pop(name, None)
        for selector in tuple(self._ns_selectors_of[name]):
            self._unlink(selector, name)

    def add(self, new: PodsOfNamespaces) -> None:
        if not self._pod_selectors_by_ns[new.namespaces]:
            self._ns_selectors.add(new.namespaces)
            for name, labels in self._labels.items():
                if new.namespaces.matches(labels):
                    self._link(new.namespaces, name)
        self._sets[new.namespaces, new.pods] = new
        self._pod_selectors.add(new.pods)
        self._pod_selectors_by_ns.add(new.namespaces, new.pods)
        self._ns_selectors_by_pods.add(new.pods, new.namespaces)

    def discard(self, old: PodsOfNamespaces) -> None:
        self._sets.pop((old.namespaces, old.pods), None)
        self._pod_selectors_by_ns.discard(old.namespaces, old.pods)
        self._ns_selectors_by_pods.discard(old.pods, old.namespaces)
        # Other sets may share one of the two selectors.
        if not self._ns_selectors_by_pods[old.pods]:
            self._pod_selectors.discard(old.pods)
        if not self._pod_selectors_by_ns[old.namespaces]:
            self._ns_selectors.discard(old.namespaces)
            for name in tuple(self._namespaces_of[old.namespaces]):
                self._unlink(old.namespaces, name)

    def sets_for(self, namespace: str, labels: Mapping[str, str]) -> Iterator[PodsOfNamespaces]:
        """Yield the sets that contain a pod with these labels in this namespace."""
        ns_selectors = self._ns_selectors_of[namespace]
        if not ns_selectors:
            return
        for pods in self._pod_selectors.matching(labels):
            for namespaces in ns_selectors & self._ns_selectors_by_pods[pods]:
                yield self._sets[namespaces, pods]

    def namespaces_of(self, known: PodsOfNamespaces) -> Set[str]:
        """Return the namespaces that an added set selects."""
        return self._namespaces_of[known.namespaces]

    def _link(self, selector: Selector, namespace: str) -> None:
        self._ns_selectors_of.add(namespace, selector)
        self._namespaces_of.add(selector, namespace)

    def _unlink(self, selector: Selector, namespace: str) -> None:
        self._ns_selectors_of.discard(namespace, selector)
        self._namespaces_of.discard(selector, namespace)


class Membership:
    """Workloads, namespaces and groups, and the members of every watched set."""

    def __init__(self) -> None:
        self._workloads: dict[IdentityKey, Identity] = {}
        self._groups: set[GroupKey] = set()
        self._sets_of: dict[IdentityKey, frozenset[MemberSet]] = {}
        self._members: Multimap[MemberSet, IdentityKey] = Multimap()
        self._by_namespace: Multimap[str, IdentityKey] = Multimap()
        self._by_group: Multimap[GroupKey, IdentityKey] = Multimap()
        # A reference count: several policies, or several rules of one, may name the same set.
        self._watched: Counter[MemberSet] = Counter()
        self._namespace_sets: Multimap[str, PodsOfNamespace] = Multimap()
        self._multi_namespace_sets = NamespaceSelectorIndex()

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    @property
    def workloads(self) -> Mapping[IdentityKey, Identity]:
        return self._workloads

    def sets_of(self, workload: IdentityKey) -> frozenset[MemberSet]:
        """Return the watched sets that contain the workload."""
        return self._sets_of.get(workload, frozenset())

    def members(self, of: MemberSet) -> Set[IdentityKey]:
        """Return the members of a watched set."""
        return self._members[of]

    def put_workload(self, workload: Identity) -> MembershipChanges:
        old = self._workloads.get(workload.key)
        if old is not None:
            self._unindex(old)
        self._workloads[workload.key] = workload
        if workload.namespace:
            self._by_namespace.add(workload.namespace, workload.key)
        self._by_group.add(workload.group_key, workload.key)
        changes = self._update_members([workload.key])
        # Same sets, other addresses or ports: the sets count as changed, because rules resolve to these.
        if old is not None and (old.addresses, old.ports) != (workload.addresses, workload.ports):
            changes[workload.key] = changes.get(workload.key, frozenset()) | self.sets_of(workload.key)
        return changes

    def remove_workload(self, key: IdentityKey) -> MembershipChanges:
        workload = self._workloads.pop(key, None)
        if workload is None:
            return {}
        self._unindex(workload)
        left = self._sets_of.pop(key)
        for member_set in left:
            self._members.discard(member_set, key)
        return {key: left}

    def put_namespace(self, namespace: Namespace) -> MembershipChanges:
        self._multi_namespace_sets.put_namespace(namespace.name, namespace.effective_labels)
        return self._update_members(self._by_namespace[namespace.name])

    def remove_namespace(self, name: str) -> MembershipChanges:
        self._multi_namespace_sets.remove_namespace(name)
        return self._update_members(self._by_namespace[name])

    def put_group(self, key: GroupKey) -> MembershipChanges:
        self._groups.add(key)
        return self._update_members(self._by_group[key])

    def remove_group(self, key: GroupKey) -> MembershipChanges:
        self._groups.discard(key)
        return self._update_members(self._by_group[key])

    def watch(self, of: MemberSet) -> Set[IdentityKey]:
        """Keep this set until `unwatch` was called as often. Returns the members if the set was not kept before."""
        self._watched[of] += 1
        if self._watched[of] > 1:
            return frozenset()
        if isinstance(of, PodsOfNamespace):
            self._namespace_sets.add(of.namespace, of)
        elif isinstance(of, PodsOfNamespaces):
            self._multi_namespace_sets.add(of)
        # The set was not tracked so far, so one scan finds its members; later changes are incremental.
        for workload in self._candidates(of):
            if self._is_member(workload, of):
                self._members.add(of, workload.key)
                self._sets_of[workload.key] |= {of}
        return self._members[of]

    def unwatch(self, of: MemberSet) -> Set[IdentityKey]:
        """Undo one `watch`. Returns the former members if the set is not kept any more."""
        self._watched[of] -= 1
        if self._watched[of]:
            return frozenset()
        del self._watched[of]
        if isinstance(of, PodsOfNamespace):
            self._namespace_sets.discard(of.namespace, of)
        elif isinstance(of, PodsOfNamespaces):
            self._multi_namespace_sets.discard(of)
        # A copy, because the loop empties the set.
        members = frozenset(self._members[of])
        for key in members:
            self._members.discard(of, key)
            self._sets_of[key] -= {of}
        return members

    def _unindex(self, workload: Identity) -> None:
        self._by_namespace.discard(workload.namespace, workload.key)
        self._by_group.discard(workload.group_key, workload.key)

    def _update_members(self, keys: Iterable[IdentityKey]) -> MembershipChanges:
        """Make each workload a member of exactly the watched sets that match it."""
        changes: MembershipChanges = {}
        for key in keys:
            before = self.sets_of(key)
            after = frozenset(self._sets_for(self._workloads[key]))
            for left in before - after:
                self._members.discard(left, key)
            for joined in after - before:
                self._members.add(joined, key)
            self._sets_of[key] = after
            if before != after:
                changes[key] = before ^ after
        return changes

    def _sets_for(self, workload: Identity) -> Iterator[MemberSet]:
        own_group = GroupMembers(*workload.group_key)
        # A group that does not exist has no members, even if workloads name it.
        if own_group in self._watched and workload.group_key in self._groups:
            yield own_group
        for namespace_set in self._namespace_sets[workload.namespace]:
            if namespace_set.pods.matches(workload.labels):
                yield namespace_set
        yield from self._multi_namespace_sets.sets_for(workload.namespace, workload.labels)

    def _candidates(self, of: MemberSet) -> Iterator[Identity]:
        if isinstance(of, GroupMembers):
            keys: Iterable[IdentityKey] = self._by_group[GroupKey(of.tenant, of.group)]
        elif isinstance(of, PodsOfNamespace):
            keys = self._by_namespace[of.namespace]
        else:
            keys = (key for name in self._multi_namespace_sets.namespaces_of(of) for key in self._by_namespace[name])
        return (self._workloads[key] for key in keys)

    def _is_member(self, candidate: Identity, of: MemberSet) -> bool:
        if isinstance(of, GroupMembers):
            # Candidates have the right group already; only its existence is left to check.
            return GroupKey(of.tenant, of.group) in self._groups
        return of.pods.matches(candidate.labels)
