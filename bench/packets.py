"""Packets for measuring, in processes of their own: `python -m bench.packets ROLE NETNS ADDRESS [NETNS ADDRESS]`.

The role `answer` prints a line when it listens, and serves one caller after another. The role `send` prints how many
megabytes per second arrive.

The role `ask` has two places to ask at, and prints the median round trip of a 64-byte question at each in microseconds,
one line for each pair of batches. All ends are pinned to the same core, so that the cost of the path shows and not that
of waking another core up. The batches take milliseconds and turns (first, second, second, first): a machine that is
slower for a while is so for both batches of a pair.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from weft.lab.namespaces import enter

PORT = 4243
CORE = 0
QUESTION = b"?" * 64
PAIRS, ROUND_TRIPS = 40, 150
WARM_UP, WARM_UP_OF_BATCH = 1_000, 15
BULK_S = 1.0
CHUNK = bytes(1 << 20)
ASK, SEND = b"a", b"s"
WITHIN_S = 20.0


def answer(address: str) -> None:
    every_core = os.sched_getaffinity(0)
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        while True:
            caller, _ = listener.accept()
            with caller:
                if caller.recv(1) == ASK:
                    os.sched_setaffinity(0, {CORE})
                    _give_back(_quick(caller))
                    os.sched_setaffinity(0, every_core)
                else:
                    _swallow(caller)


def _give_back(fd: int) -> None:
    while data := os.read(fd, len(QUESTION)):
        os.write(fd, data)


def _swallow(caller: socket.socket) -> None:
    """Take everything, then say how much it was."""
    buffer = bytearray(len(CHUNK))
    total = 0
    while count := caller.recv_into(buffer):
        total += count
    caller.sendall(total.to_bytes(8, "big"))


def ask(places: Sequence[tuple[Path, str]]) -> list[list[float]]:
    os.sched_setaffinity(0, {CORE})
    with ExitStack() as stack:
        called = []
        for namespace, address in places:
            enter(namespace)
            called.append(_quick(stack.enter_context(_call(address, ASK))))
        for fd in called:
            _round_trip(fd, count=WARM_UP)
        return [_pair(called, backwards=number % 2 == 1) for number in range(PAIRS)]


def _pair(called: Sequence[int], *, backwards: bool) -> list[float]:
    """The round trips of a batch at each place, asked in this order or the other."""
    found = [_round_trip(fd, count=ROUND_TRIPS) for fd in (reversed(called) if backwards else called)]
    return found[::-1] if backwards else found


def _round_trip(fd: int, *, count: int) -> float:
    """The median of so many; what the batch before it left in the caches is not measured."""
    times = []
    for _ in range(WARM_UP_OF_BATCH + count):
        began = time.perf_counter_ns()
        os.write(fd, QUESTION)
        os.read(fd, len(QUESTION))
        times.append(time.perf_counter_ns() - began)
    return median(times[WARM_UP_OF_BATCH:]) / 1e3


def send(address: str) -> float:
    with _call(address, SEND) as called:
        began = time.perf_counter()
        while time.perf_counter() - began < BULK_S:
            called.sendall(CHUNK)
        called.shutdown(socket.SHUT_WR)
        total = int.from_bytes(called.recv(8), "big")
        return total / (time.perf_counter() - began) / 1e6


def _call(address: str, what: bytes) -> socket.socket:
    called = socket.create_connection((address, PORT), timeout=WITHIN_S)
    # The kernel's default may be one that paces, which measures its pace.
    called.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    called.sendall(what)
    return called


def _quick(connection: socket.socket) -> int:
    """Its descriptor, blocking, and without waiting for more to send."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(True)
    return connection.fileno()


if __name__ == "__main__":
    _, role, *words = sys.argv
    places = [(Path(namespace), address) for namespace, address in zip(words[::2], words[1::2], strict=True)]
    if role == "ask":
        for pair in ask(places):
            print(*pair)
    else:
        ((inside, target),) = places
        enter(inside)
        if role == "answer":
            answer(target)
        else:
            print(send(target))
