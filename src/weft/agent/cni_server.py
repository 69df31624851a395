"""The agent's door for runtimes: one frame in, one frame out, on a unix socket that only root can reach."""

from __future__ import annotations

import asyncio
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
    Denied,
    Exhausted,
    Invalid,
    Malformed,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.runtime.logs import Log
from weft.runtime.unix import check_caller, listen_privately

log = Log("cni")

READ_WITHIN_S = 30.0
"""How long a caller may take to say what it wants."""

Serve = Callable[[Request], Awaitable[bytes]]
Observe = Callable[[str, str, float], None]
"""Told of each call: its verb, the code of its refusal or `done`, and how many seconds it took."""

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
async def cni_server(path: Path, serve: Serve, observe: Observe) -> AsyncIterator[None]:
    """Serve requests while the block runs."""
    listener = listen_privately(path)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _converse(reader, writer, serve=serve, observe=observe)
        except (OSError, asyncio.IncompleteReadError, Unreadable, Denied) as error:
            log.warning("caller lost", reason=str(error))
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=listener, backlog=512)
    async with server:
        yield


async def _converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, serve: Serve, observe: Observe
) -> None:
    check_caller(writer.get_extra_info("socket"))
    async with asyncio.timeout(READ_WITHIN_S):
        body = await reader.readexactly(body_size(await reader.readexactly(HEADER_SIZE)))
    call = decode_call(body)
    writer.write(encode_answer(await _answer(call, serve=serve, observe=observe)))
    await writer.drain()


async def _answer(call: Call, *, serve: Serve, observe: Observe) -> Answer:
    began = perf_counter()
    refusal: CniError | None = None
    try:
        async with asyncio.timeout(call.deadline):
            return Answer(exit_code=0, stdout=await serve(parse_request(call.environment, call.stdin)))
    except CniError as error:
        refusal = error
    except WeftError as error:
        refusal = cni_error(error)
    except TimeoutError:
        refusal = CniError(Code.TRY_LATER, "the agent did not finish in time: try again")
    except Exception:  # the outermost loop of a request: told in the log, not to the caller
        log.failure("request failed")
        refusal = CniError(Code.FAILED, "internal error: see the log of netplugin")
    finally:
        took = perf_counter() - began
        command = call.environment.get("CNI_COMMAND", "")[:16]
        observe(command, str(int(refusal.code)) if refusal else "done", took)
        log.info(
            "cni call",
            command=command,
            container=call.environment.get("CNI_CONTAINERID", "")[:64],
            interface=call.environment.get("CNI_IFNAME", "")[:16],
            outcome=refusal.message if refusal else "done",
            took_ms=round(took * 1000, 1),
        )
    return Answer(exit_code=1, stdout=refusal.encode(version=answer_version(call.stdin)))
