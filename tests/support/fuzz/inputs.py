"""Ways to hand bytes to a parser: as two parts, as an asynchronous stream, or as what a peer sends on a connection."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from weft.adapters.ovs.control.stream import Stream

T = TypeVar("T")

# Between two parts of one input.
SEPARATOR = b"\xff\x00\xff"


def split(data: bytes) -> tuple[bytes, bytes]:
    """The two parts of an input; the second is empty when a mutation removed the separator."""
    first, _, second = data.partition(SEPARATOR)
    return first, second


def finish(work: Coroutine[object, object, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as result:
        value: T = result.value
        return value
    work.close()
    raise AssertionError("it waits for something")


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    """The bytes as a connection may deliver them."""
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def collect(items: AsyncGenerator[T, None]) -> list[T]:
    """All items of an asynchronous generator."""
    return [item async for item in items]


@contextmanager
def stream_of(data: bytes) -> Iterator[Stream]:
    """A real connection to a daemon that has sent these bytes and closed its side."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        theirs.send(data)  # at most `MAX_INPUT`, which fits into the buffer of the socket
        theirs.shutdown(socket.SHUT_WR)
        stream = Stream.__new__(Stream)
        stream.address = "unix:fuzz"
        stream._socket = ours
        yield stream
