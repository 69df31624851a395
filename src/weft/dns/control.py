"""Control plane of netdns: serves the control socket and applies zone pushes; one DNS server per tenant netns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, Statistics
from weft.dns.server import NodeShares, TenantServer
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
        self._node = NodeShares()
        # Tenants whose name is none, and the reason; and what the log has about records that were left out.
        self._invalid_tenants: dict[TenantName, str] = {}
        self._logged = (0, "")
        # One message at a time: several connections may be open, such as that of a restarted agent and its old one.
        self._lock = asyncio.Lock()

    @property
    def zones(self) -> dict[TenantName, Zone]:
        """All zones in force."""
        return {tenant: table.zone for tenant, table in self._tables.items()}

    async def load_zones(self) -> None:
        """Go on from the messages that an earlier process has received."""
        for message in self._zone_cache.read():
            _, error = await self._update_tables(message)
            if error:
                log.warning("ignoring a message in the zone cache", reason=error)
        self._save(FullSync(self.zones))
        for tenant in self._tables:
            await self._reconcile_server(tenant)
        log.info("zones loaded", tenants=len(self._tables), serving=len(self._servers))

    async def apply(self, message: Message) -> Report:
        """Apply a message; it is in force when this returns.

        Invalid records and tenants are left out, and the report counts them: whoever pushes them again gets no further.
        """
        async with self._lock:
            tenants, error = await self._update_tables(message)
            for tenant in tenants:
                await self._reconcile_server(tenant)
            if not error:
                self._save(message)
            rejected, fault = self._rejected()
            return Report(
                error=error,
                rejected=rejected,
                fault=fault,
                serving=tuple(sorted(self._servers)),
                upstreams=self._upstreams.addresses(),
                statistics=asdict(self._statistics),
            )

    def _rejected(self) -> tuple[int, str]:
        """How many records, subnets and tenants are left out, and the reason for one of them. Each change is logged."""
        found = [(f"tenant {tenant}: {reason}", 1) for tenant, reason in self._invalid_tenants.items()]
        for tenant, table in self._tables.items():
            count, reason = table.rejected
            if count:
                found.append((f"tenant {tenant}: {reason}", count))
        rejected = sum(count for _, count in found), found[0][0] if found else ""
        if rejected != self._logged:
            log.warning("records left out", records=rejected[0], reason=rejected[1])
            self._logged = rejected
        return rejected

    async def close(self) -> None:
        """Stop all servers. The zone cache stays."""
        async with self._lock:
            for tenant in list(self._servers):
                await self._stop(tenant)

    async def _update_tables(self, message: Message) -> tuple[list[TenantName], str]:
        """Change the tables. Returns the tenants whose server may have to change, and why nothing could be changed."""
        match message:
            case StatusQuery():
                return list(self._tables), ""  # it changes no zone, but a netns may have been recreated since
            case Entries(tenant, put, drop):
                if tenant not in self._tables:
                    return [], f"tenant {tenant} has no zone to change"
                await _in_turns(self._tables[tenant].changing(put, drop))
                return [], ""
            case FullSync(zones, pending):
                self._invalid_tenants.clear()
                gone = self._tables.keys() - zones.keys() - set(pending)
                steps = [*((tenant, None) for tenant in gone), *zones.items()]
            case Tenant(tenant, zone):
                steps = [(tenant, zone)]
        for tenant, zone in steps:
            await self._update_table(tenant, zone)
        return [tenant for tenant, _ in steps], ""

    async def _update_table(self, tenant: TenantName, zone: Zone | None) -> None:
        self._invalid_tenants.pop(tenant, None)
        if zone is None:
            self._tables.pop(tenant, None)
            return
        try:
            check_name(tenant, field="tenant")  # it becomes a file name under --run-dir
        except Invalid as error:
            self._invalid_tenants[tenant] = error.message
            return
        table = self._tables.setdefault(tenant, Table(ttl=self._ttl))
        await _in_turns(table.replacing(zone))

    def _save(self, message: Message) -> None:
        try:
            if isinstance(message, FullSync) or self._zone_cache.is_long:
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
        server = TenantServer(
            sockets,
            responder=responder,
            forwarder=Forwarder(self._upstreams),
            node=self._node,
            tenant=tenant,
        )
        self._servers[tenant] = _Running(netns, self._tasks.create_task(server.run(), name=f"dns server of {tenant}"))
        log.info("listening for tenant", tenant=tenant)


async def _in_turns(steps: Iterable[None]) -> None:
    """Carry out all steps; the loop serves others in between."""
    for _ in steps:
        await asyncio.sleep(0)


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
