"""The command `netplugin`: composes the agent, restores the node and serves CNI until a signal.

Order at start: settings, store, first listing, datapath, restore, CNI ADD. The datapath stays in place when it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from weft import __version__
from weft.agent.cni.attachments import Attachments
from weft.agent.cni.contiv import ContivCni
from weft.agent.cni.pods import LabelSync, PodWorkloads
from weft.agent.cni.server import cni_server, inflight_requests
from weft.agent.dataplane.desired_state import DesiredState, make_features
from weft.agent.dataplane.executor import DatapathExecutor, datapath_thread
from weft.agent.dataplane.infra_networks import InfraAttacher
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.dns_publisher import DnsPublisher
from weft.agent.metrics import Metrics
from weft.agent.observe.drops import DropAttributor, DropLog, DropReader
from weft.agent.observe.health_check_server import HealthCheckServer
from weft.agent.observe.readiness import Readiness
from weft.agent.observe.sync_status import SyncStatusReporter
from weft.agent.rest import AgentComponents, AgentRest
from weft.agent.settings import AgentSettings, read_agent_settings
from weft.agent.store.attachment_store import FILE_NAME, AttachmentWal, read_boot_id
from weft.agent.store.endpoint_publisher import EndpointPublisher
from weft.agent.store.evictions import Evictions
from weft.agent.store.node_ipam import BlockAllocator
from weft.agent.store.node_lease import NodeLease
from weft.agent.store.store_writer import StoreWriter
from weft.cni.chains import Chains
from weft.cni.install import NAMES
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, DatapathFault, Unavailable, WeftError
from weft.domain.lifecycle.store_format import check_format, check_global
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
from weft.runtime.admission import Guard, Limits
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.http import serving
from weft.runtime.listener import raise_open_files
from weft.runtime.logs import Log, start_logging
from weft.runtime.settings import BadSettings, refuse
from weft.runtime.store.mirror import Mirror
from weft.runtime.store.unreadable import UnreadableKeys
from weft.runtime.tasks import background

log = Log("netplugin")

EXIT_FAILED = 1
# Both are for clients of this machine only.
LOCAL_LIMITS = Limits(connections=1024, per_local=768)
# Devices to delete are collected for this long: RCU makes the kernel wait some 10 ms per batch, not per device.
REAP_S = 0.25
# How often the datapath is polled for drops and drift.
POLL_S = 0.05
# The same while it is out of sync: packets are lost until we notice that, say, a restarted OVS is back.
POLL_FAULT_S = 0.003
# How often attachments in stage `deleting` are looked for without an eviction event.
EVICT_S = 0.5


class Agent:
    """The agent of one node: its components, and the tasks that run them."""

    def __init__(
        self,
        settings: AgentSettings,
        store: Store,
        attachment_log: AttachmentWal,
        executor: DatapathExecutor,
        *,
        mtu: int,
        pods: Pods | None,
    ) -> None:
        self._attachment_log = attachment_log
        self._executor = executor
        self._cluster = Cluster()
        self._features = make_features(self._cluster, node=settings.host, attachment_store=attachment_log)
        desired = DesiredState(
            self._cluster, node=settings.host, attachment_store=attachment_log, features=self._features
        )
        self._dns = self._make_dns_publisher(settings)
        dns = (self._dns,) if self._dns else ()
        self._reconciler = Reconciler(desired, executor=executor, netns_observers=dns)
        self._evictions = Evictions(cluster=self._cluster, attachment_store=attachment_log)
        # The cluster first: the others read the new state from it.
        self._unreadable = UnreadableKeys(self._cluster)
        self._mirror = Mirror(store, self._cluster, desired, self._evictions, *dns, self._unreadable)
        node = model.Node(
            name=settings.host,
            ctrl_ip=str(settings.ctrl_ip),
            vtep_ip=str(settings.vtep_ip),
            vxlan_port=settings.vxlan_port,
            version=__version__,
        )
        writer = StoreWriter(store, cluster=self._cluster, mirror=self._mirror)
        self._lease = NodeLease(
            store,
            node=node,
            mirror=self._mirror,
            writer=writer,
            ttl=settings.node_ttl,
            limit=settings.offline_limit,
        )
        allocator = BlockAllocator(
            cluster=self._cluster, lease=self._lease, writer=writer, attachment_store=attachment_log
        )
        self._publisher = EndpointPublisher(
            node=settings.host,
            cluster=self._cluster,
            mirror=self._mirror,
            writer=writer,
            attachment_store=attachment_log,
            allocator=allocator,
        )
        self._pods = pods
        self._attachments = Attachments(
            cluster=self._cluster,
            lease=self._lease,
            allocator=allocator,
            publisher=self._publisher,
            attachment_store=attachment_log,
            executor=executor,
            reconciler=self._reconciler,
            mtu=mtu,
            gateways_serve_dns=self._dns is not None,
            workloads=PodWorkloads(self._cluster, pods) if pods else None,
            chains=Chains(settings.cni_conf_dir, ours=NAMES),
            reserved_ports=frozenset(settings.reserved_host_ports),
        )
        self._infra = InfraAttacher(
            cluster=self._cluster,
            node=settings.host,
            attachment_store=attachment_log,
            attachments=self._attachments,
            networks_changed=desired.networks_changed,
        )
        self._readiness = Readiness(
            store,
            mirror=self._mirror,
            attachments=self._attachments,
            lease=self._lease,
            reconciler=self._reconciler,
            limit=settings.stale_after,
        )
        self._sync_status = SyncStatusReporter(
            store,
            node=settings.host,
            cluster=self._cluster,
            mirror=self._mirror,
            reconciler=self._reconciler,
            faults=lambda: self._readiness.faults() if self._lease.connected else None,
        )
        drops = DropLog()
        attributor = DropAttributor(
            self._cluster, attachment_store=attachment_log, policies=self._features.policies.by_tenant
        )
        self._drop_reader = DropReader(executor, attributor=attributor, drops=drops)
        self._components = AgentComponents(
            settings=settings,
            cluster=self._cluster,
            attachment_store=attachment_log,
            lease=self._lease,
            reconciler=self._reconciler,
            attachments=self._attachments,
            readiness=self._readiness,
            executor=executor,
            metrics=Metrics(self._unreadable),
            unreadable=self._unreadable,
            drops=drops,
            features=self._features,
            dns=self._dns,
            mtu=mtu,
        )
        self._components.metrics.damaged_log_lines.set(attachment_log.damaged_lines)
        self._settings = settings

    def _make_dns_publisher(self, settings: AgentSettings) -> DnsPublisher | None:
        if settings.dns_socket is None:
            return None
        return DnsPublisher(
            socket=settings.dns_socket,
            cluster=self._cluster,
            node=settings.host,
            policies=self._features.policies.by_tenant,
            domain=settings.domain,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. DEL and CHECK are served at once, ADD when the node is restored."""
        async with AsyncExitStack() as stack:
            # First: DEL and CHECK need nothing but the attachment log and the kernel.
            await self._open_listeners(stack)
            for work, name in (
                (self._mirror.run(), "mirror"),
                (self._lease.run(self._publisher), "node lease"),
                (self._restore_and_follow(), "reconcile"),
                (self._reap_forever(), "reaper"),
                (self._poll_datapath_forever(), "datapath poll"),
                (self._evict_forever(), "evictions"),
                (self._infra.run(), "infra networks"),
                (self._readiness.run(), "readiness"),
                (self._sync_status.run(), "sync status"),
                (
                    HealthCheckServer(
                        self._cluster,
                        self._features.services,
                        node=self._settings.host,
                        admission=self._components.metrics.admission,
                    ).run(),
                    "health checks",
                ),
            ):
                await stack.enter_async_context(background(work, name=name))
            if self._pods:
                await self._follow_pods(stack, self._pods)
            log.info("netplugin started", node=self._settings.host, version=__version__)
            await stop.wait()
            log.info("netplugin stopping")

    async def _follow_pods(self, stack: AsyncExitStack, pods: Pods) -> None:
        labels = LabelSync(
            cluster=self._cluster, pods=pods, attachment_store=self._attachment_log, publisher=self._publisher
        )
        self._components.metrics.kube_api_connected.set_function(lambda: not pods.fault)
        await stack.enter_async_context(background(pods.run(), name="pods"))
        await stack.enter_async_context(background(labels.run(), name="labels"))

    async def _open_listeners(self, stack: AsyncExitStack) -> None:
        """CNI, Contiv's CNI protocol where it is enabled, and REST."""
        settings, observe = self._settings, self._components.metrics.observe
        serve = (await stack.enter_async_context(inflight_requests(self._attachments.serve))).serve
        await stack.enter_async_context(cni_server(settings.cni_socket, serve, observe))
        if settings.contiv_socket:
            contiv = ContivCni(attachment_store=self._attachment_log, serve=serve, observe=observe)
            guard = self._guard("contiv-cni")
            await stack.enter_async_context(
                serving(contiv.app(guard), (), tls=None, guard=guard, unix=settings.contiv_socket)
            )
        if settings.rest_address:
            guard = self._guard("rest")
            app = AgentRest(self._components).app(guard)
            await stack.enter_async_context(serving(app, (settings.rest_address,), tls=None, guard=guard))

    def _guard(self, listener: str) -> Guard:
        # Fewer where there are few descriptors: they must never be missing for CNI.
        guard = Guard(listener, LOCAL_LIMITS.within(raise_open_files()))
        self._components.metrics.admission.add(guard)
        return guard

    async def _restore_and_follow(self) -> None:
        await self._wait_for_store()
        backoff = Backoff(cap=10.0)
        # Read as another format the store would lack state, and the node would lose its ports. DEL is served meanwhile.
        while fault := _store_fault(self._cluster):
            if fault != self._readiness.waiting_for:
                log.error("this store cannot be used, waiting", reason=fault)
            self._readiness.waiting_for = fault
            await backoff.pause()
        self._readiness.waiting_for = ""
        while not await self._is_restored():
            await backoff.pause()
        # Only now ADD is served: before, an address might be given to two endpoints, and policy would be missing.
        self._attachments.ready.set()
        log.info("node restored", attachments=sum(1 for _ in self._attachment_log))
        async with AsyncExitStack() as stack:
            # After the restore: a full sync before would make netdns leave the netns of tenants not read back yet.
            if self._dns:
                await stack.enter_async_context(background(self._dns.run(), name="dns publisher"))
            await stack.enter_async_context(background(self._replug_forever(), name="missing ports"))
            await self._reconciler.run()

    async def _wait_for_store(self) -> None:
        backoff = Backoff(cap=1.0)
        where = ", ".join(getattr(self._settings.store, "endpoints", ()))
        while not (self._mirror.in_sync and self._lease.connected):
            try:
                await self._mirror.wait_for(NEVER, within=1.0)
            except Unavailable:
                log.warning("waiting for the store", at=where)
            await backoff.pause()

    async def _is_restored(self) -> bool:
        """Try to restore the node. A fault is retried; DEL and CHECK are served in the meantime."""
        try:
            await self._restore()
        except DatapathFault as error:
            log.error("restoring the node failed, retrying", reason=error.message)
            return False
        return True

    async def _restore(self) -> None:
        """Repair the datapath, then undo ADDs that were never answered and plug the ports that are missing."""
        if self._attachment_log.rebooted:
            log.info("the machine was rebooted: no attachment has survived")
            for attachment in self._attachment_log:
                await self._publisher.withdraw(attachment.key)
        if self._attachment_log.is_damaged:
            self._attachments.restore_lost_records()
        report = await self._reconciler.converge()
        await self._attachments.recover(report.missing)

    async def _replug_forever(self) -> None:
        missing = self._reconciler.missing.detected
        backoff = Backoff(cap=10.0)
        while True:
            await missing.wait()
            missing.clear()
            while not await self._attachments.replug_missing():
                await backoff.pause()
            backoff.reset()

    async def _reap_forever(self) -> None:
        never, logged = asyncio.Event(), ""
        while not await wait_event(never, within=REAP_S):
            try:
                await self._executor.call(lambda datapath: datapath.reap())
                logged = ""
            except DatapathFault as error:
                if error.message != logged:  # it is retried four times a second: one line is enough
                    log.error("device cleanup failed", reason=error.message)
                logged = error.message

    async def _poll_datapath_forever(self) -> None:
        never = asyncio.Event()
        while not await wait_event(never, within=POLL_FAULT_S if self._reconciler.fault else POLL_S):
            try:
                if await self._executor.call(self._has_drifted):
                    self._reconciler.mark_dirty()
            except DatapathFault as error:
                log.error("drift check failed", reason=error.message)
            await self._drop_reader.poll()

    def _has_drifted(self, datapath: Datapath) -> bool:
        # Runs on the datapath thread: whether we are current must be read when the call runs, not when it is queued.
        return datapath.has_drifted(in_sync=self._reconciler.is_current)

    async def _evict_forever(self) -> None:
        """Remove evicted attachments at once; look now and then for those that failed or were marked elsewhere."""
        pending = self._evictions.pending
        while True:
            await wait_event(pending, within=EVICT_S)
            pending.clear()
            try:
                await self._attachments.evict()
            except DatapathFault as error:
                log.error("endpoint removal failed", reason=error.message)


