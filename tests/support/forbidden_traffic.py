"""Forbidden packets without pause, from pods to pods in both families, and a count of those that arrive: none may."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tests.support.connectivity import FAMILIES
from tests.support.flood import Flood, Shot, Tap

from weft.lab.hosts import Pod
from weft.lab.traffic import UDP
from weft.lab.waiting import until


class Fire:
    """While the block runs, every source sends to every target on a port. Neither may go away meanwhile."""

    def __init__(self, sources: Sequence[Pod], targets: Sequence[Pod], *, port: int) -> None:
        self._sources = sources
        self._targets = targets
        self._port = port
        self._closing = ExitStack()
        self._arrived = 0

    def __enter__(self) -> Self:
        self._taps = [self._closing.enter_context(Tap(target.namespace)) for target in self._targets]
        pairs = [pair for pair in itertools.product(self._sources, self._targets, FAMILIES) if pair[0] is not pair[1]]
        mouths = {
            (source, family): self._closing.enter_context(source.place(family).open_caller(UDP))
            for source, family in itertools.product(self._sources, FAMILIES)
        }
        self._flood = Flood()
        self._flood.shots = tuple(
            Shot(mouths[source, family], str(target.address(family)), self._port) for source, target, family in pairs
        )
        self._closing.enter_context(self._flood)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    @property
    def arrived(self) -> int:
        """How many packets have come to their targets so far."""
        self._arrived += sum(each.target_port == self._port for tap in self._taps for each in tap.seen())
        return self._arrived

    async def burns(self) -> None:
        """Return when everyone has sent some more."""
        enough = self._flood.waves + 20
        await until(lambda: self._flood.waves >= enough)
