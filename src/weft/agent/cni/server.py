"""The CNI server: one request frame and one answer frame per connection, on a unix socket that only root can open.

Each request runs as a task of its own (`InflightRequests`), so that a client that disconnects interrupts nothing
half-way.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from time import perf_counter

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

# How long a client may take to send its request, and to receive the answer.
TRANSFER_WITHIN_S = 30.0
_CHUNK = 1 << 16
# How many clients may be connected without having sent their request. Shims send at once, so the oldest is given up.
MAX_SILENT_CLIENTS = 128

# How many requests may be in progress, those of disconnected clients included. More than a node has pods.
MAX_REQUESTS = 2048

# The part of the client's deadline that is kept for the answer, so that the runtime gets our error and not a timeout:
# a second, or a quarter of a short deadline.
ANSWER_MARGIN_S = 1.0
_MAX_MARGIN = 0.25

# How long requests may take to finish when the agent stops; what does not finish is in the attachment log.
FINISH_WITHIN_S = 10.0

_OWN_NETNS = "/proc/self/ns/net"

Serve = Callable[[Request], Awaitable[bytes]]
# Called after each request: its verb, its error code or `done` or `gone`, and its duration in seconds. `silent` is
# a client that was disconnected because it had sent no request.
Observe = Callable[[str, str, float], None]

# The CNI code of our errors (cni 2). The first class that matches decides, so subclasses come before their base.
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
    """The client closed its connection before the answer: its runtime gave up, or was killed."""


def cni_error(error: WeftError) -> CniError:
    """One of our errors with the code that CNI has for it."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), Code.FAILED)
    return CniError(code, error.message)


def read_request(environment: Mapping[str, str], stdin: bytes) -> Request:
    """The request. Code 8 when CNI_NETNS is that of the agent itself, unless CNI_NETNS_OVERRIDE is set (C-015)."""
    request = parse_request(environment, stdin)
    is_intended = environment.get("CNI_NETNS_OVERRIDE", "").lower() in {"1", "true"}
    if isinstance(request, Add) and not is_intended and _is_own_netns(request.netns):
        raise CniError(Code.BAD_NETNS, f"CNI_NETNS {request.netns} is the network namespace of the agent itself")
    return request


def _is_own_netns(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), _own_netns())  # noqa: PTH116  samestat needs the stat result
    except OSError:
        return False  # the datapath opens it, and reports what is wrong


@cache
def _own_netns() -> os.stat_result:
    """Cached: threads enter other namespaces, the process never does."""
    return os.stat(_OWN_NETNS)  # noqa: PTH116  samestat needs the stat result


class InflightRequests:
    """Runs each request as a task of its own, for servers whose clients may disconnect or time out.

    When the client is gone, its ADD is cancelled, and thereby undone, because its runtime takes it for failed. Other
    verbs run to their end: what they free must be freed all the same.
    """

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._inflight: set[asyncio.Future[bytes]] = set()

    async def serve(self, request: Request) -> bytes:
        """As `serve` of the constructor. May be cancelled at any time, and then returns at once."""
        if len(self._inflight) >= MAX_REQUESTS:
            raise Unavailable(f"the agent has {MAX_REQUESTS} requests in progress, its limit: try again")
        work = asyncio.ensure_future(self._serve(request))
        self._inflight.add(work)
        work.add_done_callback(self._inflight.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_failure)
            if isinstance(request, Add):
                work.cancel()
            raise

    async def finish(self) -> None:
        """Cancel all requests in flight, and wait for them to end."""
        inflight = set(self._inflight)
        for work in inflight:
            work.cancel()
        if inflight:
            await asyncio.wait(inflight, timeout=FINISH_WITHIN_S)


