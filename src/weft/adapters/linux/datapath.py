"""The Datapath on the plain Linux kernel (ADR 6): a namespace per tenant, veth, vxlan, bridges, nftables."""

from __future__ import annotations

import errno
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.adapters.linux.drop_reader import read_drops, tell_tallies
from weft.adapters.netns import pod_netns
from weft.adapters.netns.diagnostics import survey_space
from weft.adapters.netns.host.network import HostNetwork
from weft.adapters.netns.host.ruleset import HostSurroundings
from weft.adapters.netns.kernel_state import PORT_MAC, REAPED_GROUP
from weft.adapters.netns.nft.service_maps import read_uses
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.adapters.netns.tools import KernelTools
from weft.domain.addresses import Address, Subnet
from weft.domain.desired.diff import Difference, in_turn
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, QosProfile, StateItem, TenantNetns
from weft.domain.errors import Conflict, DatapathFault, NotFound, Unavailable, WeftError
from weft.domain.host_access.state import HostLink
from weft.domain.ids import TenantName
from weft.kernel.mtu import workload_mtu
from weft.kernel.netlink.link import Device, alter_link, create_veth, delete_group, gone_is_fine, read_link
from weft.kernel.netlink.socket import ROUTE, NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.ports.datapath import (
    NO_CHANGE,
    DriftReport,
    Drop,
    EndpointConfig,
    PartialResult,
    PlugRequest,
    Question,
    ServiceFlowStats,
    SpaceSurvey,
    VerdictCounters,
    one_by_one,
)

_LEAVING_PREFIX = "wgone"
_FIRST_INDEX = 1 << 16
_DEVICES = (TenantNetns, Overlay, Port)


