"""Traffic in separate processes: `python -m bench.packets ROLE NETNS ADDRESS [NETNS ADDRESS]`.

The role `serve` prints a line when it listens, and serves one connection after another. The role `send` prints the TCP
throughput in megabytes per second.

The role `ping` has two servers, and prints the median TCP round trip of 64 bytes to each in microseconds, one line per
pair of batches. All ends are pinned to the same core, so that the path is measured and not the wake-up of another core.
The batches take milliseconds and alternate (first, second, second, first): a temporarily slow machine affects both
batches of a pair.
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
PAYLOAD = b"?" * 64
PAIRS, ROUND_TRIPS = 40, 150
WARM_UP, WARM_UP_OF_BATCH = 1_000, 15
BULK_S = 1.0
CHUNK = bytes(1 << 20)
PING, SEND = b"a", b"s"
WITHIN_S = 20.0


def serve(address: str) -> None:
    every_core = os.sched_getaffinity(0)
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                if connection.recv(1) == PING:
                    os.sched_setaffinity(0, {CORE})
                    _echo(_low_latency(connection))
                    os.sched_setaffinity(0, every_core)
                else:
                    _discard(connection)


def _echo(fd: int) -> None:
    while data := os.read(fd, len(PAYLOAD)):
        os.write(fd, data)


def _discard(connection: socket.socket) -> None:
    """Read until EOF, then send the number of bytes."""
    buffer = bytearray(len(CHUNK))
    total = 0
    while count := connection.recv_into(buffer):
        total += count
    connection.sendall(total.to_bytes(8, "big"))


def ping(places: Sequence[tuple[Path, str]]) -> list[list[float]]:
    os.sched_setaffinity(0, {CORE})
    with ExitStack() as stack:
        connections = []
        for namespace, address in places:
            enter(namespace)
            connections.append(_low_latency(stack.enter_context(_connect(address, PING))))
        for fd in connections:
            _round_trip(fd, count=WARM_UP)
        return [_pair(connections, backwards=number % 2 == 1) for number in range(PAIRS)]


def _pair(connections: Sequence[int], *, backwards: bool) -> list[float]:
    """The median round trip of a batch to each server, in this order or the reverse."""
    found = [_round_trip(fd, count=ROUND_TRIPS) for fd in (reversed(connections) if backwards else connections)]
    return found[::-1] if backwards else found


def _round_trip(fd: int, *, count: int) -> float:
    """The median round trip; the first ones warm up the caches and are not counted."""
    times = []
    for _ in range(WARM_UP_OF_BATCH + count):
        began = time.perf_counter_ns()
        os.write(fd, PAYLOAD)
        os.read(fd, len(PAYLOAD))
        times.append(time.perf_counter_ns() - began)
    return median(times[WARM_UP_OF_BATCH:]) / 1e3


def send(address: str) -> float:
    with _connect(address, SEND) as connection:
        began = time.perf_counter()
        while time.perf_counter() - began < BULK_S:
            connection.sendall(CHUNK)
        connection.shutdown(socket.SHUT_WR)
        total = int.from_bytes(connection.recv(8), "big")
        return total / (time.perf_counter() - began) / 1e6


def _connect(address: str, what: bytes) -> socket.socket:
    connection = socket.create_connection((address, PORT), timeout=WITHIN_S)
    # The default congestion control may pace packets, which would be measured instead.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    connection.sendall(what)
    return connection


def _low_latency(connection: socket.socket) -> int:
    """The descriptor of a blocking socket with TCP_NODELAY."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setblocking(True)
    return connection.fileno()


if __name__ == "__main__":
    _, role, *words = sys.argv
    places = [(Path(namespace), address) for namespace, address in zip(words[::2], words[1::2], strict=True)]
    if role == "ping":
        for pair in ping(places):
            print(*pair)
    else:
        ((inside, target),) = places
        enter(inside)
        if role == "serve":
            serve(target)
        else:
            print(send(target))
