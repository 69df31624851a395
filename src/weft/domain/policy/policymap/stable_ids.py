"""Content-derived ids: the same on every node and after every restart, without coordination.

The id of a key is a hash of its text. When two texts collide, the smaller text keeps the id and the other tries its
next hash: in text order, each key gets the first free id of its own hash sequence. So the ids depend on the set of keys
alone. The price: adding or removing a colliding key can, rarely, change the id of another key (`reassigned`).
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

from weft.domain.policy.model.multimap import Multimap

K = TypeVar("K", bound=Hashable)

# Ids share 32-bit marks and registers of the datapaths with the flags of `policy_state`, which start at bit 28.
BITS = 28


class StableIds(Generic[K]):
    """The ids of some keys, each from 1 to `2 ** bits - 1`. Tests use fewer bits to provoke collisions."""

    def __init__(self, *, bits: int = BITS) -> None:
        self._mask = (1 << bits) - 1
        self._texts: dict[K, str] = {}
        self._attempts: dict[K, int] = {}
        self._ids: dict[K, int] = {}
        self._holder: dict[int, K] = {}
        # The keys that hashed to an id which a smaller text holds.
        self._contenders: Multimap[int, K] = Multimap()
        # Keys whose id has changed. The reader clears it.
        self.reassigned: set[K] = set()

    def __getitem__(self, key: K) -> int:
        return self._ids[key]

    def __contains__(self, key: K) -> bool:
        return key in self._ids

    def add(self, key: K, text: str) -> None:
        """Assign an id to a new key. Different keys have different texts."""
        self._texts[key] = text
        self._attempts[key] = 0
        self._assign(key)
        self.reassigned.discard(key)

    def remove(self, key: K) -> None:
        """Free the id of a key; a contender may take it over."""
        text, attempts, freed = self._texts.pop(key), self._attempts.pop(key), self._ids.pop(key)
        self._remove_contender(key, text, attempts=attempts)
        self.reassigned.discard(key)
        del self._holder[freed]
        self._hand_over(freed)

    def _assign(self, key: K) -> None:
        """Assign to a key without an id the first id of its sequence that no smaller text holds."""
        while True:
            text = self._texts[key]
            candidate = self._hash(text, self._attempts[key])
            holder = self._holder.get(candidate)
            # 0 means "no identity" in a datapath, so a hash of 0 is skipped.
            if candidate and (holder is None or text < self._texts[holder]):
                self._take(key, candidate)
                if holder is None:
                    return
                # The smaller text displaces the holder, which continues with its own next hash.
                key = holder
                del self._ids[key]
            self._contenders.add(candidate, key)
            self._attempts[key] += 1

    def _hand_over(self, freed: int) -> None:
        """Assign a freed id to the smallest of its contenders, then the id that this contender gives up, and so on."""
        while contenders := self._contenders[freed]:
            key = min(contenders, key=self._texts.__getitem__)
            given_up = self._ids.pop(key)
            del self._holder[given_up]
            self._remove_contender(key, self._texts[key], attempts=self._attempts[key])
            self._attempts[key] = 0
            while self._hash(self._texts[key], self._attempts[key]) != freed:
                self._contenders.add(self._hash(self._texts[key], self._attempts[key]), key)
                self._attempts[key] += 1
            self._take(key, freed)
            freed = given_up

    def _take(self, key: K, new_id: int) -> None:
        self._ids[key] = new_id
        self._holder[new_id] = key
        self.reassigned.add(key)

    def _remove_contender(self, key: K, text: str, *, attempts: int) -> None:
        for attempt in range(attempts):
            self._contenders.discard(self._hash(text, attempt), key)

    def _hash(self, text: str, attempt: int) -> int:
        digest = blake2b(f"{attempt} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") & self._mask
