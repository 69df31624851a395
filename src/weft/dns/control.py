"""Control plane of netdns: serves the control socket and applies zone pushes; one DNS server per tenant netns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, Statistics
from weft.dns.server import TenantServer
from weft.dns.table import Table
from weft.dns.tenant_sockets import TenantNetnsSockets
from weft.dns.upstream import Upstreams
from weft.dns.zone_cache import ZoneCache
from weft.domain.dns.names import Zone
from weft.domain.errors import DatapathFault, Denied, Invalid, Malformed, NotFound
from weft.domain.ids import TenantName, check_name
from weft.runtime.dns_control import (
    Entries,
    FullSync,
    Message,
    Report,
    StatusQuery,
    Tenant,
    decode_message,
    encode,
    read_body,
)
from weft.runtime.logs import Log
from weft.runtime.unix import check_caller, listen_privately

log = Log("dns")

# How long a client may take to read its report.
REPORT_READ_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Running:
    """A server, and the identity of the netns that its sockets are in."""

    netns: tuple[int, int]
    task: asyncio.Task[None]


class Tenants:
    """The zones and servers of all tenants on this node. `tasks` is the parent of the servers."""

    def __init__(
        self,
        *,
        sockets: TenantNetnsSockets,
        upstreams: Upstreams,
        zone_cache: ZoneCache,
        tasks: asyncio.TaskGroup,
        domain: str,
        ttl: int,
    ) -> None:
        self._sockets = sockets
        self._upstreams = upstreams
        self._zone_cache = zone_cache
        self._tasks = tasks
        self._domain = domain
        self._ttl = ttl
        self._tables: dict[TenantName, Table] = {}
        self._servers: dict[TenantName, _Running] = {}
        self._statistics = Statistics()
        # One message at a time: several connections may be open, such as that of a restarted agent and its old one.
        self._lock = asyncio.Lock()

    @property
    def zones(self) -> dict[TenantName, Zone]:
        """All zones in force."""
        return {tenant: table.zone for tenant, table in self._tables.items()}

    async def load_zones(self) -> None:
        """Go on from the messages that an earlier process has received."""
        for message in self._zone_cache.read():
            _, faults = self._update_tables(message)
            for fault in faults:
                log.warning("ignoring invalid zone in the cache", reason=fault)
        self._zone_cache.rewrite(FullSync(self.zones))
        for tenant in self._tables:
            await self._reconcile_server(tenant)
        log.info("zones loaded", tenants=len(self._tables), serving=len(self._servers))

    async def apply(self, message: Message) -> Report:
        """Apply a message; it is in force when this returns.

        The report names the tenants whose part is invalid: those keep their old zone, the others have the new one.
        """
        async with self._lock:
            tenants, faults = self._update_tables(message)
            for tenant in tenants:
                await self._reconcile_server(tenant)
            self._save(message, is_valid=not faults)
            return Report(
                error="; ".join(faults),
                serving=tuple(sorted(self._servers)),
                upstreams=self._upstreams.addresses(),
                statistics=asdict(self._statistics),
            )

    async def close(self) -> None:
        """Stop all servers. The zone cache stays."""
        async with self._lock:
            for tenant in list(self._servers):
                await self._stop(tenant)

    def _update_tables(self, message: Message) -> tuple[list[TenantName], list[str]]:
        """Change the tables. Returns the tenants whose server may have to change, and what was invalid."""
        # A status query changes no zone, but a netns may have been recreated since.
        tenants = list(self._tables) if isinstance(message, StatusQuery) else []
        faults: list[str] = []
        for step in self._steps(message):
            try:
                self._update_table(step)
            except Invalid as error:
                faults.append(f"tenant {step.tenant}: {error.message}")
                continue
            if isinstance(step, Tenant):
                tenants.append(step.tenant)
        return tenants, faults

    def _steps(self, message: Message) -> Iterable[Tenant | Entries]:
        """The message, tenant by tenant."""
        if isinstance(message, FullSync):
            return [Tenant(each, message.zones.get(each)) for each in message.zones.keys() | self._tables.keys()]
        return () if isinstance(message, StatusQuery) else (message,)

    def _update_table(self, step: Tenant | Entries) -> None:
        tenant = step.tenant
        if isinstance(step, Entries):
            if tenant not in self._tables:
                raise Invalid("it has no zone to change")
            self._tables[tenant].change(step.put, step.drop)
        elif step.zone is None:
            self._tables.pop(tenant, None)
        else:
            check_name(tenant, field="tenant")  # it becomes a file name under --run-dir
            table = self._tables.get(tenant) or Table(ttl=self._ttl)
            table.replace(step.zone)
            self._tables[tenant] = table

    def _save(self, message: Message, *, is_valid: bool) -> None:
        try:
            # A message that was applied in part cannot be replayed: what is in force is written instead.
            if not is_valid or isinstance(message, FullSync) or self._zone_cache.is_long:
                self._zone_cache.rewrite(FullSync(self.zones))
            elif not isinstance(message, StatusQuery):
                self._zone_cache.append(message)
        except OSError as error:  # a full disk must not stop name resolution
            log.error("writing the zone cache failed", reason=str(error))

    async def _reconcile_server(self, tenant: TenantName) -> None:
        """Run a server in the tenant's present netns, or none if it has no netns or no zone."""
        netns = self._sockets.identity(tenant) if tenant in self._tables else None
        running = self._servers.get(tenant)
        if running and running.netns != netns:
            await self._stop(tenant)
        if netns and tenant not in self._servers:
            self._start(tenant, netns)

    async def _stop(self, tenant: TenantName) -> None:
        task = self._servers.pop(tenant).task
        task.cancel()
        await asyncio.wait([task])

    def _start(self, tenant: TenantName, netns: tuple[int, int]) -> None:
        try:
            sockets = self._sockets.open(tenant)
        except (NotFound, DatapathFault) as error:  # the zone stays: the agent pushes again when the netns exists
            log.error("cannot listen for tenant", tenant=tenant, reason=error.message)
            return
        responder = Responder(self._tables[tenant], domain=self._domain, statistics=self._statistics)
        server = TenantServer(sockets, responder=responder, forwarder=Forwarder(self._upstreams))
        self._servers[tenant] = _Running(netns, self._tasks.create_task(server.run(), name=f"dns server of {tenant}"))
        log.info("listening for tenant", tenant=tenant)


