"""The Datapath on the plain Linux kernel, routing mode (design 6): a namespace per tenant, veth, vxlan, nftables."""

from __future__ import annotations

import errno
import itertools
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.adapters.linux import pod
from weft.adapters.linux.elements import apply_changes
from weft.adapters.linux.facts import PORT_MAC, port_neighbours, port_routes
from weft.adapters.linux.links import Device, alter_link, create_veth, delete_group, read_link, read_links
from weft.adapters.linux.neighbours import put_neighbour
from weft.adapters.linux.netlink import ROUTE, NetlinkSocket, Refused
from weft.adapters.linux.netns import Namespace, NamespaceDirectory
from weft.adapters.linux.routes import put_route, read_addresses
from weft.adapters.linux.ruleset import put_voices, voices_of
from weft.adapters.linux.space import REAPED_GROUP, TenantSpace
from weft.adapters.linux.survey import foreign_drops, probe_kernel, survey_space
from weft.domain.addresses import Address
from weft.domain.diff import Difference
from weft.domain.errors import Conflict, NotFound
from weft.domain.ids import TenantName
from weft.domain.nodeview import Overlay, Part, Port, Space
from weft.ports.datapath import Findings, SpaceSurvey, Wiring

_ENCAPSULATION = {4: 50, 6: 70}
"""What vxlan adds to a packet, by the underlay's family."""
_LEAVING_PREFIX = "wgone"
_FIRST_INDEX = 1 << 16
_DEFAULT_MTU = 1500


