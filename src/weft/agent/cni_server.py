"""The agent's door for runtimes: one frame in, one frame out, on a unix socket that only root can reach."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from weft.cni.errors import CniError, Code
from weft.cni.request import Request, parse_request
from weft.cni.versions import answer_version
from weft.cni.wire import HEADER_SIZE, Answer, Call, Unreadable, body_size, decode_call, encode_answer
from weft.domain.errors import (
    Conflict,
    DatapathFault,
    Exhausted,
    Invalid,
    Malformed,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.runtime.logs import Log

log = Log("cni")

READ_WITHIN_S = 30.0
"""How long a caller may take to say what it wants."""

Serve = Callable[[Request], Awaitable[bytes]]

_CODES: tuple[tuple[type[WeftError], Code], ...] = (
    (Exhausted, Code.EXHAUSTED),
    (DatapathFault, Code.DATAPATH_FAULT),
    (Unavailable, Code.TRY_LATER),
    (Malformed, Code.NOT_DECODED),
    (Invalid, Code.BAD_CONFIG),
    (NotFound, Code.BAD_CONFIG),
    (Conflict, Code.FAILED),
)
"""The first class an error belongs to decides its code (design 5)."""


def cni_error(error: WeftError) -> CniError:
    """One of our errors as the runtime is told of it."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), Code.FAILED)
    return CniError(code, error.message)


@asynccontextmanager
async def cni_server(path: Path, serve: Serve) -> AsyncIterator[None]:
    """Serve requests while the block runs."""
    listener = _bind(path)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _converse(reader, writer, serve)
        except (OSError, asyncio.IncompleteReadError, Unreadable) as error:
            log.warning("caller lost", reason=str(error))
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=listener, backlog=512)
    async with server:
        yield


def _bind(path: Path) -> socket.socket:
    """A socket that only root can connect to, in the place of one that a dead agent left."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    return listener


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve) -> None:
    peer = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in {0, os.getuid()}:
        log.warning("caller refused", uid=uid)
        return
    async with asyncio.timeout(READ_WITHIN_S):
        body = await reader.readexactly(body_size(await reader.readexactly(HEADER_SIZE)))
    call = decode_call(body)
    writer.write(encode_answer(await _answer(call, serve)))
    await writer.drain()


async def _answer(call: Call, serve: Serve) -> Answer:
    began = perf_counter()
    outcome = "done"
    try:
        async with asyncio.timeout(call.deadline):
            return Answer(exit_code=0, stdout=await serve(parse_request(call.environment, call.stdin)))
    except CniError as error:
        outcome = error.message
        return _refusal(error, call)
    except WeftError as error:
        outcome = error.message
        return _refusal(cni_error(error), call)
    except TimeoutError:
        outcome = "too late"
        return _refusal(CniError(Code.TRY_LATER, "the agent did not finish in time: try again"), call)
    except Exception:  # the outermost loop of a request: told in the log, not to the caller
        outcome = "internal error"
        log.failure("request failed")
        return _refusal(CniError(Code.FAILED, "internal error: see the log of netplugin"), call)
    finally:
        log.info(
            "cni call",
            command=call.environment.get("CNI_COMMAND", ""),
            container=call.environment.get("CNI_CONTAINERID", "")[:64],
            interface=call.environment.get("CNI_IFNAME", "")[:16],
            outcome=outcome,
            took_ms=round((perf_counter() - began) * 1000, 1),
        )


def _refusal(error: CniError, call: Call) -> Answer:
    return Answer(exit_code=1, stdout=error.encode(version=answer_version(call.stdin)))