def _store_fault(cluster: Cluster) -> str:
    """Why the node must not be restored from this store; empty if it may."""
    try:
        check_format(cluster)
        check_global(cluster)
    except Conflict as error:
        return error.message
    return ""


def _datapath_settings(settings: AgentSettings) -> DatapathSettings:
    if settings.datapath == "ovs":
        return OvsDatapathSettings(
            switch=settings.ovs_dir,
            directory=settings.run_dir / "netns",
            vtep=settings.vtep_ip,
            vxlan_port=settings.vxlan_port,
            uplinks=settings.vlan_uplinks,
            nat_exclude=settings.nat_exclude,
            node_port_subnets=settings.node_port_subnets,
            reserved_ports=settings.reserved_host_ports,
        )
    return LinuxDatapathSettings(
        directory=settings.run_dir / "netns",
        vtep=settings.vtep_ip,
        vxlan_port=settings.vxlan_port,
        nat_exclude=settings.nat_exclude,
        node_port_subnets=settings.node_port_subnets,
        reserved_ports=settings.reserved_host_ports,
    )


async def serve(settings: AgentSettings) -> None:
    """Open everything and run until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    attachment_log = AttachmentWal(settings.data_dir / FILE_NAME, boot=read_boot_id())
    try:
        opening = open_datapath(_datapath_settings(settings))
        async with AsyncExitStack() as stack:
            pods, reached = None, settings.store
            if settings.kubernetes:
                orchestrator = find_orchestrator(settings.kubernetes)
                if settings.join_token:
                    found = await _join(stack, orchestrator.discovery(), settings, token=settings.join_token, stop=stop)
                    if found is None:
                        return
                    reached = found
                pods = orchestrator.pods(node=settings.host)
                await stack.enter_async_context(pods)
            store = await stack.enter_async_context(open_store(reached))
            executor = await stack.enter_async_context(datapath_thread(lambda: opening))
            # Read once: a change of the underlay MTU needs a restart, as interfaces have it already.
            mtu = await executor.call(lambda datapath: datapath.mtu)
            await Agent(settings, store, attachment_log, executor, mtu=mtu, pods=pods).run(stop)
    finally:
        attachment_log.close()


async def _join(
    stack: AsyncExitStack, discovery: Discovery, settings: AgentSettings, *, token: Path, stop: asyncio.Event
) -> StoreSettings | None:
    """The store of netmaster, with a certificate that is renewed in the background; None when `stop` is set first."""
    from weft.agent.store.node_certificate import NodeCertificate  # noqa: PLC0415  10 MB that only this needs

    await stack.enter_async_context(discovery)
    certificate = NodeCertificate(
        settings.data_dir / "membership", node=settings.host, discovery=discovery, token=token
    )
    found = await certificate.obtain(stop)

    async def renew() -> None:
        await certificate.renew_forever()
        stop.set()  # the supervisor starts us again, and then we connect to the new endpoint

    if found is not None:
        await stack.enter_async_context(background(renew(), name="certificate"))
    return found


def main() -> None:
    """The command `netplugin`."""
    try:
        settings = read_agent_settings(sys.argv[1:], os.environ)
    except BadSettings as error:
        refuse("netplugin", error)
    start_logging(level=settings.log_level, as_json=settings.json_log, syslog=settings.syslog)
    raise_open_files()
    try:
        asyncio.run(serve(settings))
    except (WeftError, OSError) as error:
        log.error("netplugin cannot run", reason=str(error))
        raise SystemExit(EXIT_FAILED) from error


if __name__ == "__main__":
    main()
