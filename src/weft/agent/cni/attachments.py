"""The use cases of CNI: attach a workload, take it off, check it, collect what is left over, say how we are.

ADD: who is this -> addresses -> written down -> wired -> answered. Whatever fails on the way is undone by the same road
that DEL takes. One attachment at a time per container.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network

import msgspec

from weft.agent.cni.port_mappings import published_ports, refuse_taken_ports, wished_rates
from weft.agent.cni.workload_identity import PlainWorkloads, Workload, Workloads
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.infra_networks import HOST_NETNS, host_endpoint, host_wiring
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Handle, Stage
from weft.agent.store.node_ipam import Meanwhile, NodeIpam
from weft.cni import request as cni
from weft.cni import result
from weft.cni.errors import CniError, Code
from weft.cni.result import encode_result
from weft.cni.versions import encode_versions
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.segments import segment_number, tags_of
from weft.domain.desired.state import port_of
from weft.domain.errors import DatapathFault, Invalid, NotFound, Unavailable, WeftError
from weft.domain.ids import EndpointKey, check_endpoint_id
from weft.domain.ipam import ipam
from weft.ports.datapath import EndpointConfig, InterfaceAddress, PlugRequest
from weft.runtime.keyed_lock import KeyedLock
from weft.runtime.logs import Log

log = Log("attach")

USUAL_INTERFACE = "eth0"

_ADDRESS: Mapping[int, Callable[[int], result.IPAddress]] = {4: IPv4Address, 6: IPv6Address}
_INTERFACE: Mapping[int, Callable[[tuple[int, int]], result.IPInterface]] = {4: IPv4Interface, 6: IPv6Interface}
_EVERYTHING: Mapping[int, result.IPNetwork] = {4: IPv4Network("0.0.0.0/0"), 6: IPv6Network("::/0")}


class Attachments:
    """What the CNI server calls. `ready` opens when the node has been restored."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        holdings: NodeIpam,
        journal: AttachmentStore,
        kernel: DatapathExecutor,
        reconciler: Reconciler,
        mtu: int,
        names: bool = False,
        workloads: Workloads | None = None,
    ) -> None:
        self._cluster = cluster
        self._workloads = workloads or PlainWorkloads(cluster)
        self._holdings = holdings
        self._journal = journal
        self._kernel = kernel
        self._reconciler = reconciler
        self._mtu = mtu
        self._names = names
        self._turns: KeyedLock[str] = KeyedLock()
        self.ready = asyncio.Event()

    async def serve(self, request: cni.Request) -> bytes:
        """What to print for a request; a `CniError` or one of our own errors when it cannot be done.

        An ADD that is cancelled is undone before this returns.
        """
        match request:
            case cni.Version():
                return encode_versions(b"")
            case cni.Status():
                return self._status()
            case cni.Gc():
                await self._collect(request)
            case cni.Add() | cni.Check() | cni.Del():
                if isinstance(request, cni.Add):
                    await self.ready.wait()  # the others need nothing but the ledger and the kernel
                async with self._turns[request.attachment.container]:
                    return await self._one(request)
        return b""

    async def _one(self, request: cni.Add | cni.Check | cni.Del) -> bytes:
        match request:
            case cni.Add():
                return await self._add(request)
            case cni.Check():
                await self._check(request)
            case cni.Del():
                note = self._journal.find(Handle(*request.attachment))
                if note is not None:
                    await self.remove(note)
        return b""

    async def _add(self, request: cni.Add) -> bytes:
        handle = Handle(*request.attachment)
        note = self._journal.find(handle)
        if note is not None and note.stage is Stage.ATTACHED:
            raise CniError(Code.FAILED, f"{handle.interface} of {handle.container} is attached already")
        if note is not None:
            await self.remove(note)  # an ADD that was never answered, or a DEL that the store does not know of yet
        if not request.netns:
            raise CniError(Code.BAD_ENVIRONMENT, "ADD needs CNI_NETNS")
        wanted = self._wanted(request, await self._workloads.describe(request))
        wiring = await self._attach(wanted, partial(self._wire, request))
        told = result_of(wiring, request.config.prev_result, dns=request.wishes.dns, names=self._names)
        return encode_result(told, request.config.version)

    async def join(self, network: model.Network) -> None:
        """Attach the host itself to an infra network (contiv 6.4); one that is attached stays as it is."""
        wanted = host_endpoint(network, self._holdings.node)
        async with self._turns[wanted.container_id]:
            note = self._journal.get(wanted.key)
            if note is not None and note.stage is Stage.ATTACHED:
                return
            if note is not None:
                await self.remove(note)
            await self._attach(wanted, self._wire_host)

    async def _attach(self, wanted: model.Endpoint, wire: Meanwhile) -> EndpointConfig:
        """Give an endpoint addresses and wire it; what fails, or is cancelled, is undone."""
        attaching = asyncio.ensure_future(self._holdings.attach(wanted, meanwhile=wire))
        try:
            return self._attached((await asyncio.shield(attaching)).key)
        except BaseException:
            await asyncio.wait([attaching])  # nobody knows what became of a commit that is cut short
            note = self._journal.get(wanted.key)
            if note is not None:
                await asyncio.shield(self.remove(note))
            raise

    def _attached(self, key: EndpointKey) -> EndpointConfig:
        """Note that an ADD has come to its end; `Unavailable` when the store has taken the endpoint back meanwhile."""
        note = self._journal.get(key)
        if note is None or note.wiring is None or note.stage is Stage.LEAVING or self._is_taken_back(note):
            raise Unavailable(f"{key} was taken back while it was being attached: try again")
        self._journal.change(key, stage=Stage.ATTACHED)
        return note.wiring

    def _is_taken_back(self, note: Attachment) -> bool:
        return note.published and self._cluster.get(kinds.ENDPOINT, *note.key) is None

    def _wanted(self, request: cni.Add, workload: Workload) -> model.Endpoint:
        container, interface = request.attachment
        placed = workload.placement
        name = container if interface == USUAL_INTERFACE else f"{container}-{interface}"
        asked = {address.version: str(address) for address in request.wishes.addresses}
        arguments = request.arguments
        return model.Endpoint(
            tenant=placed.tenant,
            network=placed.network,
            endpoint_id=check_endpoint_id(name, field="CNI_CONTAINERID"),
            group=placed.group,
            ip_address=asked.get(4, ""),
            ipv6_address=asked.get(6, ""),
            mac_address=request.wishes.mac,
            host=self._holdings.node,
            interface=interface,
            labels=dict(workload.labels),
            container_id=container,
            container_name=f"{arguments.pod_namespace}/{arguments.pod_name}" if arguments.pod_name else "",
            pod=workload.pod,
        )

    async def _wire(self, request: cni.Add, endpoint: model.Endpoint) -> None:
        network = self._network_of(endpoint)
        container, interface = request.attachment
        beside = self._journal.find(Handle(container, USUAL_INTERFACE)) if interface != USUAL_INTERFACE else None
        segment = segment_number(self._cluster, tags_of(self._cluster, network, endpoint.group))
        wiring = wiring_of(endpoint, network, netns=request.netns, mtu=self._mtu, segment=segment, beside=beside)
        wiring = msgspec.structs.replace(
            wiring, ports=published_ports(request.wishes.ports), rates=wished_rates(request.wishes.bandwidth)
        )
        refuse_taken_ports(wiring.ports, self._journal, but=endpoint.key)
        await self._wire_as(wiring, endpoint, network, name=request.config.name)

    async def _wire_host(self, endpoint: model.Endpoint) -> None:
        network = self._network_of(endpoint)
        segment = segment_number(self._cluster, tags_of(self._cluster, network, endpoint.group))
        wiring = wiring_of(endpoint, network, netns=HOST_NETNS, mtu=self._mtu, segment=segment)
        await self._wire_as(host_wiring(wiring, network), endpoint, network)

    async def _wire_as(
        self, wiring: EndpointConfig, endpoint: model.Endpoint, network: model.Network, *, name: str = ""
    ) -> None:
        self._journal.change(endpoint.key, stage=Stage.WIRING, wiring=wiring, network_name=name)
        await self._reconciler.ensure_network(network, endpoint.group)
        await self.plug(endpoint, wiring)

    def _network_of(self, endpoint: model.Endpoint) -> model.Network:
        stored = self._cluster.get(kinds.NETWORK, *endpoint.network_key)
        if stored is None:
            raise Invalid(f"network {endpoint.network_key} was deleted just now")
        return stored.value

    async def plug(self, endpoint: model.Endpoint, wiring: EndpointConfig) -> None:
        """Wire a workload for which there is room; what concerns its port comes into force with it."""
        policy = self._reconciler.add_endpoint(endpoint)
        try:
            await self._kernel.plug(PlugRequest(wiring, policy))
        except BaseException:
            self._reconciler.mark_dirty()  # nobody knows how much of the policy is in force
            raise
        self._reconciler.found(wiring.port)

    async def plug_again(self) -> bool:
        """Wire workloads anew whose interfaces others have taken away; whether none is left that may be tried again.

        Those that cannot be had, because their namespace is gone or the name is taken, are left to DEL and GC.
        """
        for note in self._journal:
            wiring = note.wiring
            if wiring is None or wiring.port not in self._reconciler.missing:
                continue
            async with self._turns[note.handle.container]:
                now = self._journal.get(note.key)
                is_attached = now is not None and now.stage is Stage.ATTACHED and now.wiring == wiring
                if is_attached and wiring.port in self._reconciler.missing:
                    await self._plug_lost(note.endpoint, wiring)
        return not self._reconciler.missing

    async def _plug_lost(self, endpoint: model.Endpoint, wiring: EndpointConfig) -> None:
        log.warning("attachment lost its interface", container=endpoint.container_id)
        try:
            await self.plug(endpoint, wiring)
        except DatapathFault as fault:
            log.warning("attachment not wired again yet", container=endpoint.container_id, reason=fault.message)
            with suppress(DatapathFault):  # it is tried again, and nothing half-made is to stand in the way
                await self._kernel.call(lambda datapath: datapath.unplug(wiring))
        except WeftError as error:
            log.warning("attachment given up", container=endpoint.container_id, reason=error.message)
            self._reconciler.abandon_port(wiring.port)

    async def remove(self, note: Attachment) -> None:
        """Take an attachment off, from whatever stage: first the kernel's part, then the addresses."""
        wiring = note.wiring
        if wiring is not None:
            self._journal.change(note.key, stage=Stage.LEAVING)
            policy = self._reconciler.dismiss(note.endpoint)
            try:
                await self._kernel.call(lambda datapath: datapath.unplug(wiring, policy))
            except BaseException:
                self._reconciler.mark_dirty()
                raise
            self._reconciler.forget(wiring.port)
        await self._holdings.detach(note.key)

    async def evict(self) -> None:
        """Take off what the store has taken back, at an operator's word or the collector's: it must not speak on.

        `DatapathFault` when some could not be taken off; the others are.
        """
        faults: list[str] = []
        for note in self._journal:
            if note.stage is Stage.LEAVING and note.wiring is not None:
                async with self._turns[note.handle.container]:
                    try:
                        if self._journal.get(note.key) == note:  # no DEL came in between
                            await self.remove(note)
                            self._reconciler.resync()  # it may have been its tenant's last one
                    except DatapathFault as fault:
                        faults.append(f"{note.handle.container}: {fault.message}")
        if faults:
            raise DatapathFault("; ".join(faults))

    async def reclaim(self, endpoint_id: str) -> EndpointKey:
        """Take off an attachment of this node at an operator's word, as DEL would; `NotFound` when there is none."""
        found = next(
            (note for note in self._journal if endpoint_id in (note.endpoint.endpoint_id, str(note.key))), None
        )
        if found is None:
            raise NotFound(f"endpoint {endpoint_id[:200]!r} is not on this node")
        async with self._turns[found.handle.container]:
            if (note := self._journal.get(found.key)) is not None:
                await self.remove(note)
        return found.key

    async def _check(self, request: cni.Check) -> None:
        note = self._journal.find(Handle(*request.attachment))
        if note is None or note.stage is not Stage.ATTACHED or note.wiring is None:
            raise CniError(Code.UNKNOWN_CONTAINER, f"{request.attachment.container} is not attached")
        wiring = note.wiring
        differences = check_result(wiring, request)
        differences += await self._kernel.call(lambda datapath: datapath.check(wiring))
        if differences:
            raise CniError(Code.FAILED, "the attachment is not as it was made", details="; ".join(differences))

    async def _collect(self, request: cni.Gc) -> None:
        """Remove exactly what is not listed; no list, nothing. All failures are told at once (C-098)."""
        if request.valid is None:
            return
        valid = {Handle(*each) for each in request.valid}
        failures: list[str] = []
        for note in self._journal:
            if note.network_name == request.config.name and note.handle not in valid:
                async with self._turns[note.handle.container]:
                    try:
                        now = self._journal.get(note.key)
                        if now is not None and now.endpoint is note.endpoint:  # no DEL or ADD came in between
                            await self.remove(now)
                    except WeftError as error:
                        failures.append(f"{note.handle.container}: {error.message}")
        if failures:
            raise CniError(Code.FAILED, f"{len(failures)} attachments are still there", details="; ".join(failures))

    def _status(self) -> bytes:
        if not self.ready.is_set():
            raise CniError(Code.UNAVAILABLE, "the agent is restoring this node")
        if not self._holdings.may_allocate:
            raise CniError(
                Code.UNAVAILABLE_AND_LIMITED,
                "this node has been cut off from the store for too long",
                details="its addresses may be taken back",
            )
        if self._reconciler.fault:
            raise CniError(
                Code.UNAVAILABLE_AND_LIMITED, "the datapath does not follow the cluster", details=self._reconciler.fault
            )
        return b""