class LinuxDatapath:
    """See `weft.ports.datapath`. `directory` is where tenants' namespaces are pinned; `vtep` is our end of tunnels."""

    def __init__(self, *, directory: Path, vtep: Address, vxlan_port: int) -> None:
        self._directory = NamespaceDirectory(directory)
        self._vtep = vtep
        self._vxlan_port = vxlan_port
        self._spaces: dict[TenantName, TenantSpace] = {}
        self._reapable: set[TenantName] = set()
        self._indexes = itertools.count(_FIRST_INDEX)

    def __enter__(self) -> Self:
        self._directory.prepare()
        self._underlay_namespace = Namespace.current()
        self._underlay = NetlinkSocket(ROUTE, namespace=self._underlay_namespace)
        self._mtu = self._read_underlay_mtu() - _ENCAPSULATION[self._vtep.family]
        for tenant in self._directory.names():
            self._open_space(TenantName(tenant))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in self._spaces.values():
            space.close()
        self._underlay.close()
        self._underlay_namespace.close()

    @property
    def mtu(self) -> int:
        return self._mtu

    def _read_underlay_mtu(self) -> int:
        """That of the device which has our tunnel address."""
        for link in read_links(self._underlay):
            if any(each.prefix.address == self._vtep for each in read_addresses(self._underlay, link=link.index)):
                return link.mtu
        return _DEFAULT_MTU

    def converge(self, wanted: Set[Part]) -> Findings:
        mended: list[str] = []
        missing: set[Port] = set()
        by_tenant: defaultdict[TenantName, set[Part]] = defaultdict(set)
        for part in wanted:
            by_tenant[part.tenant].add(part)
        for name in self._directory.names() - by_tenant.keys():
            mended.append(f"removed the space of tenant {name}")
            self._drop_space(TenantName(name))
        for tenant, parts in by_tenant.items():
            space = self._open_space(tenant)
            overlays = [part for part in parts if isinstance(part, Overlay)]
            for overlay in overlays:
                self._put_overlay(space, overlay)
            found, absent = space.converge(parts, overlays)
            mended += [f"tenant {tenant}: {each}" for each in found]
            missing |= absent
            self._reapable.add(tenant)
        self.reap()
        return Findings(mended=tuple(mended), missing=frozenset(missing))

    def apply(self, difference: Difference[Part]) -> None:
        for part in difference.put:
            if isinstance(part, Space):
                self._open_space(part.tenant)
            elif isinstance(part, Overlay):
                self._put_overlay(self._spaces[part.tenant], part)
        for tenant, parts in _by_tenant(difference.put).items():
            self._spaces[tenant].put(parts)
        for tenant, parts in _by_tenant(difference.drop).items():
            if tenant in self._spaces:
                self._spaces[tenant].drop(parts)
        for part in difference.drop:
            if isinstance(part, Overlay) and part.tenant in self._spaces:
                self._spaces[part.tenant].drop_overlay(part)
            elif isinstance(part, Space):
                self._drop_space(part.tenant)

    def plug(self, wiring: Wiring) -> None:
        space = self._spaces[wiring.port.tenant]
        with Namespace.open(Path(wiring.netns)) as namespace, NetlinkSocket(ROUTE, namespace=namespace) as inside:
            if read_link(inside, wiring.interface) is not None:
                raise Conflict(f"interface {wiring.interface} is in {wiring.netns} already", field="CNI_IFNAME")
            here, there = self._make_pair(space, namespace, wiring)
            space.indexes[wiring.port.interface] = here
            space.netlink.send_batch(
                [
                    alter_link(here, up=True),
                    *map(put_neighbour, port_neighbours(wiring.port, here)),
                    *map(put_route, port_routes(wiring.port, here)),
                ]
            )
            inside.send_batch([*pod.requests(wiring, there)])
            apply_changes(space.netfilter, put_voices(voices_of(wiring.port)))

    def _make_pair(self, space: TenantSpace, namespace: Namespace, wiring: Wiring) -> tuple[int, int]:
        """A veth pair with indexes that we choose, so that nothing has to be read back."""
        while True:
            here, there = next(self._indexes), next(self._indexes)
            end = Device(name=wiring.port.interface, index=here, mac=PORT_MAC, mtu=wiring.mtu)
            peer = Device(name=wiring.interface, index=there, mac=wiring.port.mac, mtu=wiring.mtu)
            try:
                space.netlink.send_batch([create_veth(end, peer, peer_namespace=namespace.fd)])
            except Refused as refusal:
                if refusal.errno == errno.EEXIST and read_link(space.netlink, end.name) is not None:
                    raise Conflict(f"the host end {end.name} is there already") from refusal
                if refusal.errno not in {errno.EBUSY, errno.EEXIST}:
                    raise
            else:
                return here, there

    def unplug(self, wiring: Wiring) -> None:
        tenant = wiring.port.tenant
        space = self._spaces.get(tenant)
        if space is None:
            return
        space.drop([wiring.port])
        link = read_link(space.netlink, wiring.port.interface)
        if link is not None:
            self._free_name(wiring)
            name = f"{_LEAVING_PREFIX}{next(self._indexes)}"
            space.netlink.send_batch(
                [alter_link(link.index, up=False), alter_link(link.index, name=name, group=REAPED_GROUP)]
            )
            self._reapable.add(tenant)
        space.indexes.pop(wiring.port.interface, None)

    def _free_name(self, wiring: Wiring) -> None:
        """The workload's end is down and under another name, so that the next ADD in its namespace works at once."""
        if not wiring.netns:
            return
        try:
            with Namespace.open(Path(wiring.netns)) as namespace, NetlinkSocket(ROUTE, namespace=namespace) as inside:
                link = read_link(inside, wiring.interface)
                if link is not None and link.mac == wiring.port.mac:
                    name = f"{_LEAVING_PREFIX}{next(self._indexes)}"
                    inside.send_batch([alter_link(link.index, up=False), alter_link(link.index, name=name)])
        except NotFound:
            return  # the namespace is gone, and the interface with it

    def check(self, wiring: Wiring) -> list[str]:
        space = self._spaces.get(wiring.port.tenant)
        if space is None:
            return [f"the space of tenant {wiring.port.tenant} is missing"]
        found = space.differences(wiring.port)
        try:
            with Namespace.open(Path(wiring.netns)) as namespace, NetlinkSocket(ROUTE, namespace=namespace) as inside:
                found += pod.differences(wiring, inside)
        except NotFound as error:
            found.append(error.message)
        return found

    def survey(self) -> list[SpaceSurvey]:
        return [survey_space(tenant, self._spaces[tenant]) for tenant in sorted(self._spaces)]

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return probe_kernel()

    @staticmethod
    def hazards() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return foreign_drops()

    @staticmethod
    def enter(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with NamespaceDirectory(directory).open(tenant) as namespace:
            namespace.enter()

    def reap(self) -> None:
        for tenant in list(self._reapable):
            if space := self._spaces.get(tenant):
                space.netlink.send_batch([delete_group(REAPED_GROUP)])
            self._reapable.discard(tenant)

    def _open_space(self, tenant: TenantName) -> TenantSpace:
        if tenant not in self._spaces:
            space = TenantSpace(self._directory.create(tenant))
            space.prepare()
            self._spaces[tenant] = space
        return self._spaces[tenant]

    def _drop_space(self, tenant: TenantName) -> None:
        if space := self._spaces.pop(tenant, None):
            space.close()
        self._directory.delete(tenant)

    def _put_overlay(self, space: TenantSpace, overlay: Overlay) -> None:
        space.put_overlay(overlay, self._underlay, vtep=self._vtep, port=self._vxlan_port, mtu=self._mtu)


def _by_tenant(parts: tuple[Part, ...]) -> dict[TenantName, list[Part]]:
    """The parts that are more than devices, by tenant. Ports come and go by plugging."""
    found: defaultdict[TenantName, list[Part]] = defaultdict(list)
    for part in parts:
        if not isinstance(part, Space | Overlay | Port):
            found[part.tenant].append(part)
    return found
