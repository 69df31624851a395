"""Wanted against actual: what to put and what to drop. Applying the plan to the actual state yields the wanted one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Set
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
