"""netplugin: settings -> store -> snapshot -> datapath -> restored -> CNI. Signals end it; what it made goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from weft import __version__
from weft.agent.cni.attachments import Attachments
from weft.agent.cni.chain_validation import refusing_bad_chains
from weft.agent.cni.contiv import ContivCni
from weft.agent.cni.inflight_requests import calls
from weft.agent.cni.pods import PodWorkloads, Relabelling, telling_failures
from weft.agent.cni.server import cni_server
from weft.agent.dataplane.executor import DatapathExecutor, kernel_thread
from weft.agent.dataplane.infra_attachment import Joining
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.dns.publisher import Names
from weft.agent.metrics import Metrics
from weft.agent.observe.drop_attribution import DropAttributor, DropReader
from weft.agent.observe.drops import DropLog
from weft.agent.observe.health_check_server import HealthPorts
from weft.agent.observe.readiness import Readiness
from weft.agent.observe.sync_status import Receipts
from weft.agent.rest import AgentParts, AgentRest
from weft.agent.settings import AgentSettings, read_agent_settings
from weft.agent.store.attachment_store import Stage
from weft.agent.store.attachment_wal import AttachmentWal, read_boot_id
from weft.agent.store.evictions import Evictions
from weft.agent.store.node_ipam import NodeIpam
from weft.cni.chains import Chains
from weft.cni.install import NAMES
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.errors import DatapathFault, NotFound, Unavailable, WeftError
from weft.domain.store_types import NEVER
from weft.drivers import (
    DatapathSettings,
    LinuxDatapathSettings,
    OvsDatapathSettings,
    StoreSettings,
    find_orchestrator,
    open_datapath,
    open_store,
)
from weft.ports.datapath import Datapath
from weft.ports.orchestrator import Discovery, Pods
from weft.ports.store import Store
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.http import serving, serving_privately
from weft.runtime.logs import Log, start_logging
from weft.runtime.settings import BadSettings, refuse
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

log = Log("netplugin")

EXIT_FAILED = 1
# How long devices that are as good as gone may wait, so that many go at once: a group takes the kernel some 10 ms.
REAP_S = 0.25
# How often the datapath is asked what it has refused, and whether others have had a hand in it.
LISTEN_S = 0.05
# The same while it does not follow: what it depends on may be back, and packets are lost until that is noticed.
LISTEN_AWAY_S = 0.003
# How often attachments are looked at that are to leave and that no news told of.
EVICT_S = 0.5


class Agent:
    """One node's agent."""

    def __init__(
        self,
        settings: AgentSettings,
        store: Store,
        ledger: AttachmentWal,
        kernel: DatapathExecutor,
        *,
        mtu: int,
        pods: Pods | None,
    ) -> None:
        self._ledger = ledger
        self._kernel = kernel
        self._cluster = Cluster()
        self._reconciler = Reconciler(self._cluster, node=settings.host, journal=ledger, kernel=kernel)
        self._evictions = Evictions(self._reconciler, cluster=self._cluster, journal=ledger)
        self._names = self._make_names(settings)
        self._mirror = Mirror(store, self._names or self._evictions)
        node = model.Node(
            name=settings.host,
            ctrl_ip=str(settings.ctrl_ip),
            vtep_ip=str(settings.vtep_ip),
            vxlan_port=settings.vxlan_port,
            version=__version__,
        )
        self._holdings = NodeIpam(
            store,
            node=node,
            cluster=self._cluster,
            mirror=self._mirror,
            journal=ledger,
            ttl=settings.node_ttl,
            limit=settings.offline_limit,
        )
        self._pods = pods
        self._attachments = Attachments(
            cluster=self._cluster,
            holdings=self._holdings,
            journal=ledger,
            kernel=kernel,
            reconciler=self._reconciler,
            mtu=mtu,
            names=self._names is not None,
            workloads=PodWorkloads(self._cluster, pods) if pods else None,
        )
        self._joining = Joining(
            cluster=self._cluster,
            node=settings.host,
            journal=ledger,
            attachments=self._attachments,
            news=self._reconciler.networks_changed,
        )
        self._readiness = Readiness(
            store,
            mirror=self._mirror,
            attachments=self._attachments,
            holdings=self._holdings,
            reconciler=self._reconciler,
            limit=settings.stale_after,
        )
        self._receipts = Receipts(
            store,
            node=settings.host,
            cluster=self._cluster,
            mirror=self._mirror,
            reconciler=self._reconciler,
            faults=lambda: self._readiness.faults() if self._holdings.connected else None,
        )
        drops = DropLog()
        naming = DropAttributor(self._cluster, journal=ledger, policies=self._reconciler.policies.by_tenant)
        self._hearing = DropReader(kernel, naming=naming, drops=drops)
        self._parts = AgentParts(
            settings=settings,
            cluster=self._cluster,
            journal=ledger,
            holdings=self._holdings,
            reconciler=self._reconciler,
            attachments=self._attachments,
            readiness=self._readiness,
            kernel=kernel,
            metrics=Metrics(),
            drops=drops,
            names=self._names,
            mtu=mtu,
        )
        self._settings = settings

    def _make_names(self, settings: AgentSettings) -> Names | None:
        if settings.names_socket is None:
            return None
        names = Names(
            self._evictions,
            socket=settings.names_socket,
            cluster=self._cluster,
            node=settings.host,
            policies=self._reconciler.policies.by_tenant,
            domain=settings.domain,
        )
        self._reconciler.spaces = names
        return names

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop. DEL and CHECK are served at once, ADD when the node is restored."""
        async with AsyncExitStack() as stack:
            await self._open_doors(stack)
            for work, name in (
                (self._mirror.run(), "mirror"),
                (self._holdings.run(), "holdings"),
                (self._restore_and_follow(), "reconcile"),
                (self._reap_for_ever(), "reaper"),
                (self._listen_for_ever(), "listener"),
                (self._evict_for_ever(), "evictions"),
                (self._joining.run(), "infra"),
                (self._readiness.run(), "readiness"),
                (self._receipts.run(), "receipts"),
                (HealthPorts(self._cluster, self._reconciler.services, node=self._settings.host).run(), "health ports"),
            ):
                await stack.enter_async_context(background(work, name=name))
            if self._pods:
                await self._follow_pods(stack, self._pods)
            log.info("netplugin started", node=self._settings.host, version=__version__)
            await stop.wait()
            log.info("netplugin stops")

    async def _follow_pods(self, stack: AsyncExitStack, pods: Pods) -> None:
        relabelling = Relabelling(cluster=self._cluster, pods=pods, journal=self._ledger, holdings=self._holdings)
        self._parts.metrics.orchestrator.set_function(lambda: not pods.fault)
        await stack.enter_async_context(background(pods.run(), name="pods"))
        await stack.enter_async_context(background(relabelling.run(), name="labels"))

    async def _open_doors(self, stack: AsyncExitStack) -> None:
        """For runtimes, in both their ways, and for people."""
        settings, observe = self._settings, self._parts.metrics.observe
        guarded = refusing_bad_chains(self._attachments.serve, Chains(settings.cni_conf_dir, ours=NAMES))
        if self._pods:
            guarded = telling_failures(guarded, self._pods)
        serve = (await stack.enter_async_context(calls(guarded))).serve
        await stack.enter_async_context(cni_server(settings.cni_socket, serve, observe))
        if settings.contiv_socket:
            contiv = ContivCni(journal=self._ledger, serve=serve, observe=observe)
            await stack.enter_async_context(serving_privately(contiv.app(), settings.contiv_socket))
        if settings.rest_address:
            app = AgentRest(self._parts).app()
            await stack.enter_async_context(serving(app, (settings.rest_address,), tls=None))

    async def _restore_and_follow(self) -> None:
        await self._wait_for_store()
        backoff = Backoff(cap=10.0)
        while not await self._is_restored():
            await backoff.pause()
        self._attachments.ready.set()
        log.info("node restored", attachments=sum(1 for _ in self._ledger))
        async with AsyncExitStack() as stack:
            if self._names:
                await stack.enter_async_context(background(self._names.run(), name="names"))
            await stack.enter_async_context(background(self._plug_again_for_ever(), name="lost ports"))
            await self._reconciler.run()

    async def _wait_for_store(self) -> None:
        backoff = Backoff(cap=1.0)
        where = ", ".join(getattr(self._settings.store, "endpoints", ()))
        while not (self._mirror.in_sync and self._holdings.connected):
            try:
                await self._mirror.wait_for(NEVER, within=1.0)
            except Unavailable:
                log.warning("waiting for the store", at=where)
            await backoff.pause()

    async def _is_restored(self) -> bool:
        """Try to restore the node; what the kernel refuses now is tried again, and meanwhile DEL and CHECK go on."""
        try:
            await self._restore()
        except DatapathFault as error:
            log.error("node not restored", reason=error.message)
            return False
        return True

    async def _restore(self) -> None:
        """Recover what is ours, mend it, and undo what was never answered."""
        if self._ledger.rebooted:
            log.info("the machine was restarted: no attachment has survived")
        for note in self._ledger:
            if self._ledger.rebooted:
                self._ledger.change(note.key, unwired=True)
                await self._holdings.detach(note.key)
        findings = await self._reconciler.converge()
        for note in self._ledger:
            wiring = note.wiring
            if note.stage is not Stage.ATTACHED or wiring is None:
                await self._attachments.remove(note)
            elif wiring.port in findings.missing:
                log.warning("attachment lost its interface", container=note.endpoint.container_id)
                try:
                    await self._attachments.plug(note.endpoint, wiring)
                except (NotFound, WeftError) as error:
                    log.warning("attachment given up", container=note.endpoint.container_id, reason=error.message)
                    await self._attachments.remove(note)

    async def _plug_again_for_ever(self) -> None:
        lost = self._reconciler.port_lost
        backoff = Backoff(cap=10.0)
        while True:
            await lost.wait()
            lost.clear()
            while not await self._attachments.plug_again():
                await backoff.pause()
            backoff.reset()

    async def _reap_for_ever(self) -> None:
        never, told = asyncio.Event(), ""
        while not await wait_event(never, within=REAP_S):
            try:
                await self._kernel.call(lambda datapath: datapath.reap())
                told = ""
            except DatapathFault as error:
                if error.message != told:
                    log.error("not reaped", reason=error.message)
                told = error.message

    async def _listen_for_ever(self) -> None:
        never = asyncio.Event()
        while not await wait_event(never, within=LISTEN_AWAY_S if self._reconciler.fault else LISTEN_S):
            try:
                if await self._kernel.call(self._look_at):
                    self._reconciler.mark_dirty()
            except DatapathFault as error:
                log.error("not known whether others have changed the datapath", reason=error.message)
            await self._hearing.listen()

    def _look_at(self, datapath: Datapath) -> bool:
        """On the kernel's thread: what is heard until then counts."""
        return datapath.has_drifted(is_current=self._reconciler.is_current)

    async def _evict_for_ever(self) -> None:
        """At the word of the store's news; what is noted by other roads, or was refused, is found soon after."""
        news = self._evictions.news
        while True:
            await wait_event(news, within=EVICT_S)
            news.clear()
            try:
                await self._attachments.evict()
            except DatapathFault as error:
                log.error("not taken off", reason=error.message)


