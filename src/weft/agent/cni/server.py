"""The agent's door for runtimes: one frame in, one frame out, on a unix socket that only root can reach."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from time import perf_counter

from weft.agent.cni.inflight_requests import Serve
from weft.cni.errors import CniError, Code
from weft.cni.request import Add, Request, parse_request
from weft.cni.versions import answer_version
from weft.cni.wire import HEADER_SIZE, Answer, Call, Unreadable, body_size, decode_call, encode_answer
from weft.domain.errors import (
    Conflict,
    DatapathFault,
    Denied,
    Exhausted,
    Invalid,
    Malformed,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log
from weft.runtime.tasks import background
from weft.runtime.unix import check_caller, listen_privately

log = Log("cni")

# How long a caller may take to say what it wants, and to hear what we say.
TALK_WITHIN_S = 30.0
_PIECE = 1 << 16

# What is kept of a caller's time for our answer to come back, so that it hears our reason and not the clock's.
WAY_BACK_S = 1.0
_MOST_FOR_WAY_BACK = 0.25

_OWN_NAMESPACE = "/proc/self/ns/net"

# Told of each call: its verb, the code of its refusal, `done` or `gone`, and how many seconds it took.
Observe = Callable[[str, str, float], None]

# The first class an error belongs to decides its code (cni 2).
_CODES: tuple[tuple[type[WeftError], Code], ...] = (
    (Exhausted, Code.EXHAUSTED),
    (DatapathFault, Code.DATAPATH_FAULT),
    (Unavailable, Code.TRY_LATER),
    (Malformed, Code.NOT_DECODED),
    (Invalid, Code.BAD_CONFIG),
    (NotFound, Code.BAD_CONFIG),
    (Conflict, Code.FAILED),
)


class ClientDisconnected(ConnectionError):
    """The caller has gone while we worked: its runtime has given up, or was killed."""


def cni_error(error: WeftError) -> CniError:
    """One of our errors as the runtime is told of it."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), Code.FAILED)
    return CniError(code, error.message)


def read_request(environment: Mapping[str, str], stdin: bytes) -> Request:
    """The request. Code 8 when it would attach this machine itself, unless the caller says that it means to (C-015)."""
    request = parse_request(environment, stdin)
    is_meant = environment.get("CNI_NETNS_OVERRIDE", "").lower() in {"1", "true"}
    if isinstance(request, Add) and not is_meant and _is_own_namespace(request.netns):
        raise CniError(Code.BAD_NETNS, f"CNI_NETNS {request.netns} is the network namespace of the agent itself")
    return request


def _is_own_namespace(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), _own_namespace())  # noqa: PTH116  this compares what it finds
    except OSError:
        return False  # whoever opens it tells what is wrong


@cache
def _own_namespace() -> os.stat_result:
    """Where this process is, and stays."""
    return os.stat(_OWN_NAMESPACE)  # noqa: PTH116  this compares what it finds


@asynccontextmanager
async def cni_server(path: Path, serve: Serve, observe: Observe) -> AsyncIterator[None]:
    """Serve requests while the block runs. `serve` is cancelled when its caller hangs up or has no time left.

    On bare sockets: a caller says one thing and is told one, for which streams would cost more than the rest.
    """
    with listen_privately(path) as listener:
        listener.setblocking(False)
        async with background(_welcome(listener, serve=serve, observe=observe), name="cni-server"):
            yield


async def _welcome(listener: socket.socket, *, serve: Serve, observe: Observe) -> None:
    """Take callers for ever."""
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=1.0)
    async with asyncio.TaskGroup() as callers:

        def take(hurdle: asyncio.Future[OSError]) -> None:
            try:
                caller, _ = listener.accept()
            except BlockingIOError:
                return  # it has gone again
            except OSError as error:  # there are no descriptors or no memory for it now
                if not hurdle.done():
                    hurdle.set_result(error)
                return
            backoff.reset()
            callers.create_task(_converse(caller, serve=serve, observe=observe))

        while True:
            hurdle: asyncio.Future[OSError] = loop.create_future()
            loop.add_reader(listener, take, hurdle)
            try:
                error = await hurdle
            finally:
                loop.remove_reader(listener)
            log.error("caller not heard", reason=str(error))
            await backoff.pause()


async def _converse(caller: socket.socket, *, serve: Serve, observe: Observe) -> None:
    with caller:
        try:
            check_caller(caller)
            call = decode_call(await _read_body(caller))
            with _telling(call, observe) as outcome:
                await _send(caller, encode_answer(await _answer(call, caller, serve=serve, outcome=outcome)))
        except (OSError, Unreadable, Denied) as error:
            log.warning("caller lost", reason=str(error) or "it takes too long")


