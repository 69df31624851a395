"""Where the agent hands over its names: a unix socket for root and our own user alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from weft.dns.tenants import Tenants
from weft.domain.errors import Denied, Malformed
from weft.runtime.dns_control import Entries, FullSync, Message, Report, Tenant, decode_message, encode, read_body
from weft.runtime.logs import Log
from weft.runtime.unix import check_caller, listen_privately

log = Log("dns")

# How long a caller may take to read its report.
ANSWER_WITHIN_S = 10.0


@asynccontextmanager
async def handover_door(path: Path, tenants: Tenants) -> AsyncIterator[None]:
    """Let callers in while the block runs."""
    present: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        present.add(writer)
        try:
            check_caller(writer.get_extra_info("socket"))
            await _converse(reader, writer, tenants)
        except asyncio.IncompleteReadError:
            log.debug("caller has gone")
        except (OSError, TimeoutError, Malformed, Denied) as error:
            log.warning("caller lost", reason=str(error))
        except asyncio.CancelledError:  # our own end; a stream's callback would tell of it as of a fault
            log.debug("caller left behind")
        finally:
            present.discard(writer)
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=listen_privately(path))
    async with server:
        try:
            yield
        finally:
            for writer in present:
                writer.close()


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tenants: Tenants) -> None:
    begun = False
    while True:
        message = decode_message(await read_body(reader))
        begun = begun or isinstance(message, FullSync | Tenant)
        writer.write(encode(await _report(message, tenants, begun=begun)))
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await writer.drain()


async def _report(message: Message, tenants: Tenants, *, begun: bool) -> Report:
    if isinstance(message, Entries) and not begun:
        return Report(refused="a conversation does not begin with changes")
    report = await tenants.tell(message)
    if report.refused:
        log.error("message refused", reason=report.refused)
    return report
