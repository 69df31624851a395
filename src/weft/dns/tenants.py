"""The tenants on this node: their names, and a server in the space of each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, Statistics
from weft.dns.server import TenantServer
from weft.dns.table import Table
from weft.dns.tenant_sockets import Spaces
from weft.dns.upstream import Upstreams
from weft.dns.zone_cache import Memory
from weft.domain.dns.names import Zone
from weft.domain.errors import DatapathFault, Invalid, NotFound
from weft.domain.ids import TenantName, check_name
from weft.runtime.dns_control import Entries, FullSync, Message, Report, StatusQuery, Tenant
from weft.runtime.logs import Log

log = Log("dns")


@dataclass(frozen=True, slots=True)
class _Running:
    """A server, and the space that its sockets are in."""

    space: tuple[int, int]
    task: asyncio.Task[None]


class Tenants:
    """Carries out what is said in the hand-over, one message after the other. `tasks` is the parent of the servers."""

    def __init__(
        self,
        *,
        spaces: Spaces,
        upstreams: Upstreams,
        memory: Memory,
        tasks: asyncio.TaskGroup,
        domain: str,
        ttl: int,
    ) -> None:
        self._spaces = spaces
        self._upstreams = upstreams
        self._memory = memory
        self._tasks = tasks
        self._domain = domain
        self._ttl = ttl
        self._tables: dict[TenantName, Table] = {}
        self._servers: dict[TenantName, _Running] = {}
        self._statistics = Statistics()
        self._turn = asyncio.Lock()

    @property
    def zones(self) -> dict[TenantName, Zone]:
        """All that is in force."""
        return {tenant: table.zone for tenant, table in self._tables.items()}

    async def recall(self) -> None:
        """Go on from what was said before this process began."""
        for message in self._memory.read():
            _, faults = self._take_in(message)
            for fault in faults:
                log.warning("what was remembered cannot be", reason=fault)
        self._memory.rewrite(FullSync(self.zones))
        for tenant in self._tables:
            await self._serve(tenant)
        log.info("names recalled", tenants=len(self._tables), serving=len(self._servers))

    async def tell(self, message: Message) -> Report:
        """Carry out a message; it is in force when this returns.

        The report names the tenants of which something cannot be: they are as they were, the others are as was said.
        """
        async with self._turn:
            tenants, faults = self._take_in(message)
            for tenant in tenants:
                await self._serve(tenant)
            self._remember(message, as_it_came=not faults)
            return Report(
                refused="; ".join(faults),
                serving=tuple(sorted(self._servers)),
                resolvers=self._upstreams.addresses(),
                statistics=asdict(self._statistics),
            )

    async def close(self) -> None:
        """Stop serving. What was said stays remembered."""
        async with self._turn:
            for tenant in list(self._servers):
                await self._stop(tenant)

    def _take_in(self, message: Message) -> tuple[list[TenantName], list[str]]:
        """Change the tables. Tenants that came, went, or may have another space; and what cannot be, in words."""
        tenants = list(self._tables) if isinstance(message, StatusQuery) else []  # spaces may be others than they were
        faults: list[str] = []
        for step in self._steps(message):
            try:
                self._carry_out(step)
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

    def _carry_out(self, step: Tenant | Entries) -> None:
        tenant = step.tenant
        if isinstance(step, Entries):
            if tenant not in self._tables:
                raise Invalid("nothing was said of it before")
            self._tables[tenant].change(step.put, step.drop)
        elif step.zone is None:
            self._tables.pop(tenant, None)
        else:
            check_name(tenant, field="tenant")  # it names a file
            table = self._tables.get(tenant) or Table(ttl=self._ttl)
            table.replace(step.zone)
            self._tables[tenant] = table

    def _remember(self, message: Message, *, as_it_came: bool) -> None:
        try:
            if not as_it_came or isinstance(message, FullSync) or self._memory.is_long:
                self._memory.rewrite(FullSync(self.zones))
            elif not isinstance(message, StatusQuery):
                self._memory.append(message)
        except OSError as error:  # what is in force counts more than what a later process will know of it
            log.error("names not remembered", reason=str(error))

    async def _serve(self, tenant: TenantName) -> None:
        """The tenant has a server in its present space, or none where there is no space, or nothing to say."""
        space = self._spaces.identity(tenant) if tenant in self._tables else None
        running = self._servers.get(tenant)
        if running and running.space != space:
            await self._stop(tenant)
        if space and tenant not in self._servers:
            self._start(tenant, space)

    async def _stop(self, tenant: TenantName) -> None:
        task = self._servers.pop(tenant).task
        task.cancel()
        await asyncio.wait([task])

    def _start(self, tenant: TenantName, space: tuple[int, int]) -> None:
        try:
            sockets = self._spaces.open_sockets(tenant)
        except (NotFound, DatapathFault) as error:  # its names are kept: the agent tells when the space is there
            log.error("tenant not served", tenant=tenant, reason=error.message)
            return
        responder = Responder(self._tables[tenant], domain=self._domain, statistics=self._statistics)
        server = TenantServer(sockets, responder=responder, forwarder=Forwarder(self._upstreams))
        self._servers[tenant] = _Running(space, self._tasks.create_task(server.run(), name=f"names of {tenant}"))
        log.info("tenant served", tenant=tenant)