def _datapath_settings(settings: AgentSettings) -> DatapathSettings:
    if settings.datapath == "ovs":
        return OvsDatapathSettings(
            switch=settings.ovs_dir,
            directory=settings.run_dir / "netns",
            vtep=settings.vtep_ip,
            vxlan_port=settings.vxlan_port,
            uplinks=settings.vlan_uplinks,
            unmasked=settings.nat_exclude,
            node_port_subnets=settings.node_port_subnets,
        )
    return LinuxDatapathSettings(
        directory=settings.run_dir / "netns",
        vtep=settings.vtep_ip,
        vxlan_port=settings.vxlan_port,
        unmasked=settings.nat_exclude,
        node_port_subnets=settings.node_port_subnets,
    )


async def serve(settings: AgentSettings) -> None:
    """Open everything and run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    ledger = AttachmentWal(settings.data_dir / "ledger", boot=read_boot_id())
    try:
        opening = open_datapath(_datapath_settings(settings))
        async with AsyncExitStack() as stack:
            pods, reached = None, settings.store
            if settings.kubernetes:
                orchestrator = find_orchestrator(settings.kubernetes)
                if settings.join_token:
                    found = await _join(stack, orchestrator.meeting(), settings, token=settings.join_token, stop=stop)
                    if found is None:
                        return
                    reached = found
                pods = orchestrator.pods(node=settings.host)
                await stack.enter_async_context(pods)
            store = await stack.enter_async_context(open_store(reached))
            kernel = await stack.enter_async_context(kernel_thread(lambda: opening))
            mtu = await kernel.call(lambda datapath: datapath.mtu)
            await Agent(settings, store, ledger, kernel, mtu=mtu, pods=pods).run(stop)
    finally:
        ledger.close()


async def _join(
    stack: AsyncExitStack, meeting: Discovery, settings: AgentSettings, *, token: Path, stop: asyncio.Event
) -> StoreSettings | None:
    """The store of the netmaster that there is, and this node's certificate kept good; None when told to stop first."""
    from weft.agent.store.node_certificate import NodeCertificate  # noqa: PLC0415  10 MB that only this needs

    await stack.enter_async_context(meeting)
    membership = NodeCertificate(settings.data_dir / "membership", node=settings.host, meeting=meeting, token=token)
    found = await membership.begin(stop)

    async def keep() -> None:
        await membership.keep()
        stop.set()  # whoever started us starts us again, and then we go where netmaster is

    if found is not None:
        await stack.enter_async_context(background(keep(), name="membership"))
    return found


def main() -> None:
    """The command `netplugin`."""
    try:
        settings = read_agent_settings(sys.argv[1:], os.environ)
    except BadSettings as error:
        refuse("netplugin", error)
    start_logging(level=settings.log_level, as_json=settings.json_log, syslog=settings.syslog)
    try:
        asyncio.run(serve(settings))
    except (WeftError, OSError) as error:
        log.error("netplugin cannot run", reason=str(error))
        raise SystemExit(EXIT_FAILED) from error


if __name__ == "__main__":
    main()
