"""Packets for measuring, in processes of their own: `python -m bench.packets ROLE NETNS ADDRESS`.

The role `answer` prints a line when it listens, and serves one caller after another. The role `ask` prints the median
round trip of a 64-byte question in microseconds: both ends are pinned to the same core, so that the cost of the path
shows and not that of waking another core up. The role `send` prints how many megabytes per second arrive.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from statistics import median

from weft.testing.apart import enter

PORT = 4243
CORE = 0
QUESTION = b"?" * 64
ROUND_TRIPS, WARM_UP = 4_000, 400
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


def ask(address: str) -> float:
    os.sched_setaffinity(0, {CORE})
    times = []
    with _call(address, ASK) as called:
        fd = _quick(called)
        for _ in range(WARM_UP + ROUND_TRIPS):
            began = time.perf_counter_ns()
            os.write(fd, QUESTION)
            os.read(fd, len(QUESTION))
            times.append(time.perf_counter_ns() - began)
    return median(times[WARM_UP:]) / 1e3


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
    _, role, namespace, target = sys.argv
    enter(Path(namespace))
    if role == "answer":
        answer(target)
    else:
        print({"ask": ask, "send": send}[role](target), flush=True)
