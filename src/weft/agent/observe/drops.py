"""What was refused on this node, as people are told of it: the latest is remembered, and may be followed.

All that is kept is bounded, and nobody who reads it can hold the agent up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from weft.domain.errors import Unavailable
from weft.domain.ids import TenantName
from weft.runtime.backoff import wait_event

# How many drops are remembered.
KEPT = 1000
MOST_FOLLOWERS = 16
# How many drops a follower may leave unread; one that is slower is cut off.
UNREAD = 500

TOO_SLOW = "cut off: the drops came faster than they were read"
STOPPING = "the agent stops"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a refused packet. `identity` is the engine's name, `pod` what its runtime calls it, where it did."""

    address: str
    port: int
    identity: str
    pod: str = ""

    def is_called(self, text: str) -> bool:
        """Whether a person may mean this end: by address, key, endpoint id, pod, or namespace and pod."""
        names = {self.address, self.identity, self.identity.rpartition(":")[2], self.pod, self.pod.partition("/")[2]}
        return text in names


class NamedDrop(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A refused packet as people are told of it. `direction` is empty where no policy decided."""

    at: float
    tenant: TenantName
    rule: str
    reason: str
    protocol: int
    service: str
    source: End
    target: End
    direction: str = ""
    in_iface: str = ""
    out_iface: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which drops somebody asks for; what is empty does not matter. `since` is in seconds since the epoch."""

    tenant: str = ""
    pod: str = ""
    since: float = 0.0

    def holds(self, drop: NamedDrop) -> bool:
        return (
            (not self.tenant or drop.tenant == self.tenant)
            and (not self.pod or drop.source.is_called(self.pod) or drop.target.is_called(self.pod))
            and drop.at >= self.since
        )


class Follower:
    """Somebody who is told of drops as they come."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._unread: list[NamedDrop] = []
        self._news = asyncio.Event()
        # Why nothing more comes; empty while it may.
        self.ended = ""

    def offer(self, drop: NamedDrop) -> None:
        """Never waits."""
        if self.ended or not self._wanted.holds(drop):
            return
        if len(self._unread) >= UNREAD:
            self.end(TOO_SLOW)
            return
        self._unread.append(drop)
        self._news.set()

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._news.set()

    async def take(self, *, within: float) -> list[NamedDrop]:
        """What has come since the last time; nothing when nothing comes within so many seconds, or ever again."""
        await wait_event(self._news, within=within)
        self._news.clear()
        taken, self._unread = self._unread, []
        return taken


class DropLog:
    """The latest drops, and those who follow them."""

    def __init__(self) -> None:
        self._kept: deque[NamedDrop] = deque(maxlen=KEPT)
        self._followers: set[Follower] = set()
        # How many the datapath has told of since the start: a sample when it is much.
        self.total = 0

    @property
    def followers(self) -> int:
        """How many follow now."""
        return len(self._followers)

    def add(self, drops: Iterable[NamedDrop]) -> None:
        for drop in drops:
            self.total += 1
            self._kept.append(drop)
            for follower in self._followers:
                follower.offer(drop)

    def recent(self, wanted: Wanted) -> list[NamedDrop]:
        """Those that are remembered, oldest first."""
        return [drop for drop in self._kept if wanted.holds(drop)]

    @contextmanager
    def following(self, wanted: Wanted) -> Iterator[Follower]:
        """A follower from now on; `Unavailable` when there are too many already."""
        if self.followers >= MOST_FOLLOWERS:
            raise Unavailable(f"{MOST_FOLLOWERS} follow the drops already")
        follower = Follower(wanted)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

    def end_all(self) -> None:
        """Send all followers away: the agent stops."""
        for follower in self._followers:
            follower.end(STOPPING)
