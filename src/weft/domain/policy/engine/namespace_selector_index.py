"""Sets of pods over many namespaces, findable by a pod's namespace and labels.

Which namespace selectors match a namespace is known for each namespace, and which pod selectors match a pod's labels is
found through `SelectorIndex`. A pod is in the sets where both meet, so thousands of sets cost a pod almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Self

from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.engine.selector_index import SelectorIndex
from weft.domain.policy.model.rules import PodsOfNamespaces
from weft.domain.selectors import Selector


class NamespaceSelectorIndex:
    """Namespaces and the sets over them."""

    def __init__(self) -> None:
        self._labels: dict[str, Mapping[str, str]] = {}
        self._sets: dict[tuple[Selector, Selector], PodsOfNamespaces] = {}
        self._scopes_of_pods: Index[Selector, Selector] = Index()
        self._pods_of_scope: Index[Selector, Selector] = Index()
        self._pod_selectors = SelectorIndex()
        self._scopes = SelectorIndex()
        self._scopes_of_namespace: Index[str, Selector] = Index()
        self._namespaces_of_scope: Index[Selector, str] = Index()

    def copy(self) -> Self:
        """A twin that can be changed alone."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    def put_namespace(self, name: str, labels: Mapping[str, str]) -> None:
        self.remove_namespace(name)
        self._labels[name] = labels
        for scope in self._scopes.matching(labels):
            self._join(scope, name)

    def remove_namespace(self, name: str) -> None:
        """Forget the namespace: its pods are in no set, as nobody knows its labels."""
        self._labels.pop(name, None)
        for scope in tuple(self._scopes_of_namespace[name]):
            self._leave(scope, name)

    def add(self, new: PodsOfNamespaces) -> None:
        if not self._pods_of_scope[new.namespaces]:
            self._scopes.add(new.namespaces)
            for name, labels in self._labels.items():
                if new.namespaces.matches(labels):
                    self._join(new.namespaces, name)
        self._sets[new.namespaces, new.pods] = new
        self._pod_selectors.add(new.pods)
        self._pods_of_scope.add(new.namespaces, new.pods)
        self._scopes_of_pods.add(new.pods, new.namespaces)

    def discard(self, old: PodsOfNamespaces) -> None:
        self._sets.pop((old.namespaces, old.pods), None)
        self._pods_of_scope.discard(old.namespaces, old.pods)
        self._scopes_of_pods.discard(old.pods, old.namespaces)
        if not self._scopes_of_pods[old.pods]:
            self._pod_selectors.discard(old.pods)
        if not self._pods_of_scope[old.namespaces]:
            self._scopes.discard(old.namespaces)
            for name in tuple(self._namespaces_of_scope[old.namespaces]):
                self._leave(old.namespaces, name)

    def sets_for(self, namespace: str, labels: Mapping[str, str]) -> Iterator[PodsOfNamespaces]:
        """The sets that a pod with these labels in this namespace is in."""
        here = self._scopes_of_namespace[namespace]
        if not here:
            return
        for pods in self._pod_selectors.matching(labels):
            for scope in here & self._scopes_of_pods[pods]:
                yield self._sets[scope, pods]

    def namespaces_of(self, known: PodsOfNamespaces) -> Set[str]:
        """The namespaces that a set, which was added, reaches over."""
        return self._namespaces_of_scope[known.namespaces]

    def _join(self, scope: Selector, namespace: str) -> None:
        self._scopes_of_namespace.add(namespace, scope)
        self._namespaces_of_scope.add(scope, namespace)

    def _leave(self, scope: Selector, namespace: str) -> None:
        self._scopes_of_namespace.discard(namespace, scope)
        self._namespaces_of_scope.discard(scope, namespace)
