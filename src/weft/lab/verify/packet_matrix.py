"""Many questions at once: one packet for each, which must arrive or be counted as refused. Nobody waits for silence."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, Self

from weft.lab.traffic import TCP, UDP, Place, Transport
from weft.lab.waiting import DEADLINE

# After this long a kernel repeats its SYN, which would be counted twice.
_SAID_AGAIN_S = 1.0
# So what is not known by then is asked anew.
_ROUND_S = 0.8
_ROUNDS = 10
_LOOK_AGAIN_S = 0.002
# For `SO_LINGER`: a connection that is closed is reset, so that nothing of it is on the way for long.
_AT_ONCE = struct.pack("ii", 1, 0)


class Question(NamedTuple):
    """Whether the first packet from one place to another arrives."""

    source: Place
    target: Place
    transport: Transport
    port: int


class Answers(NamedTuple):
    """The questions whose packets arrived, and how many packets neither arrived nor were refused."""

    arrived: frozenset[Question]
    vanished: int


class Listeners:
    """The sockets that listen, opened when they are first needed."""

    def __init__(self) -> None:
        self._open: dict[tuple[Place, Transport, int], tuple[socket.socket, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open.values():
            each[1].close()

    def at(self, place: Place, transport: Transport, port: int) -> socket.socket:
        """The socket that hears what comes for an address and port."""
        key = (place, transport, port)
        if key not in self._open:
            with ExitStack() as closing:
                ear = closing.enter_context(place.listening(port, transport))
                self._open[key] = ear, closing.pop_all()
        return self._open[key][0]

    def forget(self, place: Place) -> None:
        """Close all that listen at a place, which is going away."""
        for key in [key for key in self._open if key[0] == place]:
            self._open.pop(key)[1].close()


def ask(questions: Sequence[Question], ears: Listeners, *, count_refused: Callable[[], int]) -> Answers:
    """Ask all at once. `count_refused` says how many packets the datapath has refused so far."""
    answers = Answers(frozenset(), len(questions))
    for _ in range(_ROUNDS):
        answers = _ask_once(questions, ears, count_refused)
        if not answers.vanished:
            break
    return answers


def _ask_once(questions: Sequence[Question], ears: Listeners, count_refused: Callable[[], int]) -> Answers:
    arrived: dict[Question, socket.socket | None] = {}
    with _listening(questions, ears) as heard, ExitStack() as callers:
        asked = dict(_open_callers(questions, callers))
        refused_before = count_refused()
        began = time.monotonic()
        for caller, question in asked.values():
            _speak(caller, question)
        vanished = len(questions)
        while vanished > 0 and time.monotonic() < began + _ROUND_S:
            quiet = True
            for key, connection in heard():
                quiet = False
                if key in asked:
                    arrived[asked[key][1]] = connection
                elif connection is not None:
                    connection.close()  # somebody of an earlier round
            if quiet:
                vanished = len(questions) - len(arrived) - (count_refused() - refused_before)
        if time.monotonic() > began + _SAID_AGAIN_S:
            vanished = len(questions) - len(arrived)  # the count is worth nothing
    for connection in arrived.values():
        if connection is not None:
            _await_reset(connection)
    return Answers(frozenset(arrived), vanished)


# A packet as its target sees it: where it came to, and the address and port it came from.
_Key = tuple[Place, Transport, int, tuple[str, int]]


def _open_callers(
    questions: Iterable[Question], closing: ExitStack
) -> Iterator[tuple[_Key, tuple[socket.socket, Question]]]:
    for question in questions:
        caller = closing.enter_context(question.source.open_caller(question.transport))
        if question.transport is TCP:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        own = (str(question.source.address), caller.getsockname()[1])
        yield (question.target, question.transport, question.port, own), (caller, question)


def _speak(caller: socket.socket, question: Question) -> None:
    there = (str(question.target.address), question.port)
    if question.transport is UDP:
        caller.sendto(b"?", there)
    else:
        with suppress(BlockingIOError):
            caller.connect(there)


@contextmanager
def _listening(
    questions: Iterable[Question], ears: Listeners
) -> Iterator[Callable[[], list[tuple[_Key, socket.socket | None]]]]:
    """A function that waits a moment and says what was heard; connections come with their sockets."""
    with selectors.DefaultSelector() as selector:
        for place in {(each.target, each.transport, each.port) for each in questions}:
            selector.register(ears.at(*place), selectors.EVENT_READ, place)

        def heard() -> list[tuple[_Key, socket.socket | None]]:
            found: list[tuple[_Key, socket.socket | None]] = []
            for ready, _ in selector.select(_LOOK_AGAIN_S):
                target, transport, port = ready.data
                ear = ready.fileobj
                assert isinstance(ear, socket.socket)
                with suppress(BlockingIOError):
                    while True:
                        connection, (host, from_port, *_) = ear.accept() if transport is TCP else _receive(ear)
                        found.append(((target, transport, port, (host, from_port)), connection))
            return found

        yield heard


def _receive(ear: socket.socket) -> tuple[None, tuple[str, int]]:
    _, (host, port, *_) = ear.recvfrom(64)
    return None, (host, port)


def _await_reset(connection: socket.socket) -> None:
    """Return when the caller's reset has come: then nothing is on its way any more.

    Nobody repeats a reset that is lost, as any packet may be. But what is said to a caller that is gone is repeated,
    and its kernel answers by another.
    """
    with connection, suppress(ConnectionResetError):
        connection.settimeout(_ROUND_S)
        with suppress(TimeoutError):
            connection.recv(1)
        connection.settimeout(DEADLINE)
        connection.send(b"!")
        connection.recv(1)