def wiring_of(
    endpoint: model.Endpoint,
    network: model.Network,
    *,
    netns: str,
    mtu: int,
    segment: int = 0,
    beside: Attachment | None = None,
) -> EndpointConfig:
    """How an endpoint is wired: each address with its subnet's length and gateway. `beside` has the way out already."""
    wired = []
    for address in endpoint.addresses:
        subnet = ipam.subnet_of(network, address.family)
        assert subnet is not None
        wired.append(InterfaceAddress(address, subnet.length, ipam.gateway_of(network, address.family)))
    return EndpointConfig(
        port=port_of(endpoint, segment=segment),
        netns=netns,
        interface=endpoint.interface,
        addresses=tuple(wired),
        mtu=mtu,
        default_route=beside is None,
        shares_subnets=beside is not None and beside.endpoint.network_key == endpoint.network_key,
        endpoint=endpoint.endpoint_id,
        workload=(endpoint.pod.uid if endpoint.pod else "") or endpoint.container_id,
    )


def result_of(
    wiring: EndpointConfig, before: result.Result | None, *, dns: result.Dns | None = None, names: bool = False
) -> result.Result:
    """What the runtime is told: the host end and the workload's interface, addresses and routes.

    Names are resolved as was asked for, else as the plugins before us said, else by the gateways, where `names` are
    told. Who has no gateway keeps the resolvers of its runtime.
    """
    earlier = before or result.Result()
    if dns is None and names and earlier.dns == result.Dns():
        dns = result.Dns(nameservers=tuple(str(each.gateway) for each in wiring.addresses if each.gateway))
    index = len(earlier.interfaces) + 1
    return result.Result(
        interfaces=(
            *earlier.interfaces,
            result.Interface(name=wiring.port.interface, mac=""),
            result.Interface(name=wiring.interface, mac=wiring.port.mac, sandbox=wiring.netns, mtu=wiring.mtu),
        ),
        addresses=(
            *earlier.addresses,
            *(
                result.Address(
                    address=_interface(wired),
                    gateway=_gateway(wired),
                    interface=index,
                )
                for wired in wiring.addresses
            ),
        ),
        routes=(
            *earlier.routes,
            *(
                result.Route(
                    target=_EVERYTHING[wired.address.family] if wiring.default_route else _interface(wired).network,
                    gateway=_gateway(wired),
                )
                for wired in wiring.addresses
                if not wiring.shares_subnets
            ),
        ),
        dns=earlier.dns if dns is None else dns,
    )