def _log_failure(work: asyncio.Future[bytes]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("request failed after client disconnect", reason=str(error))


@asynccontextmanager
async def inflight_requests(serve: Serve) -> AsyncIterator[InflightRequests]:
    """In-flight requests while the block runs; none is left afterwards."""
    requests = InflightRequests(serve)
    try:
        yield requests
    finally:
        await requests.finish()


@asynccontextmanager
async def cni_server(path: Path, serve: Serve, observe: Observe) -> AsyncIterator[None]:
    """Serve requests while the block runs. `serve` is cancelled when its client disconnects or its deadline passes."""
    # Plain sockets: for one frame each way, asyncio's streams would cost more than everything else here.
    with listen_privately(path) as listener:
        listener.setblocking(False)
        async with background(_accept_forever(listener, serve=serve, observe=observe), name="cni-server"):
            yield


async def _accept_forever(listener: socket.socket, *, serve: Serve, observe: Observe) -> None:
    loop = asyncio.get_running_loop()
    backoff = Backoff(cap=1.0)
    silent: dict[socket.socket, None] = {}
    async with asyncio.TaskGroup() as connections:

        def accept(failed: asyncio.Future[OSError]) -> None:
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return  # the client is gone again
            except OSError as error:  # out of file descriptors or of memory
                if not failed.done():
                    failed.set_result(error)
                return
            backoff.reset()
            connections.create_task(_handle(client, silent, serve=serve, observe=observe))

        while True:
            failed: asyncio.Future[OSError] = loop.create_future()
            loop.add_reader(listener, accept, failed)
            try:
                error = await failed
            finally:
                # The listener stays readable while accept fails: polling it would keep the loop busy.
                loop.remove_reader(listener)
            log.error("accept failed", reason=str(error))
            await backoff.pause()


async def _handle(client: socket.socket, silent: dict[socket.socket, None], *, serve: Serve, observe: Observe) -> None:
    with client:
        try:
            check_caller(client)
            call = decode_call(await _read_body(client, silent, observe))
            with _recorded(call, observe) as record:
                await _send(client, encode_answer(await _answer(call, client, serve=serve, record=record)))
        except (OSError, Unreadable, Denied) as error:
            log.warning("CNI client disconnected", reason=str(error) or "timed out")


@contextmanager
def _counted(client: socket.socket, silent: dict[socket.socket, None], observe: Observe) -> Iterator[None]:
    """Count a client that has not sent its request. Beyond the limit the one that waits longest is disconnected."""
    if len(silent) >= MAX_SILENT_CLIENTS:
        oldest = next(iter(silent))
        del silent[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its read ends, and its task with it
        observe("", "silent", 0.0)
    silent[client] = None
    try:
        yield
    finally:
        silent.pop(client, None)


async def _read_body(client: socket.socket, silent: dict[socket.socket, None], observe: Observe) -> bytes:
    """The body of the request frame. The first read nearly always has all of it: shims send before we accept."""
    data = bytearray()
    with suppress(BlockingIOError):
        _extend(data, client.recv(_CHUNK, socket.MSG_DONTWAIT))
    if not _is_complete(data):
        client.setblocking(False)
        with _counted(client, silent, observe):
            async with asyncio.timeout(TRANSFER_WITHIN_S):
                while not _is_complete(data):
                    _extend(data, await asyncio.get_running_loop().sock_recv(client, _CHUNK))
    return bytes(data[HEADER_SIZE : HEADER_SIZE + body_size(bytes(data[:HEADER_SIZE]))])


def _extend(data: bytearray, chunk: bytes) -> None:
    if not chunk:
        raise Unreadable(f"a frame that ends after {len(data)} bytes")
    data += chunk


def _is_complete(data: bytearray) -> bool:
    return len(data) >= HEADER_SIZE and len(data) >= HEADER_SIZE + body_size(bytes(data[:HEADER_SIZE]))


async def _send(client: socket.socket, data: bytes) -> None:
    sent = 0
    with suppress(BlockingIOError):
        sent = client.send(data, socket.MSG_DONTWAIT)  # an answer nearly always fits into the socket's buffer
    if sent < len(data):
        client.setblocking(False)
        async with asyncio.timeout(TRANSFER_WITHIN_S):
            await asyncio.get_running_loop().sock_sendall(client, data[sent:])


class _Record:
    """The outcome of a request for metrics and log, as far as it is known."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.took = 0.0
        self.code, self.text = "gone", "the agent stopped"

    def finish(self, code: str, text: str) -> None:
        self.took = perf_counter() - self.began
        self.code, self.text = code, text


@contextmanager
def _recorded(call: Call, observe: Observe) -> Iterator[_Record]:
    """Count and log a request when the block ends: the answer is sent before, so that the runtime does not wait."""
    record = _Record()
    try:
        yield record
    finally:
        took = record.took or perf_counter() - record.began
        command = call.environment.get("CNI_COMMAND", "")[:16]
        observe(command, record.code, took)
        # Nothing in the environment is checked yet: cut to size, so that no client can flood the log.
        log.info(
            "cni call",
            command=command,
            container=call.environment.get("CNI_CONTAINERID", "")[:64],
            interface=call.environment.get("CNI_IFNAME", "")[:16],
            outcome=record.text,
            took_ms=round(took * 1000, 1),
        )


async def _answer(call: Call, client: socket.socket, *, serve: Serve, record: _Record) -> Answer:
    """The answer to a request; `ClientDisconnected` when the client is gone."""
    try:
        async with asyncio.timeout(time_to_work(call.deadline)):
            with _while_connected(client):
                stdout = await serve(read_request(call.environment, call.stdin))
        record.finish("done", "done")
        return Answer(exit_code=0, stdout=stdout)
    except ClientDisconnected as gone:
        record.finish("gone", str(gone))
        raise
    except Exception as error:
        failure = _cni_failure(error)
        record.finish(str(int(failure.code)), failure.message)
        return Answer(exit_code=1, stdout=failure.encode(version=answer_version(call.stdin)))


def time_to_work(deadline: float) -> float:
    """How long a request may take, so that its answer arrives before the client's deadline."""
    return deadline - min(ANSWER_MARGIN_S, deadline * _MAX_MARGIN)


@contextmanager
def _while_connected(client: socket.socket) -> Iterator[None]:
    """End the block with `ClientDisconnected` when the client disconnects.

    A client sends nothing after its request, so a readable socket means that it is closed.
    """
    loop, task, fd = asyncio.get_running_loop(), asyncio.current_task(), client.fileno()
    assert task is not None
    is_disconnected = False

    def disconnect() -> None:
        nonlocal is_disconnected
        is_disconnected = True
        loop.remove_reader(fd)
        task.cancel()

    loop.add_reader(fd, disconnect)
    try:
        yield
    except asyncio.CancelledError as error:
        if not is_disconnected or task.uncancel() > 0:
            raise  # the deadline or the agent's stop cancelled the task too: that takes precedence
        raise ClientDisconnected("the client disconnected before the answer") from error
    finally:
        loop.remove_reader(fd)


def _cni_failure(error: Exception) -> CniError:
    match error:
        case CniError():
            return error
        case WeftError():
            return cni_error(error)
        case TimeoutError():
            return CniError(Code.TRY_LATER, "the agent did not finish in time: try again")
    log.failure("request failed")  # the trace goes to the log; the client gets no internals
    return CniError(Code.FAILED, "internal error: see the log of netplugin")