class LinuxDatapath(KernelTools):
    """See `weft.ports.datapath`. `directory` is where tenants' namespaces are pinned; `vtep` is our end of tunnels."""

    def __init__(
        self,
        *,
        directory: Path,
        vtep: Address,
        vxlan_port: int,
        unmasked: Sequence[Subnet] = (),
        node_port_subnets: Sequence[Subnet] = (),
    ) -> None:
        self._directory = NamespaceDirectory(directory)
        self._vtep = vtep
        self._vxlan_port = vxlan_port
        self._surroundings = HostSurroundings(vtep, vxlan_port, (*unmasked,), (*node_port_subnets,))
        self._spaces: dict[TenantName, TenantNetnsDriver] = {}
        self._reapable: set[TenantName] = set()
        self._indexes = itertools.count(_FIRST_INDEX)

    def __enter__(self) -> Self:
        self._directory.prepare()
        self._underlay_namespace = Namespace.current()
        self._underlay = NetlinkSocket(ROUTE, namespace=self._underlay_namespace)
        self._host = HostNetwork(self._underlay_namespace, self._underlay, self._surroundings)
        self._mtu = workload_mtu(self._underlay, self._vtep)
        for tenant in self._directory.names():
            self._open_space(TenantName(tenant))
        # Numbers that stand are given again in no space: by them `unplug` knows a workload's end from a newcomer's.
        standing = [index for space in self._spaces.values() for index in space.indexes.values()]
        above = max(standing, default=0) + 1
        self._indexes = itertools.count(max(_FIRST_INDEX, above + above % 2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in self._spaces.values():
            space.close()
        self._host.close()
        self._underlay.close()
        self._underlay_namespace.close()

    @property
    def mtu(self) -> int:
        return self._mtu

    def converge(self, wanted: Set[StateItem]) -> DriftReport:
        repaired: list[str] = []
        missing: set[Port] = set()
        by_tenant: defaultdict[TenantName, set[StateItem]] = defaultdict(set)
        for part in wanted:
            by_tenant[part.tenant].add(part)
        for name in self._directory.names() - by_tenant.keys():
            repaired.append(f"removed the space of tenant {name}")
            self._drop_space(TenantName(name))
        for tenant, parts in by_tenant.items():
            space = self._open_space(tenant)
            told = [each for part in parts if isinstance(part, Segment) for each in self._put_segment(space, part)]
            overlays = [part for part in parts if isinstance(part, Overlay)]
            for overlay in overlays:
                self._put_overlay(space, overlay)
            made = [part for part in parts if isinstance(part, HostLink) and self._put_host_link(space, part)]
            found, absent = space.converge(parts, overlays)
            repaired += [f"tenant {tenant}: {each}" for each in (*told, *(f"made {link}" for link in made), *found)]
            missing |= absent
            self._reapable.add(tenant)
        repaired += self._host.converge(wanted)
        self.reap()
        return DriftReport(repaired=tuple(repaired), missing=frozenset(missing))

    def apply(self, difference: Difference[StateItem]) -> None:
        for part in difference.put:
            if isinstance(part, TenantNetns):
                self._open_space(part.tenant)
            elif isinstance(part, Segment):
                self._put_segment(self._spaces[part.tenant], part)
            elif isinstance(part, Overlay):
                self._put_overlay(self._spaces[part.tenant], part)
            elif isinstance(part, HostLink):
                self._put_host_link(self._spaces[part.tenant], part)
        put, drop = _by_tenant(difference.put), _by_tenant(difference.drop)
        for tenant in put.keys() | (drop.keys() & self._spaces.keys()):
            self._spaces[tenant].change(drop=drop.get(tenant, ()), put=put.get(tenant, ()))
        self._host.change(drop=difference.drop, put=difference.put)
        self._reapable |= {part.tenant for part in (*difference.put, *difference.drop) if isinstance(part, QosProfile)}
        joined = {part.tenant for part in difference.put if isinstance(part, HostLink)}
        for part in difference.drop:
            if isinstance(part, Overlay) and part.tenant in self._spaces:
                self._spaces[part.tenant].drop_overlay(part)
            elif isinstance(part, Segment) and part.tenant in self._spaces:
                self._spaces[part.tenant].drop_segment(part)
            elif isinstance(part, HostLink) and part.tenant not in joined:
                self._host.drop_link(part.tenant)
            elif isinstance(part, TenantNetns):
                self._drop_space(part.tenant)

    def plug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        self._wire(wiring)
        self._admit([PlugRequest(wiring, policy)])

    def plug_together(self, pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """One transaction lets all of them speak who could be wired."""
        faults = [*one_by_one(lambda each: self._wire(each.wiring), pluggings)]
        wired = [each for each, fault in zip(pluggings, faults, strict=True) if fault is None]
        try:
            self._admit(wired)
            refusals: Iterator[WeftError | None] = itertools.repeat(None)
        except WeftError:  # one of them is to blame, and the others need not suffer for it
            refusals = one_by_one(lambda each: self._admit([each]), wired)
        yield from (fault or next(refusals) for fault in faults)

    def _wire(self, wiring: EndpointConfig) -> None:
        """All that a workload needs, but for the right to speak."""
        space = self._spaces[wiring.port.tenant]
        with pod_netns.inside(wiring, home=self._underlay_namespace) as (namespace, inside):
            there = self._make_pair(space, wiring, namespace=namespace, inside=inside)
            pod_netns.configure_pod(wiring, there, namespace=namespace, inside=inside)
            space.activate_link(wiring.port, there - 1)

    def _admit(self, pluggings: Sequence[PlugRequest]) -> None:
        """Let wired workloads speak, each tenant's in one transaction."""
        for tenant in {each.wiring.port.tenant for each in pluggings}:
            own = [each for each in pluggings if each.wiring.port.tenant == tenant]
            policy = in_turn(each.policy for each in own)
            self._spaces[tenant].add_endpoint([each.wiring.port for each in own], policy)
            self._host.change(drop=policy.drop, put=policy.put)

    def _make_pair(
        self, space: TenantNetnsDriver, wiring: EndpointConfig, *, namespace: Namespace, inside: NetlinkSocket
    ) -> int:
        """A veth pair and all that belongs on its host end, in one datagram; the index of the workload's end.

        We choose the indexes, so nothing has to be read back. That of the workload's end follows that of the host end.
        """
        port = wiring.port
        while True:
            here, there = next(self._indexes), next(self._indexes)
            if here in space.indexes.values():
                continue
            end = Device(name=port.interface, index=here, mac=PORT_MAC, mtu=wiring.mtu)
            peer = Device(name=wiring.interface, index=there, mac=port.mac, mtu=wiring.mtu)
            try:
                space.netlink.send_batch(
                    [create_veth(end, peer, peer_namespace=namespace.fd), *space.port_requests(port, here)]
                )
            except NetlinkError as refusal:
                if refusal.position > 0 or refusal.errno not in {errno.EBUSY, errno.EEXIST}:
                    raise
                if port.tenant in self._reapable:
                    self.reap()  # the name may be that of one which has just left
                else:
                    _refuse_taken_names(space, wiring, inside)
            else:
                space.note_port(port, here)
                return there

    def unplug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        tenant = wiring.port.tenant
        space = self._spaces.get(tenant)
        if space is None:
            return
        self._host.change(drop=policy.drop, put=policy.put)
        space.dismiss(wiring.port, policy)
        here = space.indexes.pop(wiring.port.interface, 0)
        space.unshape(wiring.port)
        if here:
            self._free_name(wiring, here + 1)
            # Nothing goes through it any more. To take it down or to rename it would wait for the kernel for nothing.
            with gone_is_fine():
                space.netlink.send_batch([alter_link(here, group=REAPED_GROUP)])
        self._reapable.add(tenant)

    def _free_name(self, wiring: EndpointConfig, there: int) -> None:
        """The workload's end is down and under another name, so that the next ADD in its namespace works at once."""
        if not wiring.netns:
            return
        name = f"{_LEAVING_PREFIX}{next(self._indexes)}"
        with suppress(NotFound), pod_netns.inside(wiring, home=self._underlay_namespace) as (_, inside), gone_is_fine():
            inside.send_batch(
                [*pod_netns.deconfigure_pod(wiring, there), alter_link(there, up=False), alter_link(there, name=name)]
            )

    def check(self, wiring: EndpointConfig) -> list[str]:
        space = self._spaces.get(wiring.port.tenant)
        if space is None:
            return [f"the space of tenant {wiring.port.tenant} is missing"]
        found = space.differences(wiring.port)
        try:
            with pod_netns.inside(wiring, home=self._underlay_namespace) as (_, inside):
                found += pod_netns.differences(wiring, inside)
        except NotFound as error:
            found.append(error.message)
        return found

    def drops(self) -> list[Drop]:
        found: list[Drop] = []
        faults: list[str] = []
        for tenant, space in self._spaces.items():
            try:
                found += read_drops(tenant, space)
            except DatapathFault as error:
                faults.append(f"tenant {tenant}: {error.message}")
        found.sort(key=lambda drop: drop.at)
        if faults:
            raise PartialResult("; ".join(faults), found)
        return found

    def trace(self, question: Question) -> str | Drop:
        name = question.port.interface
        raise Unavailable(f"the kernel does not say what it would do with a packet from {name}: send one with --packet")

    def counters(self) -> list[VerdictCounters]:
        return [tell_tallies(tenant, self._spaces[tenant]) for tenant in sorted(self._spaces)]

    def service_uses(self) -> list[ServiceFlowStats]:
        return [use for tenant in sorted(self._spaces) for use in read_uses(tenant, self._spaces[tenant].netfilter)]

    def settle(self) -> None:
        """See `weft.ports.datapath`: the kernel asks its rules for every packet."""

    def has_drifted(self, *, is_current: bool = True) -> bool:  # noqa: ARG002 (nothing is lost altogether)
        return self._host.is_disturbed() or any(space.table.is_disturbed() for space in self._spaces.values())

    def survey(self) -> list[SpaceSurvey]:
        return [survey_space(tenant, self._spaces[tenant]) for tenant in sorted(self._spaces)]

    def reap(self) -> None:
        for tenant in list(self._reapable):
            if space := self._spaces.get(tenant):
                space.netlink.send_batch([delete_group(REAPED_GROUP)])
            self._reapable.discard(tenant)
        for space in self._spaces.values():
            space.forget_left()

    def withdraw(self) -> list[str]:
        return [*self.converge(frozenset()).repaired]

    def _open_space(self, tenant: TenantName) -> TenantNetnsDriver:
        if tenant not in self._spaces:
            space = TenantNetnsDriver(self._directory.create(tenant))
            space.prepare()
            self._spaces[tenant] = space
            with suppress(NetlinkError):  # which `drops` tells
                space.open_drop_log()  # before the first packet, which nobody could explain otherwise
        return self._spaces[tenant]

    def _drop_space(self, tenant: TenantName) -> None:
        if space := self._spaces.pop(tenant, None):
            space.close()
        self._directory.delete(tenant)

    def _put_host_link(self, space: TenantNetnsDriver, link: HostLink) -> bool:
        return self._host.put_link(link, space, mtu=self._mtu)

    def _put_segment(self, space: TenantNetnsDriver, segment: Segment) -> list[str]:
        return space.put_segment(segment, mtu=self._mtu)

    def _put_overlay(self, space: TenantNetnsDriver, overlay: Overlay) -> None:
        space.put_overlay(overlay, self._underlay, vtep=self._vtep, port=self._vxlan_port, mtu=self._mtu)


def _refuse_taken_names(space: TenantNetnsDriver, wiring: EndpointConfig, inside: NetlinkSocket) -> None:
    """`Conflict` when one of the two names is taken; else it was an index."""
    if read_link(inside, wiring.interface) is not None:
        raise Conflict(f"interface {wiring.interface} is in {wiring.netns} already", field="CNI_IFNAME")
    if read_link(space.netlink, wiring.port.interface) is not None:
        raise Conflict(f"the host end {wiring.port.interface} is there already")


def _by_tenant(parts: tuple[StateItem, ...]) -> dict[TenantName, list[StateItem]]:
    """The parts that are more than devices, by tenant. Ports come and go by plugging."""
    found: defaultdict[TenantName, list[StateItem]] = defaultdict(list)
    for part in parts:
        if not isinstance(part, _DEVICES):
            found[part.tenant].append(part)
    return found
