"""The CNI verbs: ADD, DEL, CHECK, GC and STATUS, one at a time for each container.

ADD is reserve -> configure -> publish -> result. Every step has its undo, and DEL undoes all of them in reverse:
an ADD that fails or is cancelled on the way is removed as DEL removes it.

| step      | does                                             | undo                         |
|-----------|--------------------------------------------------|------------------------------|
| reserve   | addresses, attachment record                     | `EndpointPublisher.withdraw` |
| configure | network, port and policy in the datapath         | `_deconfigure`               |
| publish   | endpoint in the store, after the answer          | `EndpointPublisher.withdraw` |
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from contextlib import suppress
from typing import NamedTuple

from weft.agent.cni.endpoint_config import (
    check_host_ports_free,
    check_result,
    host_ports,
    plan_config,
    plan_result,
    rate_limits,
)
from weft.agent.cni.workload_identity import PlainWorkloads, Workload, Workloads
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.infra_networks import HOST_NETNS, host_config, host_endpoint
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.agent.store.endpoint_publisher import EndpointPublisher
from weft.agent.store.node_ipam import BlockAllocator
from weft.agent.store.node_lease import NodeLease
from weft.cni import request as cni
from weft.cni.chains import Chains
from weft.cni.errors import CniError, Code
from weft.cni.result import encode_result
from weft.cni.versions import encode_versions
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import segment_id_of, tags_of
from weft.domain.desired.state import NO_LIMITS, Port, RateLimits
from weft.domain.errors import Conflict, DatapathFault, Invalid, NotFound, Unavailable, WeftError
from weft.domain.host_access.view import PublishedPort
from weft.domain.ids import EndpointKey, check_endpoint_id
from weft.domain.ipam import ipam
from weft.ports.datapath import EndpointConfig, PlugRequest
from weft.runtime.keyed_lock import KeyedLock
from weft.runtime.logs import Log

log = Log("attach")

# The first interface of a container. It has the default route, and its endpoint has the container's bare id.
PRIMARY_INTERFACE = "eth0"


class _AttachRequest(NamedTuple):
    """What an attachment needs. Addresses and MAC of the endpoint are empty unless the caller requested some."""

    endpoint: model.Endpoint
    netns: str
    # The name of the CNI network configuration; empty for the host's own interfaces, which GC must not touch.
    network_name: str = ""
    ports: tuple[PublishedPort, ...] = ()
    rates: RateLimits = NO_LIMITS
    is_host: bool = False


class Attachments:
    """Serves CNI requests on one node. ADD waits for `ready`, which is set when the node is restored."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        lease: NodeLease,
        allocator: BlockAllocator,
        publisher: EndpointPublisher,
        attachment_store: AttachmentStore,
        executor: DatapathExecutor,
        reconciler: Reconciler,
        mtu: int,
        gateways_serve_dns: bool = False,
        workloads: Workloads | None = None,
        chains: Chains | None = None,
        reserved_ports: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        """`chains` are the plugin chains of this node's CNI configurations, if ADD is to refuse broken ones.

        `reserved_ports` are protocol and port of the host's own listeners.
        """
        self._cluster = cluster
        self._workloads = workloads or PlainWorkloads(cluster)
        self._lease = lease
        self._allocator = allocator
        self._publisher = publisher
        self._attachment_store = attachment_store
        self._executor = executor
        self._reconciler = reconciler
        self._mtu = mtu
        self._gateways_serve_dns = gateways_serve_dns
        self._chains = chains
        self._reserved_ports = reserved_ports
        # Runtimes may retry a DEL while an ADD is still running. Taken before the lock of the endpoint, never after.
        self._container_locks: KeyedLock[str] = KeyedLock()
        self.ready = asyncio.Event()

    async def serve(self, request: cni.Request) -> bytes:
        """The bytes to print for a request; a `CniError` or a `WeftError` when it fails.

        An ADD that is cancelled is undone before this returns.
        """
        match request:
            case cni.Version():
                return encode_versions(b"")
            case cni.Status():
                self._status()
            case cni.Gc():
                await self._gc(request)
            case cni.Add():
                try:
                    return await self.add(request)
                except (WeftError, CniError, asyncio.CancelledError) as error:
                    self._workloads.report_failure(request, error)
                    raise
            case cni.Check():
                # CHECK and DEL need nothing but records and kernel, so they do not wait for `ready`.
                async with self._container_locks[request.attachment.container]:
                    await self._check(request)
            case cni.Del():
                async with self._container_locks[request.attachment.container]:
                    attachment = self._attachment_store.find(request.attachment)
                    if attachment is not None:
                        await self.remove(attachment)
        return b""

    async def add(self, request: cni.Add) -> bytes:
        """Attach a container: reserve -> configure -> publish -> result."""
        if self._chains is not None and (fault := self._chains.fault(request.config.name)):
            raise CniError(Code.BAD_CONFIG, f"{fault}: remove that plugin from the CNI conflist")
        await self.ready.wait()
        async with self._container_locks[request.attachment.container]:
            container, interface = request.attachment
            attachment = self._attachment_store.find(request.attachment)
            if attachment is not None and attachment.stage is Stage.ATTACHED:
                raise CniError(Code.FAILED, f"{interface} of {container} is already attached")
            if attachment is not None:
                await self.remove(attachment)  # an ADD that was never answered, or a DEL that the store does not have
            if not request.netns:
                raise CniError(Code.BAD_ENVIRONMENT, "ADD needs CNI_NETNS")
            workload = await self._workloads.describe(request)
            config = await self._attach_or_undo(self._attach_request(request, workload))
        cni_result = plan_result(
            config,
            request.config.prev_result,
            dns=request.capabilities.dns,
            gateways_serve_dns=self._gateways_serve_dns,
        )
        return encode_result(cni_result, request.config.version)

    async def attach_host(self, network: model.Network) -> None:
        """Attach the host itself to an infra network (contiv 6.4); a host that is attached stays as it is."""
        endpoint = host_endpoint(network, self._lease.node)
        async with self._container_locks[endpoint.container_id]:
            attachment = self._attachment_store.get(endpoint.key)
            if attachment is not None and attachment.stage is Stage.ATTACHED:
                return
            if attachment is not None:
                await self.remove(attachment)
            await self._attach_or_undo(_AttachRequest(endpoint, HOST_NETNS, is_host=True))

    async def _attach_or_undo(self, request: _AttachRequest) -> EndpointConfig:
        """Attach an endpoint completely, or leave nothing of it behind, also when cancelled."""
        # A task of its own, which cancellation does not reach: a commit or a datapath transaction that is cut short has
        # an unknown outcome, and what is unknown cannot be undone.
        attaching = asyncio.ensure_future(self._attach(request))
        try:
            return await asyncio.shield(attaching)
        except BaseException:
            await asyncio.wait([attaching])
            attachment = self._attachment_store.get(request.endpoint.key)
            # Of another container, if that is why the request was refused.
            if attachment is not None and attachment.id == _id_of(request.endpoint):
                await asyncio.shield(self.remove(attachment))
            raise

    async def _attach(self, request: _AttachRequest) -> EndpointConfig:
        async with self._attachment_store.locks[request.endpoint.key]:
            endpoint = await self._allocator.reserve(request.endpoint)
            config = await self._configure(endpoint, request)
            self._publisher.publish_soon(endpoint.key)
            self._check_still_ours(endpoint.key)
            self._attachment_store.update(endpoint.key, stage=Stage.ATTACHED)
            return config

    async def _configure(self, endpoint: model.Endpoint, request: _AttachRequest) -> EndpointConfig:
        stored = self._cluster.get(kinds.NETWORK, *endpoint.network_key)
        if stored is None:
            raise Invalid(f"network {endpoint.network_key} was deleted just now")
        config = self._plan_config(endpoint, stored.value, request)
        check_host_ports_free(
            config.ports, self._attachment_store, endpoint=endpoint.key, reserved=self._reserved_ports
        )
        # The record goes before the kernel: a kill in between leaves a record to undo, never a port without one. It
        # also keeps the tenant's netns, which the reconciler would remove with the last endpoint in it.
        self._attachment_store.update(
            endpoint.key, stage=Stage.CONFIGURING, config=config, network_name=request.network_name
        )
        await self._reconciler.ensure_network(stored.value, endpoint.group)
        await self._plug(endpoint, config)
        return config

    async def _deconfigure(self, attachment: Attachment, config: EndpointConfig) -> None:
        self._attachment_store.update(attachment.key, stage=Stage.DELETING)
        changes = await self._reconciler.remove_endpoint(attachment.endpoint)
        try:
            await self._executor.call(lambda datapath: datapath.unplug(config, changes))
        except BaseException:
            self._reconciler.mark_dirty()  # an unknown part of the changes is installed
            raise
        self._reconciler.missing.port_removed(config.port)

    async def _plug(self, endpoint: model.Endpoint, config: EndpointConfig) -> None:
        """Plug the port; policy and the other entries of the endpoint are installed in the same transaction."""
        changes = await self._reconciler.add_endpoint(endpoint)
        try:
            await self._executor.plug(PlugRequest(config, changes))
        except BaseException:
            self._reconciler.mark_dirty()  # an unknown part of the changes is installed
            raise
        self._reconciler.missing.port_restored(config.port)

    def _check_still_ours(self, key: EndpointKey) -> None:
        """`Unavailable` when the endpoint was deleted from the store, or the offline limit passed, during the ADD.

        Evictions leave an ADD under way alone, so it looks here, at its end.
        """
        self._lease.check_may_allocate()
        attachment = self._attachment_store.get(key)
        if attachment is None or attachment.stage is Stage.DELETING or self._is_deleted_in_store(attachment):
            raise Unavailable(f"{key} was deleted from the store while it was being attached: try again")

    def _is_deleted_in_store(self, attachment: Attachment) -> bool:
        return attachment.published and self._cluster.get(kinds.ENDPOINT, *attachment.key) is None

    def _attach_request(self, request: cni.Add, workload: Workload) -> _AttachRequest:
        container, interface = request.attachment
        placement, arguments, capabilities = workload.placement, request.arguments, request.capabilities
        # No container id has an "@" (CNI): interface net1 of `web` is never the first interface of another container.
        name = container if interface == PRIMARY_INTERFACE else f"{container}@{interface}"
        requested = {address.version: str(address) for address in capabilities.addresses}
        endpoint = model.Endpoint(
            tenant=placement.tenant,
            network=placement.network,
            endpoint_id=check_endpoint_id(name, field="CNI_CONTAINERID"),
            group=placement.group,
            ip_address=requested.get(4, ""),
            ipv6_address=requested.get(6, ""),
            mac_address=capabilities.mac,
            host=self._lease.node,
            interface=interface,
            labels=dict(workload.labels),
            container_id=container,
            container_name=f"{arguments.pod_namespace}/{arguments.pod_name}" if arguments.pod_name else "",
            pod=workload.pod,
        )
        return _AttachRequest(
            endpoint,
            request.netns,
            network_name=request.config.name,
            ports=host_ports(capabilities.ports),
            rates=rate_limits(capabilities.bandwidth),
        )

    def _plan_config(self, endpoint: model.Endpoint, network: model.Network, request: _AttachRequest) -> EndpointConfig:
        is_additional = endpoint.interface != PRIMARY_INTERFACE and not request.is_host
        primary = cni.AttachmentId(endpoint.container_id, PRIMARY_INTERFACE)
        config = plan_config(
            endpoint,
            network,
            netns=request.netns,
            mtu=self._mtu,
            segment=segment_id_of(self._cluster, tags_of(self._cluster, network, endpoint.group)),
            primary=self._attachment_store.find(primary) if is_additional else None,
            ports=request.ports,
            rates=request.rates,
        )
        return host_config(config, network) if request.is_host else config

    async def remove(self, attachment: Attachment) -> None:
        """Remove an attachment from whatever stage; the undo of ADD.

        The addresses are released only when the port is gone: another endpoint may get them at once.
        """
        if attachment.config is not None:
            await self._deconfigure(attachment, attachment.config)
        await self._publisher.withdraw(attachment.key)

    def restore_lost_records(self) -> None:
        """After a start with a damaged log: write the records that are lost again, as far as the store knows them.

        The store does not know the pod's netns, host ports and rates: `recover` removes what is not plugged any more.
        """
        for endpoint in self._publisher.unrecorded():
            network = self._cluster.get(kinds.NETWORK, *endpoint.network_key)
            if network is None or any(
                ipam.subnet_of(network.value, each.family) is None for each in endpoint.addresses
            ):
                continue  # nothing that could be plugged
            is_host = endpoint.key == host_endpoint(network.value, self._lease.node).key
            request = _AttachRequest(endpoint, HOST_NETNS if is_host else "", is_host=is_host)
            config = self._plan_config(endpoint, network.value, request)
            log.warning("record lost, restored from the store", container=endpoint.container_id, endpoint=endpoint.key)
            self._attachment_store.put(
                Attachment(endpoint=endpoint, published=True, stage=Stage.ATTACHED, config=config)
            )
        self._publisher.may_delete_unrecorded = True

    async def recover(self, missing: Set[Port]) -> None:
        """After a start: undo ADDs that were never answered, finish DELs, and plug the ports that are missing."""
        for attachment in self._attachment_store:
            config = attachment.config
            if self._is_outdated(attachment, missing):
                self._attachment_store.update(attachment.key, stage=Stage.ATTACHED)
            elif attachment.stage is not Stage.ATTACHED or config is None:
                await self.remove(attachment)
            elif config.port in missing:
                try:
                    await self._replug(attachment.endpoint, config)
                except WeftError as error:
                    _log_abandoned(attachment.endpoint, error)
                    await self.remove(attachment)

    def _is_outdated(self, attachment: Attachment, missing: Set[Port]) -> bool:
        """Whether the line that says that the ADD was answered may be lost. Else a DEL follows a failed ADD anyway."""
        if not self._attachment_store.is_damaged or attachment.config is None:
            return False
        return attachment.stage is Stage.CONFIGURING and attachment.config.port not in missing

    async def replug_missing(self) -> bool:
        """Plug the ports again that somebody else has removed; whether none is left that may be tried again.

        Those that cannot be plugged, because their namespace is gone or the name is taken, are left to DEL and GC.
        """
        missing = self._reconciler.missing
        for attachment in self._attachment_store:
            config = attachment.config
            if config is None or config.port not in missing:
                continue
            async with self._container_locks[attachment.endpoint.container_id]:
                # Looked up again: a DEL or an ADD may have held the lock.
                current = self._attachment_store.get(attachment.key)
                is_attached = current is not None and current.stage is Stage.ATTACHED and current.config == config
                if is_attached and config.port in missing:
                    await self._replug_or_abandon(attachment.endpoint, config)
        return not missing

    async def _replug_or_abandon(self, endpoint: model.Endpoint, config: EndpointConfig) -> None:
        try:
            await self._replug(endpoint, config)
        except DatapathFault as fault:
            log.warning("replug failed, retrying", container=endpoint.container_id, reason=fault.message)
            with suppress(DatapathFault):  # the next try needs a clean slate; it finds out if this failed too
                await self._executor.call(lambda datapath: datapath.unplug(config))
        except WeftError as error:
            _log_abandoned(endpoint, error)
            self._reconciler.missing.abandon_port(config.port)

    async def _replug(self, endpoint: model.Endpoint, config: EndpointConfig) -> None:
        log.warning("port missing, plugging again", container=endpoint.container_id, interface=config.interface)
        await self._plug(endpoint, config)

    async def evict(self) -> None:
        """Remove the attachments whose endpoint was deleted from the store, by an operator or by node GC.

        `DatapathFault` when some could not be removed; the others are.
        """
        faults: list[str] = []
        for attachment in self._attachment_store:
            # Without a configuration there is nothing in the datapath: the publisher finishes the deletion.
            if attachment.stage is Stage.DELETING and attachment.config is not None:
                async with self._container_locks[attachment.endpoint.container_id]:
                    try:
                        if self._attachment_store.get(attachment.key) == attachment:  # else a DEL was faster
                            await self.remove(attachment)
                            self._reconciler.resync()  # it may have been the tenant's last endpoint on this node
                    except DatapathFault as fault:
                        faults.append(f"{attachment.endpoint.container_id}: {fault.message}")
        if faults:
            raise DatapathFault("; ".join(faults))

    async def reclaim(self, endpoint_id: str) -> EndpointKey:
        """Remove an attachment of this node as DEL would, on an operator's request; `NotFound` when there is none.

        `Conflict` when several networks have an endpoint of this id: the whole key tells them apart.
        """
        named = [
            attachment
            for attachment in self._attachment_store
            if endpoint_id in (attachment.endpoint.endpoint_id, str(attachment.key))
        ]
        if not named:
            raise NotFound(f"endpoint {endpoint_id[:200]!r} is not on this node")
        if len(named) > 1:
            keys = ", ".join(sorted(str(attachment.key) for attachment in named))
            raise Conflict(f"several endpoints are called {endpoint_id[:200]!r}: name one of {keys}")
        (found,) = named
        async with self._container_locks[found.endpoint.container_id]:
            if (attachment := self._attachment_store.get(found.key)) is not None:
                await self.remove(attachment)
        return found.key

    async def _check(self, request: cni.Check) -> None:
        attachment = self._attachment_store.find(request.attachment)
        if attachment is None or attachment.stage is not Stage.ATTACHED or attachment.config is None:
            raise CniError(Code.UNKNOWN_CONTAINER, f"{request.attachment.container} is not attached")
        config = attachment.config
        differences = check_result(config, request)
        differences += await self._executor.call(lambda datapath: datapath.check(config))
        if differences:
            raise CniError(Code.FAILED, "interface configuration differs from ADD", details="; ".join(differences))

    async def _gc(self, request: cni.Gc) -> None:
        """Remove exactly what is not listed; without a list, nothing. All failures are reported at once (C-098)."""
        if request.valid is None:
            return
        failures: list[str] = []
        for attachment in self._attachment_store:
            if attachment.network_name == request.config.name and attachment.id not in request.valid:
                container = attachment.endpoint.container_id
                async with self._container_locks[container]:
                    try:
                        current = self._attachment_store.get(attachment.key)
                        # Compared by identity: a DEL and an ADD while this waited made a newer attachment, which stays.
                        if current is not None and current.endpoint is attachment.endpoint:
                            await self.remove(current)
                    except WeftError as error:
                        failures.append(f"{container}: {error.message}")
        if failures:
            raise CniError(Code.FAILED, f"{len(failures)} attachments are still there", details="; ".join(failures))

    def _status(self) -> None:
        """50 while only ADD cannot be served, 51 where attached containers may be affected too (C-090, C-091)."""
        if not self.ready.is_set():
            raise CniError(Code.UNAVAILABLE, "the agent is restoring this node")
        if not self._lease.may_allocate:
            raise CniError(
                Code.UNAVAILABLE_AND_LIMITED,
                "store unreachable longer than --offline-limit",
                details="node GC may free the addresses of this node",
            )
        if self._reconciler.fault:
            raise CniError(Code.UNAVAILABLE_AND_LIMITED, "datapath out of sync", details=self._reconciler.fault)


def _id_of(endpoint: model.Endpoint) -> cni.AttachmentId:
    return cni.AttachmentId(endpoint.container_id, endpoint.interface)


def _log_abandoned(endpoint: model.Endpoint, error: WeftError) -> None:
    log.warning("replug abandoned", container=endpoint.container_id, reason=error.message)
