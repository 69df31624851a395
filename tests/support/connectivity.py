"""What passes between pods and what does not, with real packets: many questions at once, in both families."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from tests.support.echoes import ECHO, icmp_of, open_echoes, ping
from tests.support.flood import Tap

from weft.domain.addresses import parse_address
from weft.lab.hosts import Pod
from weft.lab.traffic import ONE_TRY_S, TCP, UDP
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff, wait_event

FAMILIES = (4, 6)
# For how long what is refused must not be heard, after all that passes was answered.
SILENCE_S = 0.3

_TRANSPORTS = {"tcp": (TCP, 6), "udp": (UDP, 17)}


class Question(NamedTuple):
    """Whether one pod may say something to another. `what` is `icmp`, or such as `tcp/80`."""

    source: Pod
    target: Pod
    what: str
    family: int

    def __str__(self) -> str:
        return f"{self.source.name} to {self.target.name} {self.what} IPv{self.family}"


def between(sources: Iterable[Pod], targets: Collection[Pod], *whats: str) -> Iterator[Question]:
    """The same questions from all to all others, in both families."""
    for source, target, what, family in itertools.product(sources, targets, whats, FAMILIES):
        if source is not target:
            yield Question(source, target, what, family)


async def assert_connectivity(*, passing: Iterable[Question] = (), refused: Iterable[Question] = ()) -> None:
    """Return when all that should pass was answered and nothing else has arrived; `AssertionError` says which."""
    open_, shut = list(passing), list(refused)
    with ExitStack() as closing:
        for target, what, family in {each[1:] for each in (*open_, *shut) if each.what != "icmp"}:
            closing.enter_context(_Ear(target, what, family))
        witnesses = {each: _witness(each) for each in shut}
        for witness in witnesses.values():
            closing.callback(witness.close)
        asking = {each: asyncio.ensure_future(_is_answered(each)) for each in (*open_, *shut)}
        try:
            if open_:
                await asyncio.wait([asking[each] for each in open_], timeout=DEADLINE)
            await wait_event(asyncio.Event(), within=SILENCE_S)
            wrong = [f"{each} is refused" for each in open_ if not asking[each].done()]
            wrong += [f"{each} passes" for each in shut if asking[each].done() or witnesses[each].has_heard()]
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)
    assert not wrong, "; ".join(wrong)


class _Ear:
    """Answers at a port: by the kernel for TCP, by us for UDP."""

    def __init__(self, pod: Pod, what: str, family: int) -> None:
        name, _, port = what.partition("/")
        self._transport = _TRANSPORTS[name][0]
        self._listening = pod.place(family).listening(int(port), self._transport)

    def __enter__(self) -> None:
        self._socket = self._listening.__enter__()
        if self._transport is UDP:
            asyncio.get_running_loop().add_reader(self._socket, self._echo)

    def __exit__(self, *trouble: object) -> None:
        if self._transport is UDP:
            asyncio.get_running_loop().remove_reader(self._socket)
        self._listening.__exit__(None, None, None)

    def _echo(self) -> None:
        with suppress(OSError):
            data, caller = self._socket.recvfrom(64)
            self._socket.sendto(data, caller)


class _Witness:
    """Sees at the target whether a single packet of a question has come."""

    def __init__(self, question: Question) -> None:
        self._source = parse_address(str(question.source.address(question.family)), field="source")
        name, _, port = question.what.partition("/")
        self._said = _TRANSPORTS[name][1], int(port)
        self._tap = Tap(question.target.namespace)

    def close(self) -> None:
        self._tap.__exit__(None, None, None)

    def has_heard(self) -> bool:
        return any(
            (each.source, each.protocol, each.target_port) == (self._source, *self._said) for each in self._tap.seen()
        )


class _EchoWitness:
    """The same for ICMP: an echo request from the source."""

    def __init__(self, question: Question) -> None:
        self._family = question.family
        self._source = str(question.source.address(question.family))
        self._socket = open_echoes(question.target.namespace, question.family)

    def close(self) -> None:
        self._socket.close()

    def has_heard(self) -> bool:
        with suppress(BlockingIOError):
            while True:
                data, (caller, *_) = self._socket.recvfrom(128)
                if caller == self._source and icmp_of(data, self._family)[0] == ECHO[self._family]:
                    return True
        return False


def _witness(question: Question) -> _Witness | _EchoWitness:
    return _EchoWitness(question) if question.what == "icmp" else _Witness(question)


async def _is_answered(question: Question) -> None:
    """Return when the target has answered; it is asked again and again."""
    backoff = Backoff(first=0.05, cap=0.5)
    while True:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ONE_TRY_S):
                await (_ping(question) if question.what == "icmp" else _call(question))
                return
        await backoff.pause()


async def _call(question: Question) -> None:
    loop = asyncio.get_running_loop()
    name, _, port = question.what.partition("/")
    transport, _ = _TRANSPORTS[name]
    there = (str(question.target.address(question.family)), int(port))
    with question.source.place(question.family).open_caller(transport) as caller:
        await loop.sock_connect(caller, there)
        if transport is UDP:
            word = secrets.token_bytes(8)
            await loop.sock_sendall(caller, word)
            while await loop.sock_recv(caller, 64) != word:
                pass


async def _ping(question: Question) -> None:
    await ping(question.source.place(question.family), str(question.target.address(question.family)))
