"""Numbers that follow from what they stand for, so that every node and every restart finds the same ones.

A key's number is a hash of its text. Where two texts have the same hash, the lesser text keeps it and the other tries
its next hash: in the order of their texts, each key has the first of its own numbers that is free. So the numbers of a
set of keys depend on nothing but the set; the price is that a rare collision, coming or going, gives another key a new
number (`moved`).
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

from weft.domain.policy.engine.rule_index import Index

K = TypeVar("K", bound=Hashable)

BITS = 28


class StableIds(Generic[K]):
    """The numbers of some keys, each from 1 to `2 ** bits - 1`. Fewer bits are for tests."""

    def __init__(self, *, bits: int = BITS) -> None:
        self._mask = (1 << bits) - 1
        self._texts: dict[K, str] = {}
        self._tries: dict[K, int] = {}
        self._number: dict[K, int] = {}
        self._holder: dict[int, K] = {}
        self._refused: Index[int, K] = Index()
        # Keys that have another number than before, until the reader clears it.
        self.moved: set[K] = set()

    def __getitem__(self, key: K) -> int:
        return self._number[key]

    def __contains__(self, key: K) -> bool:
        return key in self._number

    def add(self, key: K, text: str) -> None:
        """Give a new key its number. Texts of different keys differ."""
        self._texts[key] = text
        self._tries[key] = 0
        self._settle(key)
        self.moved.discard(key)

    def remove(self, key: K) -> None:
        """Free a key's number; who was refused it may take it now."""
        text, tries, number = self._texts.pop(key), self._tries.pop(key), self._number.pop(key)
        self._withdraw(key, text, tries=tries)
        self.moved.discard(key)
        del self._holder[number]
        self._fill(number)

    def _settle(self, key: K) -> None:
        """Let a key without a number take the first of its own that no lesser text holds."""
        while True:
            text = self._texts[key]
            number = self._hash(text, self._tries[key])
            holder = self._holder.get(number)
            if number and (holder is None or text < self._texts[holder]):
                self._take(key, number)
                if holder is None:
                    return
                key = holder
                del self._number[key]
            self._refused.add(number, key)
            self._tries[key] += 1

    def _fill(self, number: int) -> None:
        """Give a free number to the least of those who were refused it, then the number which that one leaves."""
        while waiting := self._refused[number]:
            key = min(waiting, key=self._texts.__getitem__)
            left = self._number.pop(key)
            del self._holder[left]
            self._withdraw(key, self._texts[key], tries=self._tries[key])
            self._tries[key] = 0
            while self._hash(self._texts[key], self._tries[key]) != number:
                self._refused.add(self._hash(self._texts[key], self._tries[key]), key)
                self._tries[key] += 1
            self._take(key, number)
            number = left

    def _take(self, key: K, number: int) -> None:
        self._number[key] = number
        self._holder[number] = key
        self.moved.add(key)

    def _withdraw(self, key: K, text: str, *, tries: int) -> None:
        for attempt in range(tries):
            self._refused.discard(self._hash(text, attempt), key)

    def _hash(self, text: str, attempt: int) -> int:
        digest = blake2b(f"{attempt} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") & self._mask
