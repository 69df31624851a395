"""netmaster's entry point: settings, store, mirror, REST and store servers, then leader election until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast
from uuid import uuid4

from weft import __version__
from weft.cni.files import place_file
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable, WeftError
from weft.domain.lifecycle.store_format import plan_format
from weft.domain.store_types import NEVER, RevisionEquals
from weft.domain.transaction import Transaction
from weft.drivers import SqliteStoreSettings, find_orchestrator, open_store
from weft.master.api.backup import Backups
from weft.master.api.contiv_api import ContivApi
from weft.master.api.info_api import InfoApi
from weft.master.api.leader_proxy import LeaderProxy
from weft.master.api.objects import Objects
from weft.master.api.policy_api import PolicyApi, PolicyView
from weft.master.api.server import make_app
from weft.master.api.sync_wait import SyncWait, WaitOptions
from weft.master.control.control import ControlPlane, bootstrap
from weft.master.control.kube_sync import KubePurge, run_kube_sync, warn_of_leftovers
from weft.master.control.node_gc import run_node_gc
from weft.master.metrics import Metrics
from weft.master.nodes.node_quota import NodeQuotas
from weft.master.nodes.store_server import STORE_LIMITS, serving_store
from weft.master.settings import MasterSettings, read_master_settings
from weft.ports.store import Store
from weft.runtime.admission import Guard, Limits
from weft.runtime.http import serving
from weft.runtime.listener import raise_open_files
from weft.runtime.logs import Log, start_logging
from weft.runtime.rate_limit import source_of
from weft.runtime.routes import Route
from weft.runtime.server_tls import ServerTls
from weft.runtime.settings import BadSettings, refuse
from weft.runtime.store.commit_loop import CommitLoop, own_events
from weft.runtime.store.election import Leadership, lead
from weft.runtime.store.mirror import Mirror
from weft.runtime.store.registry import present
from weft.runtime.store.unreadable import UnreadableKeys
from weft.runtime.tasks import background

log = Log("netmaster")

EXIT_FAILED = 1
# Timeout of the first listing of the store at start-up.
STORE_START_TIMEOUT_S = 30.0
# Timeout of the store read in /readyz.
STORE_READY_TIMEOUT_S = 2.0

# How long nodes may take to realize a NetworkPolicy before its Event says NotRealized.
REALIZE_TIMEOUT_S = 10.0


class Netmaster:
    """One netmaster: leader or follower, by election in the store."""

    def __init__(self, settings: MasterSettings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._cluster = Cluster()
        self._policy = PolicyView(self._cluster)
        self._unreadable = UnreadableKeys(self._cluster)
        self._quotas = NodeQuotas(self._cluster)
        self._mirror = Mirror(store, self._policy, self._unreadable, self._quotas)
        self._control = ControlPlane(
            store=store, cluster=self._cluster, mirror=self._mirror, fence=self._fence, step_down=self._step_down
        )
        self._orchestrator = find_orchestrator(settings.kubernetes) if settings.kubernetes else None
        self._sync_wait = SyncWait(store, self._cluster, self._mirror)
        self._metrics = Metrics(self._unreadable, self._quotas)
        self._open_files = raise_open_files()
        self._leadership: Leadership | None = None
        # Set once a new leader has caught up and bootstrapped; before that it must not serve writes.
        self._prepared = False

    def routes(self) -> tuple[Route, ...]:
        """All REST routes."""
        own, mode = self._settings.own_address, self._settings.mode
        sync_wait = self._sync_wait
        return (
            *sync_wait.with_wait(
                Objects(self._control, self._store, cluster_mode=mode, engine=self._policy.engine).routes()
            ),
            *sync_wait.routes(),
            *PolicyApi(self._cluster, self._policy).routes(),
            *sync_wait.with_wait(ContivApi(self._control, cluster_mode=mode).routes()),
            *sync_wait.with_wait(KubePurge(self._control, is_syncing=self._orchestrator is not None).routes()),
            *sync_wait.with_wait(Backups(self._store, self._cluster, self._mirror, fence=self._fence).routes()),
            *InfoApi(
                self._cluster, self._metrics, own_address=own, faults=self._faults, unreadable=self._unreadable.show
            ).routes(),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._mirror.run(), name="mirror"))
            # REST must not answer from an empty cluster.
            await self._mirror.wait_for(NEVER, within=STORE_START_TIMEOUT_S)
            await self._ensure_format()
            await self._serve_rest(stack)
            await self._serve_store(stack)
            alive = kinds.alive_master(settings.own_address)
            await stack.enter_async_context(
                present(self._store, key=alive, value=__version__.encode(), ttl=settings.leader_ttl)
            )
            await stack.enter_async_context(background(self._run_election(), name="election"))
            log.info("netmaster started", address=settings.own_address, version=__version__)
            await stop.wait()
            log.info("netmaster stopping")

    async def _ensure_format(self) -> None:
        """Mark a fresh store with our format; `Conflict` for a store of another one. Precedes all other writes."""

        async def commit(transaction: Transaction) -> None:
            revision = await self._store.commit(transaction.compares, transaction.writes)
            self._mirror.note_own(revision, own_events(transaction.writes))

        # A loop, because another netmaster may mark the same store at the same moment.
        loop = CommitLoop(cluster=self._cluster, mirror=self._mirror, commit=commit)
        await loop.run(lambda reading: (None, plan_format(reading)))

    async def _serve_rest(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        leader_proxy = LeaderProxy(
            self._leader_address,
            is_leader=self._is_leader,
            own_address=settings.own_address,
            tls_ca=settings.tls_ca,
            use_tls=settings.tls_cert is not None,
        )
        stack.push_async_callback(leader_proxy.close)
        guard = self._guard("rest", Limits(per_source=settings.connections_per_source, rate=settings.request_rate))
        app = make_app(
            self.routes(), token=settings.token, leader_proxy=leader_proxy, metrics=self._metrics, guard=guard
        )
        tls = ServerTls(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
        await stack.enter_async_context(serving(app, settings.listeners, tls=tls, guard=guard))

    def _guard(self, listener: str, limits: Limits) -> Guard:
        guard = Guard(listener, limits.within(self._open_files), is_peer=self._is_master)
        self._metrics.admission.add(guard)
        return guard

    def _is_master(self, source: str) -> bool:
        """Whether a source is another master: it forwards the requests of all its clients."""
        return any(
            source_of(address.rpartition(":")[0].strip("[]")) == source for address in self._cluster.alive["masters"]
        )

    async def _serve_store(self, stack: AsyncExitStack) -> None:
        """Serve the store to agents: on a unix socket, and on TCP with mutual TLS if configured.

        With etcd there is no node enrollment: agents connect to etcd themselves.
        """
        settings = self._settings
        tls: ServerTls | None = None
        if settings.join_address and settings.store_address and isinstance(settings.store, SqliteStoreSettings):
            tls = await self._serve_enrollment(stack, settings.store_address, settings.join_address)
        elif settings.store_address and settings.tls_cert and settings.tls_key:
            tls = ServerTls(settings.tls_cert, settings.tls_key, client_ca=settings.node_ca)
        addresses = (settings.store_address,) if settings.store_address and tls else ()
        limits = replace(STORE_LIMITS, connections=settings.max_connections, rate=settings.request_rate)
        guard = self._guard("store", limits)
        await stack.enter_async_context(
            serving_store(
                self._store,
                unix=settings.store_socket,
                addresses=addresses,
                tls=tls,
                guard=guard,
                quotas=self._quotas,
            )
        )

    async def _serve_enrollment(
        self, stack: AsyncExitStack, store: tuple[str, int], join: tuple[str, int]
    ) -> ServerTls:
        # Imported on demand: the cryptography package costs 10 MB that other deployments do not need.
        from weft.master.nodes.enrollment import JOIN_LIMITS, serving_enrollment  # noqa: PLC0415

        assert self._orchestrator is not None
        settings = self._settings
        return await stack.enter_async_context(
            serving_enrollment(
                self._orchestrator.discovery(),
                directory=settings.data_dir,
                store=store,
                join=join,
                life=settings.certificate_lifetime,
                guard=self._guard("join", JOIN_LIMITS),
            )
        )

    async def _run_election(self) -> None:
        settings = self._settings
        name = kinds.leader_name(settings.own_address, _instance_id(settings.data_dir))
        is_first = True
        while True:
            async with lead(
                self._store, key=kinds.LEADER_KEY, name=name, ttl=settings.leader_ttl, replace_own=is_first
            ) as leadership:
                is_first = False
                await self._lead(leadership)

    async def _lead(self, leadership: Leadership) -> None:
        """Catch up with the store, bootstrap, then run the leader's controllers until leadership is lost."""
        try:
            # The previous leader's last commits are older than our own leader key.
            await self._mirror.wait_for(leadership.fence.revision, within=self._settings.leader_ttl)
            self._leadership = leadership
            if not self._cluster.restoring and await bootstrap(
                self._control,
                fwd_mode=cast("model.FwdMode", self._settings.fwdmode),
                encap=cast("model.Encap", self._settings.netmode),
                subnet=self._settings.default_subnet,
            ):
                log.info("cluster bootstrapped", tenant="default", subnet=self._settings.default_subnet)
            self._metrics.leader.set(1)
            self._prepared = True
            log.info("leading", address=self._settings.own_address)
            async with AsyncExitStack() as stack:
                node_gc = run_node_gc(self._control, limit=self._settings.offline_limit)
                await stack.enter_async_context(background(node_gc, name="node GC"))
                if self._orchestrator:
                    informers = self._orchestrator.informers()
                    self._metrics.informer_errors.set_function(lambda: len(informers.faults))
                    stack.callback(self._metrics.informer_errors.set_function, lambda: 0)
                    wait_for_sync = partial(self._sync_wait.wait_for_sync, WaitOptions(REALIZE_TIMEOUT_S))
                    kube_sync = run_kube_sync(self._control, informers, wait_for_sync=wait_for_sync)
                    await stack.enter_async_context(background(kube_sync, name="Kubernetes sync"))
                else:
                    warn_of_leftovers(self._cluster)
                await leadership.lost.wait()
            log.warning("leadership lost", reason=leadership.reason)
        except Unavailable as error:
            log.warning("leadership abandoned", reason=error.message)
        finally:
            self._prepared = False
            self._leadership = None
            self._metrics.leader.set(0)

    def _is_leader(self) -> bool:
        return self._prepared and self._leadership is not None and self._leadership.held

    def _fence(self) -> RevisionEquals:
        if self._leadership is None or not self._leadership.held:
            raise Unavailable("this netmaster is not the leader: try again")
        return self._leadership.fence

    def _step_down(self) -> None:
        """Give up leadership after a commit with an unknown result. Re-election moves the fence, so that a commit that
        is still in flight fails."""
        if self._leadership is not None:
            self._leadership.lose("the result of a commit is unknown")

    def _leader_address(self) -> str:
        return self._cluster.leader[0] if self._cluster.leader else ""

    async def _faults(self) -> list[str]:
        """Why requests cannot be served now."""
        # Unreadable keys are not among them: whoever writes garbage would take all masters out of service.
        faults: list[str] = []
        if self._cluster.restoring:
            faults.append("a restore is under way or was interrupted")
        if not self._leader_address():
            faults.append("no leader is elected")
        elif self._leader_address() == self._settings.own_address and not self._is_leader():
            faults.append("leader is still catching up with the store")
        # A read, because the mirror's view of the leader may be stale when the store is unreachable.
        try:
            async with asyncio.timeout(STORE_READY_TIMEOUT_S):
                await self._store.read(kinds.LEADER_KEY)
        except TimeoutError:
            faults.append(f"the store did not answer within {STORE_READY_TIMEOUT_S:g} s")
        except Unavailable as error:
            faults.append(f"the store does not answer: {error.message}")
        return faults


def _instance_id(directory: Path) -> str:
    """The id of this installation, created at the first start. A restarted process has the same one."""
    file = directory / "instance-id"
    if not file.is_file():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place_file(file, uuid4().hex.encode(), mode=0o600)
    return file.read_text(errors="replace").strip()[:64]


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