async def _read_body(caller: socket.socket) -> bytes:
    """The body of the one frame that a caller sends. As a rule all of it has come with the caller."""
    data = bytearray()
    with suppress(BlockingIOError):
        _take(caller.recv(_PIECE, socket.MSG_DONTWAIT), data)
    if not _is_whole(data):
        caller.setblocking(False)
        async with asyncio.timeout(TALK_WITHIN_S):
            while not _is_whole(data):
                _take(await asyncio.get_running_loop().sock_recv(caller, _PIECE), data)
    return bytes(data[HEADER_SIZE : HEADER_SIZE + body_size(bytes(data[:HEADER_SIZE]))])


def _take(piece: bytes, data: bytearray) -> None:
    if not piece:
        raise Unreadable(f"a frame that ends after {len(data)} bytes")
    data += piece


def _is_whole(data: bytearray) -> bool:
    return len(data) >= HEADER_SIZE and len(data) >= HEADER_SIZE + body_size(bytes(data[:HEADER_SIZE]))


async def _send(caller: socket.socket, data: bytes) -> None:
    """As a rule the kernel takes all of it at once."""
    sent = 0
    with suppress(BlockingIOError):
        sent = caller.send(data, socket.MSG_DONTWAIT)
    if sent < len(data):
        caller.setblocking(False)
        async with asyncio.timeout(TALK_WITHIN_S):
            await asyncio.get_running_loop().sock_sendall(caller, data[sent:])


class _Outcome:
    """What became of a call, so far."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.took = 0.0
        self.code, self.text = "gone", "the agent stopped"

    def note(self, code: str, text: str) -> None:
        self.took = perf_counter() - self.began
        self.code, self.text = code, text


@contextmanager
def _telling(call: Call, observe: Observe) -> Iterator[_Outcome]:
    """Tell of a call when the block ends: its caller does not wait for that."""
    outcome = _Outcome()
    try:
        yield outcome
    finally:
        took = outcome.took or perf_counter() - outcome.began
        command = call.environment.get("CNI_COMMAND", "")[:16]
        observe(command, outcome.code, took)
        log.info(
            "cni call",
            command=command,
            container=call.environment.get("CNI_CONTAINERID", "")[:64],
            interface=call.environment.get("CNI_IFNAME", "")[:16],
            outcome=outcome.text,
            took_ms=round(took * 1000, 1),
        )


async def _answer(call: Call, caller: socket.socket, *, serve: Serve, outcome: _Outcome) -> Answer:
    """What to tell the caller; `ClientDisconnected` when nobody is there to be told."""
    try:
        async with asyncio.timeout(time_to_work(call.deadline)):
            with _while_there(caller):
                stdout = await serve(read_request(call.environment, call.stdin))
        outcome.note("done", "done")
        return Answer(exit_code=0, stdout=stdout)
    except ClientDisconnected as gone:
        outcome.note("gone", str(gone))
        raise
    except Exception as error:
        refusal = _refusal(error)
        outcome.note(str(int(refusal.code)), refusal.message)
        return Answer(exit_code=1, stdout=refusal.encode(version=answer_version(call.stdin)))


def time_to_work(deadline: float) -> float:
    """How long we may take of the time that a caller has."""
    return deadline - min(WAY_BACK_S, deadline * _MOST_FOR_WAY_BACK)


@contextmanager
def _while_there(caller: socket.socket) -> Iterator[None]:
    """End the block with `ClientDisconnected` when the caller goes: it has nothing more to say, so whatever comes is its end."""
    loop, task, fd = asyncio.get_running_loop(), asyncio.current_task(), caller.fileno()
    assert task is not None
    is_gone = False

    def hang_up() -> None:
        nonlocal is_gone
        is_gone = True
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, hang_up)
    try:
        yield
    except asyncio.CancelledError as error:
        if not is_gone or task.uncancel() > 0:
            raise  # someone else wants the task to end: that goes first
        raise ClientDisconnected("the caller hung up before it was answered") from error
    finally:
        loop.remove_reader(fd)


def _refusal(error: Exception) -> CniError:
    match error:
        case CniError():
            return error
        case WeftError():
            return cni_error(error)
        case TimeoutError():
            return CniError(Code.TRY_LATER, "the agent did not finish in time: try again")
    log.failure("request failed")  # told in the log, not to the caller
    return CniError(Code.FAILED, "internal error: see the log of netplugin")
