"""A map from a key to a set of values that drops keys without values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Set
from typing import Generic, Self, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)


class Multimap(Generic[K, V]):
    """The values of each key. Adding a value twice and discarding an absent one change nothing."""

    def __init__(self) -> None:
        self._values: dict[K, set[V]] = {}

    def __getitem__(self, key: K) -> Set[V]:
        # Reading must not create the key: a defaultdict would grow with every lookup.
        return self._values.get(key, frozenset())

    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def union(self, keys: Iterable[K]) -> set[V]:
        """Return the values of all these keys."""
        values = self._values
        return set().union(*(values[key] for key in keys if key in values))

    def add(self, key: K, value: V) -> None:
        self._values.setdefault(key, set()).add(value)

    def discard(self, key: K, value: V) -> None:
        values = self._values.get(key)
        if values is None:
            return
        values.discard(value)
        if not values:
            del self._values[key]

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        twin._values = {key: set(values) for key, values in self._values.items()}
        return twin
