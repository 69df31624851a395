"""Wanted against actual: what to put and what to drop. Applying the plan to the actual state yields the wanted one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Difference(Generic[T]):
    """`put` in the order in which things may exist, `drop` in the reverse one."""

    put: tuple[T, ...]
    drop: tuple[T, ...]

    def __bool__(self) -> bool:
        return bool(self.put or self.drop)


def diff(wanted: Set[T], actual: Set[T], *, rank: Callable[[T], int]) -> Difference[T]:
    """What is wanted and not there, and what is there and not wanted."""
    put = sorted(wanted - actual, key=rank)
    drop = sorted(actual - wanted, key=rank, reverse=True)
    return Difference(tuple(put), tuple(drop))


def in_turn(differences: Iterable[Difference[T]]) -> Difference[T]:
    """One difference that leads where these lead one after the other."""
    stays: dict[T, bool] = {}
    for each in differences:
        for thing, is_put in (*((thing, False) for thing in each.drop), *((thing, True) for thing in each.put)):
            stays.pop(thing, None)  # what is told last is told in its place
            stays[thing] = is_put
    put = (thing for thing, is_put in stays.items() if is_put)
    return Difference(tuple(put), tuple(thing for thing, is_put in stays.items() if not is_put))
