"""A connection to an OVS daemon that opens on first use, and reconnects on the next use after it was lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from weft.adapters.ovs.control.stream import Stream
from weft.domain.errors import DatapathFault

T = TypeVar("T")


class Connection(ABC):
    """Base of the OVSDB and OpenFlow clients. Calls block with deadlines; `connect_count` counts how often it opened.

    A caller that sees another count knows that it must read back everything: the daemon may have restarted.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.connect_count = 0
        self._stream: Stream | None = None

    def poll(self) -> None:
        """Process pending messages without waiting; `DatapathFault` if the connection is lost.

        It does not reconnect then, so that the caller notices the loss.
        """
        if self._stream is None:
            self._open()
        else:
            self._close_on_fault(self._drain)

    def ensure_connected(self) -> None:
        """As `poll`, but reconnect at once if the connection is lost."""
        try:
            self.poll()
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
            self._handshake()
        except BaseException:
            self.close()  # else the next use would take it for a connection with a complete handshake
            raise
        self.connect_count += 1

    def _close_on_fault(self, work: Callable[[Stream], T]) -> T:
        """Do some work on the connection, and close it if that fails: its messages are out of step then."""
        assert self._stream is not None
        try:
            return work(self._stream)
        except DatapathFault:
            self.close()
            raise

    @abstractmethod
    def _handshake(self) -> None:
        """Set up a new connection, and discard all state of the one before."""

    @abstractmethod
    def _drain(self, stream: Stream) -> None:
        """Process the messages that have arrived, and answer keepalives."""
