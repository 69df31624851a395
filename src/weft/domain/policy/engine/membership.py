"""Who is a member of which set, kept up to date change by change.

This is the dependency index of the engine: a workload is tried against the sets of its own namespace, its own group,
and the few sets over many namespaces that `NamespaceSelectorIndex` finds. A set is held while a policy that names it watches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Self

from weft.domain.ids import GroupKey
from weft.domain.policy.engine.namespace_selector_index import NamespaceSelectorIndex
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.identities import Identity, IdentityKey, Namespace
from weft.domain.policy.model.rules import GroupMembers, MemberSet, PodsOfNamespace, PodsOfNamespaces

# What a change did: for each workload the sets it joined or left, or in which its addresses or ports changed.
Moves = dict[IdentityKey, Set[MemberSet]]


class Membership:
    """Workloads, namespaces and groups, and the members of every watched set."""

    def __init__(self) -> None:
        self._workloads: dict[IdentityKey, Identity] = {}
        self._groups: set[GroupKey] = set()
        self._sets_of: dict[IdentityKey, frozenset[MemberSet]] = {}
        self._members: Index[MemberSet, IdentityKey] = Index()
        self._by_namespace: Index[str, IdentityKey] = Index()
        self._by_group: Index[GroupKey, IdentityKey] = Index()
        self._watched: Counter[MemberSet] = Counter()
        self._local_sets: Index[str, PodsOfNamespace] = Index()
        self._crossing_sets = NamespaceSelectorIndex()

    def copy(self) -> Self:
        """A twin that can be changed alone."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    @property
    def workloads(self) -> Mapping[IdentityKey, Identity]:
        return self._workloads

    def sets_of(self, workload: IdentityKey) -> frozenset[MemberSet]:
        """The watched sets that the workload is a member of."""
        return self._sets_of.get(workload, frozenset())

    def members(self, of: MemberSet) -> Set[IdentityKey]:
        """The members of a watched set."""
        return self._members[of]

    def put_workload(self, workload: Identity) -> Moves:
        old = self._workloads.get(workload.key)
        if old is not None:
            self._unfile(old)
        self._workloads[workload.key] = workload
        if workload.namespace:
            self._by_namespace.add(workload.namespace, workload.key)
        self._by_group.add(workload.group_key, workload.key)
        moves = self._enrol([workload.key])
        if old is not None and (old.addresses, old.ports) != (workload.addresses, workload.ports):
            moves[workload.key] = moves.get(workload.key, frozenset()) | self.sets_of(workload.key)
        return moves

    def remove_workload(self, key: IdentityKey) -> Moves:
        workload = self._workloads.pop(key, None)
        if workload is None:
            return {}
        self._unfile(workload)
        left = self._sets_of.pop(key)
        for each in left:
            self._members.discard(each, key)
        return {key: left}

    def put_namespace(self, namespace: Namespace) -> Moves:
        self._crossing_sets.put_namespace(namespace.name, namespace.effective_labels)
        return self._enrol(self._by_namespace[namespace.name])

    def remove_namespace(self, name: str) -> Moves:
        self._crossing_sets.remove_namespace(name)
        return self._enrol(self._by_namespace[name])

    def put_group(self, key: GroupKey) -> Moves:
        self._groups.add(key)
        return self._enrol(self._by_group[key])

    def remove_group(self, key: GroupKey) -> Moves:
        self._groups.discard(key)
        return self._enrol(self._by_group[key])

    def watch(self, of: MemberSet) -> Set[IdentityKey]:
        """Hold this set until `unwatch` was called as often. Gives the members when it was not held before."""
        self._watched[of] += 1
        if self._watched[of] > 1:
            return frozenset()
        if isinstance(of, PodsOfNamespace):
            self._local_sets.add(of.namespace, of)
        elif isinstance(of, PodsOfNamespaces):
            self._crossing_sets.add(of)
        for workload in self._candidates(of):
            if self._belongs(workload, of):
                self._members.add(of, workload.key)
                self._sets_of[workload.key] |= {of}
        return self._members[of]

    def unwatch(self, of: MemberSet) -> Set[IdentityKey]:
        """Undo one `watch`. Gives who was a member when the set is not held any more."""
        self._watched[of] -= 1
        if self._watched[of]:
            return frozenset()
        del self._watched[of]
        if isinstance(of, PodsOfNamespace):
            self._local_sets.discard(of.namespace, of)
        elif isinstance(of, PodsOfNamespaces):
            self._crossing_sets.discard(of)
        members = frozenset(self._members[of])
        for key in members:
            self._members.discard(of, key)
            self._sets_of[key] -= {of}
        return members

    def _unfile(self, workload: Identity) -> None:
        self._by_namespace.discard(workload.namespace, workload.key)
        self._by_group.discard(workload.group_key, workload.key)

    def _enrol(self, keys: Iterable[IdentityKey]) -> Moves:
        """Make each workload a member of exactly the watched sets it belongs to."""
        moves: Moves = {}
        for key in keys:
            before = self.sets_of(key)
            after = frozenset(self._sets_for(self._workloads[key]))
            for each in before - after:
                self._members.discard(each, key)
            for each in after - before:
                self._members.add(each, key)
            self._sets_of[key] = after
            if before != after:
                moves[key] = before ^ after
        return moves

    def _sets_for(self, workload: Identity) -> Iterator[MemberSet]:
        own_group = GroupMembers(*workload.group_key)
        if own_group in self._watched and workload.group_key in self._groups:
            yield own_group
        for local in self._local_sets[workload.namespace]:
            if local.pods.matches(workload.labels):
                yield local
        yield from self._crossing_sets.sets_for(workload.namespace, workload.labels)

    def _candidates(self, of: MemberSet) -> Iterator[Identity]:
        if isinstance(of, GroupMembers):
            keys: Iterable[IdentityKey] = self._by_group[GroupKey(of.tenant, of.group)]
        elif isinstance(of, PodsOfNamespace):
            keys = self._by_namespace[of.namespace]
        else:
            keys = (key for name in self._crossing_sets.namespaces_of(of) for key in self._by_namespace[name])
        return (self._workloads[key] for key in keys)

    def _belongs(self, candidate: Identity, of: MemberSet) -> bool:
        if isinstance(of, GroupMembers):
            return GroupKey(of.tenant, of.group) in self._groups
        return of.pods.matches(candidate.labels)
