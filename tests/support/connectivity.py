"""Assert with packets which flows between pods are allowed and which are denied, concurrently and dual-stack."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from tests.support.flood import Tap
from tests.support.icmp_echo import ECHO, icmp_message, open_icmp_socket, ping

from weft.domain.addresses import parse_address
from weft.lab.hosts import Pod
from weft.lab.traffic import ONE_TRY_S, TCP, UDP
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff, wait_event

FAMILIES = (4, 6)
# The observation window for denied flows, after all allowed flows were answered. Absence of a packet is no event.
SILENCE_S = 0.3

_TRANSPORTS = {"tcp": (TCP, 6), "udp": (UDP, 17)}


class FlowProbe(NamedTuple):
    """A flow between two pods. `what` is `icmp`, or protocol and port such as `tcp/80`."""

    source: Pod
    target: Pod
    what: str
    family: int

    def __str__(self) -> str:
        return f"{self.source.name} to {self.target.name} {self.what} IPv{self.family}"


def between(sources: Iterable[Pod], targets: Collection[Pod], *whats: str) -> Iterator[FlowProbe]:
    """The flows from every source to every other target, in both families."""
    for source, target, what, family in itertools.product(sources, targets, whats, FAMILIES):
        if source is not target:
            yield FlowProbe(source, target, what, family)


async def assert_connectivity(*, allowed: Iterable[FlowProbe] = (), denied: Iterable[FlowProbe] = ()) -> None:
    """Wait until all allowed flows are answered, and assert that no packet of a denied flow arrived."""
    to_allow, to_deny = list(allowed), list(denied)
    with ExitStack() as closing:
        for target, what, family in {each[1:] for each in (*to_allow, *to_deny) if each.what != "icmp"}:
            closing.enter_context(_Responder(target, what, family))
        captures = {each: _open_capture(each) for each in to_deny}
        for capture in captures.values():
            closing.callback(capture.close)
        tasks = {each: asyncio.ensure_future(_is_answered(each)) for each in (*to_allow, *to_deny)}
        try:
            if to_allow:
                await asyncio.wait([tasks[each] for each in to_allow], timeout=DEADLINE)
            await wait_event(asyncio.Event(), within=SILENCE_S)
            wrong = [f"{each} is denied" for each in to_allow if not tasks[each].done()]
            wrong += [f"{each} is allowed" for each in to_deny if tasks[each].done() or captures[each].has_packet()]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert not wrong, "; ".join(wrong)


class _Responder:
    """Answers at a port: the kernel does for TCP, an echo for UDP."""

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
            data, client = self._socket.recvfrom(64)
            self._socket.sendto(data, client)


class _Capture:
    """Captures packets at the target of a flow."""

    def __init__(self, flow: FlowProbe) -> None:
        self._source = parse_address(str(flow.source.address(flow.family)), field="source")
        name, _, port = flow.what.partition("/")
        self._protocol_and_port = _TRANSPORTS[name][1], int(port)
        self._tap = Tap(flow.target.namespace)

    def close(self) -> None:
        self._tap.__exit__(None, None, None)

    def has_packet(self) -> bool:
        return any(
            (each.source, each.protocol, each.target_port) == (self._source, *self._protocol_and_port)
            for each in self._tap.packets()
        )


class _EchoCapture:
    """The same for ICMP echo requests."""

    def __init__(self, flow: FlowProbe) -> None:
        self._family = flow.family
        self._source = str(flow.source.address(flow.family))
        self._socket = open_icmp_socket(flow.target.namespace, flow.family)

    def close(self) -> None:
        self._socket.close()

    def has_packet(self) -> bool:
        with suppress(BlockingIOError):
            while True:
                data, (client, *_) = self._socket.recvfrom(128)
                if client == self._source and icmp_message(data, self._family)[0] == ECHO[self._family]:
                    return True
        return False


def _open_capture(flow: FlowProbe) -> _Capture | _EchoCapture:
    return _EchoCapture(flow) if flow.what == "icmp" else _Capture(flow)


async def _is_answered(flow: FlowProbe) -> None:
    """Retry until the target answers."""
    backoff = Backoff(first=0.05, cap=0.5)
    while True:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ONE_TRY_S):
                await (_ping(flow) if flow.what == "icmp" else _connect(flow))
                return
        await backoff.pause()


async def _connect(flow: FlowProbe) -> None:
    loop = asyncio.get_running_loop()
    name, _, port = flow.what.partition("/")
    transport, _ = _TRANSPORTS[name]
    destination = (str(flow.target.address(flow.family)), int(port))
    with flow.source.place(flow.family).open_client(transport) as client:
        await loop.sock_connect(client, destination)
        if transport is UDP:
            nonce = secrets.token_bytes(8)
            await loop.sock_sendall(client, nonce)
            while await loop.sock_recv(client, 64) != nonce:
                pass


async def _ping(flow: FlowProbe) -> None:
    await ping(flow.source.place(flow.family), str(flow.target.address(flow.family)))