@asynccontextmanager
async def serve_control_socket(path: Path, tenants: Tenants) -> AsyncIterator[None]:
    """Serve agents on a unix socket while the block runs. Only root and our own user may connect."""
    writers: set[asyncio.StreamWriter] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            check_caller(writer.get_extra_info("socket"))
            await _serve_connection(reader, writer, tenants)
        except asyncio.IncompleteReadError:
            log.debug("control client disconnected")
        except (OSError, TimeoutError, Malformed, Denied) as error:
            log.warning("control client failed", reason=str(error))
        except asyncio.CancelledError:
            # We are stopping. asyncio's stream callback would log the cancellation as an unhandled error.
            log.debug("control client dropped")
        finally:
            writers.discard(writer)
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=listen_privately(path))
    async with server:
        try:
            yield
        finally:
            # Closing the server alone would leave open connections waiting for their next message.
            for writer in writers:
                writer.close()


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tenants: Tenants) -> None:
    has_base = False
    while True:
        message = decode_message(await read_body(reader))
        has_base = has_base or isinstance(message, FullSync | Tenant)
        writer.write(encode(await _report(message, tenants, has_base=has_base)))
        async with asyncio.timeout(REPORT_READ_TIMEOUT_S):
            await writer.drain()


async def _report(message: Message, tenants: Tenants, *, has_base: bool) -> Report:
    # Changes of entries build on a zone of the same connection: after a reconnect they might skip some.
    if isinstance(message, Entries) and not has_base:
        return Report(error="a connection must not begin with changes of entries: push a zone first")
    report = await tenants.apply(message)
    if report.error:
        log.error("control message rejected", reason=report.error)
    return report
