"""Sends one packet for each of many flows at once and reports which of them arrive.

Every packet either arrives or is counted as denied, so nothing waits for a timeout to learn that a flow is blocked.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Self

from weft.lab.traffic import TCP, UDP, NetnsAddress, Transport
from weft.lab.waiting import DEADLINE

# Linux retransmits a SYN after this long (TCP_TIMEOUT_INIT); the denied counter would count it twice.
_SYN_RETRANSMIT_S = 1.0
# So a round ends before that, and flows without a result are probed again.
_ROUND_S = 0.8
_ROUNDS = 10
_POLL_S = 0.002
# SO_LINGER with timeout 0: close() sends RST, so no FIN handshake is in flight when the next round begins.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Probe(NamedTuple):
    """The first packet of a flow."""

    source: NetnsAddress
    target: NetnsAddress
    transport: Transport
    port: int


class ProbeResults(NamedTuple):
    """The probes that arrived, and how many packets neither arrived nor were counted as denied."""

    arrived: frozenset[Probe]
    lost: int


class Listeners:
    """Listening sockets, opened on first use and reused by later rounds."""

    def __init__(self) -> None:
        self._open: dict[tuple[NetnsAddress, Transport, int], tuple[socket.socket, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _listener, closing in self._open.values():
            closing.close()

    def at(self, address: NetnsAddress, transport: Transport, port: int) -> socket.socket:
        """The socket that listens on an address and port."""
        key = (address, transport, port)
        if key not in self._open:
            with ExitStack() as closing:
                listener = closing.enter_context(address.listening(port, transport))
                self._open[key] = listener, closing.pop_all()
        return self._open[key][0]

    def close_at(self, address: NetnsAddress) -> None:
        """Close all sockets of an address that is removed."""
        for key in [key for key in self._open if key[0] == address]:
            self._open.pop(key)[1].close()


def send_probes(probes: Sequence[Probe], listeners: Listeners, *, count_denied: Callable[[], int]) -> ProbeResults:
    """Send all probes at once, again while packets are lost. `count_denied` reads the datapath's denied counter."""
    results = ProbeResults(frozenset(), len(probes))
    for _ in range(_ROUNDS):
        results = _send_round(probes, listeners, count_denied)
        if not results.lost:
            break
    return results


def _send_round(probes: Sequence[Probe], listeners: Listeners, count_denied: Callable[[], int]) -> ProbeResults:
    arrived: dict[Probe, socket.socket | None] = {}
    with _listening(probes, listeners) as receive, ExitStack() as closing:
        sent = dict(_open_clients(probes, closing))
        denied_before = count_denied()
        began = time.monotonic()
        for client, probe in sent.values():
            _send(client, probe)
        lost = len(probes)
        while lost > 0 and time.monotonic() < began + _ROUND_S:
            idle = True
            for key, connection in receive():
                idle = False
                if key in sent:
                    arrived[sent[key][1]] = connection
                elif connection is not None:
                    connection.close()  # a client of an earlier round
            if idle:
                # Reading the counter is slow, so only when no packet is waiting.
                lost = len(probes) - len(arrived) - (count_denied() - denied_before)
        if time.monotonic() > began + _SYN_RETRANSMIT_S:
            lost = len(probes) - len(arrived)  # the counter may include retransmitted SYNs
    for connection in arrived.values():
        if connection is not None:
            _await_reset(connection)
    return ProbeResults(frozenset(arrived), lost)


# A packet as its receiver sees it: the destination, and the source address and port.
_Key = tuple[NetnsAddress, Transport, int, tuple[str, int]]


def _open_clients(probes: Iterable[Probe], closing: ExitStack) -> Iterator[tuple[_Key, tuple[socket.socket, Probe]]]:
    for probe in probes:
        client = closing.enter_context(probe.source.open_client(probe.transport))
        if probe.transport is TCP:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        source = (str(probe.source.address), client.getsockname()[1])
        yield (probe.target, probe.transport, probe.port, source), (client, probe)


def _send(client: socket.socket, probe: Probe) -> None:
    destination = (str(probe.target.address), probe.port)
    if probe.transport is UDP:
        client.sendto(b"?", destination)
    else:
        with suppress(BlockingIOError):
            client.connect(destination)


@contextmanager
def _listening(
    probes: Iterable[Probe], listeners: Listeners
) -> Iterator[Callable[[], list[tuple[_Key, socket.socket | None]]]]:
    """A function that polls all listeners and returns what arrived; TCP connections come with their sockets."""
    with selectors.DefaultSelector() as selector:
        for destination in {(probe.target, probe.transport, probe.port) for probe in probes}:
            selector.register(listeners.at(*destination), selectors.EVENT_READ, destination)

        def receive() -> list[tuple[_Key, socket.socket | None]]:
            received: list[tuple[_Key, socket.socket | None]] = []
            for ready, _ in selector.select(_POLL_S):
                target, transport, port = ready.data
                listener = ready.fileobj
                assert isinstance(listener, socket.socket)
                with suppress(BlockingIOError):
                    while True:
                        connection, (host, from_port, *_) = (
                            listener.accept() if transport is TCP else _receive_datagram(listener)
                        )
                        received.append(((target, transport, port, (host, from_port)), connection))
            return received

        yield receive


def _receive_datagram(listener: socket.socket) -> tuple[None, tuple[str, int]]:
    _, (host, port, *_) = listener.recvfrom(64)
    return None, (host, port)


def _await_reset(connection: socket.socket) -> None:
    """Return when the client's RST has arrived: then no packet of the connection is in flight.

    TCP does not retransmit a lost RST. But it retransmits data sent to a client that is gone, and the client's kernel
    answers that with another RST.
    """
    with connection, suppress(ConnectionResetError):
        connection.settimeout(_ROUND_S)
        with suppress(TimeoutError):
            connection.recv(1)
        connection.settimeout(DEADLINE)
        connection.send(b"!")
        connection.recv(1)
