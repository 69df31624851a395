"""Continuous traffic that policy denies, in both families, and a count of the packets that arrive: none may."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.support.connectivity import FAMILIES
from tests.support.flood import Flood, FloodDatagram, Tap

from weft.lab.hosts import Pod
from weft.lab.traffic import UDP
from weft.lab.waiting import until


class ForbiddenTraffic:
    """Every source sends to every target on a port while the block runs. No pod may be deleted meanwhile."""

    def __init__(
        self, sources: Sequence[Pod], targets: Sequence[Pod], *, port: int, families: Sequence[int] = FAMILIES
    ) -> None:
        self._families = families
        self._sources = sources
        self._targets = targets
        self._port = port
        self._closing = ExitStack()
        self._arrived = 0

    def __enter__(self) -> Self:
        self._taps = [self._closing.enter_context(Tap(target.namespace)) for target in self._targets]
        pairs = [
            pair for pair in itertools.product(self._sources, self._targets, self._families) if pair[0] is not pair[1]
        ]
        senders = {
            (source, family): self._closing.enter_context(source.place(family).open_client(UDP))
            for source, family in itertools.product(self._sources, self._families)
        }
        self._flood = Flood()
        self._flood.datagrams = tuple(
            FloodDatagram(senders[source, family], str(target.address(family)), self._port)
            for source, target, family in pairs
        )
        self._closing.enter_context(self._flood)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def arrived(self) -> int:
        """The number of packets that have arrived so far."""
        self._arrived += sum(each.target_port == self._port for tap in self._taps for each in tap.packets())
        return self._arrived

    async def wait_for_more_packets(self) -> None:
        """Return after 20 more rounds of packets from every source."""
        enough = self._flood.rounds + 20
        await until(lambda: self._flood.rounds >= enough)
