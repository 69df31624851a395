"""netmaster: settings -> store -> snapshot -> leadership -> REST. Signals end it, in order."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import cast

from weft import __version__
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable, WeftError
from weft.domain.store_types import NEVER, RevisionEquals
from weft.drivers import SqliteStoreSettings, find_orchestrator, open_store
from weft.master.api.backup import Backups
from weft.master.api.contiv_api import Plugin
from weft.master.api.info_api import About
from weft.master.api.leader_proxy import Forwarder
from weft.master.api.objects import Objects
from weft.master.api.policy_api import PolicyQuestions, PolicyView
from weft.master.api.server import make_app
from weft.master.api.sync_wait import Receipts, WaitOptions
from weft.master.control.bootstrap import first_start
from weft.master.control.control import ControlPlane
from weft.master.control.kube_purge import Forgetting, tell_leftovers
from weft.master.control.kube_sync import keep_declared
from weft.master.control.node_gc import collect_for_ever
from weft.master.metrics import Metrics
from weft.master.nodes.store_server import serving_store
from weft.master.settings import MasterSettings, read_master_settings
from weft.ports.store import Store
from weft.runtime.http import server_tls, serving
from weft.runtime.logs import Log, start_logging
from weft.runtime.routes import Route
from weft.runtime.settings import BadSettings, refuse
from weft.runtime.store.election import Leadership, lead
from weft.runtime.store.mirror import Mirror
from weft.runtime.store.registry import present
from weft.runtime.tasks import background

log = Log("netmaster")

EXIT_FAILED = 1
# How long the store may take to answer at the start.
STORE_WITHIN_S = 30.0
# How long the store may take to answer before we say that we are not ready.
STORE_READY_S = 2.0

# How long nodes may take to carry out a declared policy before people are told that they have not.
SETTLE_WITHIN_S = 10.0


class Netmaster:
    """One netmaster: leader or follower, as the store decides."""

    def __init__(self, settings: MasterSettings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._cluster = Cluster()
        self._policy = PolicyView(self._cluster)
        self._mirror = Mirror(store, self._policy)
        self._control = ControlPlane(
            store=store, cluster=self._cluster, mirror=self._mirror, fence=self._fence, mark_dirty=self._doubt
        )
        self._orchestrator = find_orchestrator(settings.kubernetes) if settings.kubernetes else None
        self._receipts = Receipts(store, self._cluster, self._mirror)
        self._metrics = Metrics()
        self._leadership: Leadership | None = None
        self._prepared = False

    def routes(self) -> tuple[Route, ...]:
        """Everything REST offers."""
        own, mode = self._settings.own_address, self._settings.mode
        receipts = self._receipts
        return (
            *receipts.awaited(Objects(self._control, self._store, cluster_mode=mode).routes()),
            *receipts.routes(),
            *PolicyQuestions(self._cluster, self._policy).routes(),
            *receipts.awaited(Plugin(self._control, cluster_mode=mode).routes()),
            *receipts.awaited(Forgetting(self._control, follows=self._orchestrator is not None).routes()),
            *receipts.awaited(Backups(self._store, self._cluster, self._mirror, fence=self._fence).routes()),
            *About(self._cluster, self._metrics, own_address=own, faults=self._faults).routes(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._mirror.run(), name="mirror"))
            await self._mirror.wait_for(NEVER, within=STORE_WITHIN_S)
            await self._serve_rest(stack)
            await self._serve_store(stack)
            alive = kinds.alive_master(settings.own_address)
            await stack.enter_async_context(
                present(self._store, key=alive, value=__version__.encode(), ttl=settings.leader_ttl)
            )
            await stack.enter_async_context(background(self._campaign_for_ever(), name="leadership"))
            log.info("netmaster started", address=settings.own_address, version=__version__)
            await stop.wait()
            log.info("netmaster stops")

    async def _serve_rest(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        forwarder = Forwarder(
            self._leader_address,
            is_leader=self._is_leader,
            own_address=settings.own_address,
            tls_ca=settings.tls_ca,
            use_tls=settings.tls_cert is not None,
        )
        stack.push_async_callback(forwarder.close)
        app = make_app(self.routes(), token=settings.token, forwarder=forwarder, metrics=self._metrics)
        tls = server_tls(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
        await stack.enter_async_context(serving(app, settings.listeners, tls=tls))

    async def _serve_store(self, stack: AsyncExitStack) -> None:
        """The store for agents: on a socket of this machine, and on TCP where nodes have certificates.

        Nobody joins where the store is an etcd: agents ask that themselves.
        """
        settings = self._settings
        tls = None
        if settings.join_address and settings.store_address and isinstance(settings.store, SqliteStoreSettings):
            tls = await self._let_nodes_join(stack, settings.store_address, settings.join_address)
        elif settings.store_address and settings.tls_cert and settings.tls_key:
            tls = server_tls(settings.tls_cert, settings.tls_key, client_ca=settings.tls_ca)
        addresses = (settings.store_address,) if settings.store_address and tls else ()
        await stack.enter_async_context(
            serving_store(self._store, unix=settings.store_socket, addresses=addresses, tls=tls)
        )

    async def _let_nodes_join(
        self, stack: AsyncExitStack, store: tuple[str, int], join: tuple[str, int]
    ) -> ssl.SSLContext:
        from weft.master.nodes.enrollment import joining  # noqa: PLC0415  10 MB that only this needs

        assert self._orchestrator is not None
        settings = self._settings
        return await stack.enter_async_context(
            joining(
                self._orchestrator.meeting(),
                directory=settings.data_dir,
                store=store,
                join=join,
                life=settings.certificate_life,
            )
        )

    async def _campaign_for_ever(self) -> None:
        name = self._settings.own_address.encode()
        while True:
            async with lead(self._store, key=kinds.LEADER_KEY, name=name, ttl=self._settings.leader_ttl) as leadership:
                await self._lead(leadership)

    async def _lead(self, leadership: Leadership) -> None:
        """Catch up, prepare, then answer until the leadership is lost."""
        try:
            await self._mirror.wait_for(leadership.fence.revision, within=self._settings.leader_ttl)
            self._leadership = leadership
            if not self._cluster.restoring and await first_start(
                self._control,
                fwd_mode=cast("model.FwdMode", self._settings.fwdmode),
                encap=cast("model.Encap", self._settings.netmode),
                subnet=self._settings.default_subnet,
            ):
                log.info("first start: tenant default is there", subnet=self._settings.default_subnet)
            self._metrics.leader.set(1)
            self._prepared = True
            log.info("leading", address=self._settings.own_address)
            async with AsyncExitStack() as stack:
                collecting = collect_for_ever(self._control, limit=self._settings.offline_limit)
                await stack.enter_async_context(background(collecting, name="collector"))
                if self._orchestrator:
                    declarations = self._orchestrator.declarations()
                    self._metrics.untold.set_function(lambda: len(declarations.faults))
                    stack.callback(self._metrics.untold.set_function, lambda: 0)
                    keeping = keep_declared(
                        self._control, declarations, settle=partial(self._receipts.settle, WaitOptions(SETTLE_WITHIN_S))
                    )
                    await stack.enter_async_context(background(keeping, name="declared"))
                else:
                    tell_leftovers(self._cluster)
                await leadership.lost.wait()
            log.warning("leadership lost", reason=leadership.reason)
        except Unavailable as error:
            log.warning("leadership given up", reason=error.message)
        finally:
            self._prepared = False
            self._leadership = None
            self._metrics.leader.set(0)

    def _is_leader(self) -> bool:
        return self._prepared and self._leadership is not None and self._leadership.held

    def _fence(self) -> RevisionEquals:
        if self._leadership is None or not self._leadership.held:
            raise Unavailable("this netmaster does not lead: try again")
        return self._leadership.fence

    def _doubt(self) -> None:
        """A commit may or may not have happened: lead anew, under another fence, before anything else is decided."""
        if self._leadership is not None:
            self._leadership.lose("the outcome of a commit is unknown")

    def _leader_address(self) -> str:
        return self._cluster.leader[0] if self._cluster.leader else ""

    async def _faults(self) -> list[str]:
        """Why requests cannot be served now."""
        faults = [f"stored {key} cannot be read: {fault}" for key, fault in self._cluster.faults.items()]
        if self._cluster.restoring:
            faults.append("a restore is under way or was interrupted")
        if not self._leader_address():
            faults.append("nobody leads")
        elif self._leader_address() == self._settings.own_address and not self._is_leader():
            faults.append("leading, but not prepared yet")
        try:
            async with asyncio.timeout(STORE_READY_S):  # what we know of the leader may be old news
                await self._store.read(kinds.LEADER_KEY)
        except TimeoutError:
            faults.append(f"the store did not answer within {STORE_READY_S:g} s")
        except Unavailable as error:
            faults.append(f"the store does not answer: {error.message}")
        return faults


async def serve(settings: MasterSettings) -> None:
    """Open the store and run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with open_store(settings.store) as store:
        await Netmaster(settings, store).run(stop)


def main() -> None:
    """The command `netmaster`."""
    try:
        settings = read_master_settings(sys.argv[1:], os.environ)
    except BadSettings as error:
        refuse("netmaster", error)
    start_logging(level=settings.log_level, as_json=settings.json_log, syslog=settings.syslog)
    try:
        asyncio.run(serve(settings))
    except (WeftError, OSError) as error:
        log.error("netmaster cannot run", reason=str(error))
        raise SystemExit(EXIT_FAILED) from error


if __name__ == "__main__":
    main()
