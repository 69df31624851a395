"""Differences between desired and actual state: what to put and what to drop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Difference(Generic[T]):
    """`put` is in order of creation, `drop` in the reverse order."""

    put: tuple[T, ...]
    drop: tuple[T, ...]

    def __bool__(self) -> bool:
        return bool(self.put or self.drop)


def diff(desired: Set[T], actual: Set[T], *, rank: Callable[[T], int]) -> Difference[T]:
    """Put what is desired and missing; drop what exists and is not desired."""
    put = sorted(desired - actual, key=rank)
    drop = sorted(actual - desired, key=rank, reverse=True)
    return Difference(tuple(put), tuple(drop))


def joined(differences: Iterable[Difference[T]]) -> Difference[T]:
    """Several differences as one: the first is put first and dropped last."""
    listed = list(differences)
    return Difference(
        tuple(item for difference in listed for item in difference.put),
        tuple(item for difference in reversed(listed) for item in difference.drop),
    )


def compose(differences: Iterable[Difference[T]]) -> Difference[T]:
    """One difference with the same result as these, applied one after the other."""
    last: dict[T, bool] = {}
    for difference in differences:
        # A difference that drops and puts the same item replaces it: drops come first.
        for item, is_put in (*((item, False) for item in difference.drop), *((item, True) for item in difference.put)):
            last.pop(item, None)  # dicts keep the first insertion's position; the last operation decides the order
            last[item] = is_put
    put = (item for item, is_put in last.items() if is_put)
    return Difference(tuple(put), tuple(item for item, is_put in last.items() if not is_put))


def net(first: Difference[T], second: Difference[T]) -> Difference[T]:
    """One difference for two that follow each other: what one puts and the other drops is in neither part.

    Unlike `compose`, whose differences need not build on each other.
    """
    if not first or not second:
        return first or second
    undone = (set(first.put) & set(second.drop)) | (set(first.drop) & set(second.put))
    return Difference(
        tuple(item for item in first.put + second.put if item not in undone),
        tuple(item for item in first.drop + second.drop if item not in undone),
    )
