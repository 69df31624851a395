"""A connection to a daemon of the switch that its first use opens, and the next one after it was lost opens anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from weft.adapters.ovs.control.stream import Stream
from weft.domain.errors import DatapathFault

T = TypeVar("T")


class Connection(ABC):
    """What both protocols have in common. It blocks with deadlines; `connections` counts how often it was opened."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.connections = 0
        self._stream: Stream | None = None

    def look(self) -> None:
        """Take in what has been said meanwhile, waiting for nothing; `DatapathFault` when the connection has ended."""
        if self._stream is None:
            self._open()
        else:
            self._guarded(self._catch_up)

    def look_alive(self) -> None:
        """As `look`, but a connection that has ended meanwhile is opened anew at once."""
        try:
            self.look()
        except DatapathFault:
            self._open()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open(self) -> None:
        self.close()
        self._stream = Stream(self.address)
        try:
            self._begin()
        except BaseException:
            self.close()  # else the next use would take it for one that has begun
            raise
        self.connections += 1

    def _guarded(self, work: Callable[[Stream], T]) -> T:
        """The result of some work on the connection, which is closed when it fails."""
        assert self._stream is not None
        try:
            return work(self._stream)
        except DatapathFault:
            self.close()
            raise

    @abstractmethod
    def _begin(self) -> None:
        """The first words on a new connection; nothing is known of one before."""

    @abstractmethod
    def _catch_up(self, stream: Stream) -> None:
        """Take in, and answer, what has been said and is waiting."""