def _interface(wired: InterfaceAddress) -> result.IPInterface:
    return _INTERFACE[wired.address.family]((wired.address.number, wired.length))


def _gateway(wired: InterfaceAddress) -> result.IPAddress | None:
    return _ADDRESS[wired.gateway.family](wired.gateway.number) if wired.gateway else None


def check_result(wiring: EndpointConfig, request: cni.Check) -> list[str]:
    """What the runtime's memory of ADD says otherwise than ours (C-082, C-083, C-087)."""
    differences = []
    if request.netns != wiring.netns:
        differences.append(f"the namespace is {request.netns}, attached was {wiring.netns}")
    for listed in request.prev_result.interfaces:
        if listed.name == wiring.interface and listed.sandbox:
            if listed.sandbox != request.netns:
                differences.append(f"prevResult has {listed.name} in {listed.sandbox}, not in {request.netns}")
            if listed.mac and listed.mac.lower() != wiring.port.mac:
                differences.append(f"prevResult has {listed.name} with MAC {listed.mac}, not {wiring.port.mac}")
    theirs = {str(each.address.ip) for each in request.prev_result.addresses}
    differences += [
        f"address {wired.address} is not in prevResult"
        for wired in wiring.addresses
        if str(wired.address) not in theirs
    ]
    return differences
