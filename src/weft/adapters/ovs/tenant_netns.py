"""Tenants' spaces beside the switch: what the kernel does better than flows, done as on linux (`linux.space`).

A space is a pinned namespace with the tenant's gateways, its services and its link to the host. It stands on two legs,
ports of the switch (`legs`). Towards workloads it routes by them: to those of this node by
the near one, to others by the far one, which bears a name like an overlay's device, as the rules of linux tell others
by it. The switch judges what passes; the space is told of no policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from weft.adapters.netns.host.network import HostNetwork
from weft.adapters.netns.host.ruleset import HostSurroundings
from weft.adapters.netns.kernel_state import PORT_MAC, overlay_name
from weft.adapters.netns.nft.service_maps import read_uses
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.adapters.ovs.pipeline.context import prefix_of
from weft.adapters.ovs.pipeline.tenant_netns_flows import LEG_PREFIX, far_leg, near_leg
from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Overlay, Port, RemoteRoute, StateItem, TenantNetns
from weft.domain.errors import DatapathFault
from weft.domain.host_access.state import HostLink, is_hosts
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, Vip
from weft.kernel.netlink.link import Device, alter_link, alter_protocols, create_macvlan, delete_link, read_link
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.ports.datapath import NO_CHANGE, ServiceFlowStats

# No overlay has this number.
_FAR = 0
_NEAR_INSIDE: Final = f"{LEG_PREFIX}0"
_FAR_INSIDE: Final = overlay_name(_FAR)
_AS_THEY_ARE = (Backend, Frontend, Vip)
_Owned = tuple[TenantName, Address]


class Spaces:
    """See the module. `directory` is where namespaces are pinned; `namespace` is that of the switch and the host."""

    def __init__(self, directory: Path, namespace: Namespace, netlink: NetlinkSocket, *, mtu: int,
                 surroundings: HostSurroundings) -> None:  # fmt: skip
        self._directory = NamespaceDirectory(directory)
        self._directory.prepare()
        self._netlink = netlink
        self._mtu = mtu
        self._host = HostNetwork(namespace, netlink, surroundings)
        self._spaces: dict[TenantName, TenantNetnsDriver] = {}
        # Who is here: news of others about the same addresses, which may be old, leave them alone.
        self._own: set[_Owned] = set()
        for name in self._directory.names():
            self._open(TenantName(name))

    def close(self) -> None:
        for space in self._spaces.values():
            space.close()
        self._host.close()

    def incomplete(self, numbers: Mapping[TenantName, int]) -> dict[TenantName, int]:
        """Those of some tenants, by their numbers, that lack a leg or are not there at all."""
        return {tenant: number for tenant, number in numbers.items() if not self._stands(tenant, number)}

    def clear(self, numbers: Mapping[TenantName, int]) -> None:
        """Nothing is left of the legs of these tenants, which the switch has not."""
        for tenant, number in numbers.items():
            space = self._open(tenant)
            for outside, inside in _legs(number):
                for netlink, name in ((self._netlink, outside), (space.netlink, inside)):
                    if (stale := read_link(netlink, name)) is not None:
                        netlink.send_batch([delete_link(stale.index)])

    def make(self, numbers: Mapping[TenantName, int]) -> list[str]:
        """These tenants have a space on its legs, which the switch has made; what was done, in words."""
        for tenant, number in numbers.items():
            space = self._open(tenant)
            for outside, inside in _legs(number):
                self._stand(space, outside, inside)
            space.note_links()
        return [f"made the space of tenant {tenant}" for tenant in numbers]

    def drop(self, tenants: Iterable[TenantName]) -> None:
        """No space of these tenants, nor links of theirs to the host."""
        for tenant in tenants:
            self._host.drop_link(tenant)
            if space := self._spaces.pop(tenant, None):
                space.close()
            self._directory.delete(tenant)

    def converge(self, wanted: Set[StateItem]) -> list[str]:
        """The spaces, which stand, hold exactly what is wanted of them; what was mended, in words."""
        tenants = {part.tenant for part in wanted if isinstance(part, TenantNetns)}
        nobodys = self._spaces.keys() - tenants
        self.drop(nobodys)
        repaired = [f"removed the space of tenant {tenant}" for tenant in nobodys]
        self._own = _owned(wanted)
        by_tenant = self._by_tenant(wanted)
        for tenant in tenants:
            space, parts = self._spaces[tenant], by_tenant[tenant]
            made = [part for part in parts if isinstance(part, HostLink) and self._put_link(part)]
            found, _ = space.converge(set(parts), [Overlay(tenant, _FAR)])
            repaired += [f"tenant {tenant}: {each}" for each in (*(f"made {link}" for link in made), *found)]
        return repaired + self._host.converge(wanted)

    def change(self, *, drop: Sequence[StateItem], put: Sequence[StateItem]) -> None:
        """No more of some parts, and others, in the spaces that are there."""
        self._own |= _owned(put)
        new, gone = self._by_tenant(put), self._by_tenant(drop)
        for parts in new.values():
            for part in parts:
                if isinstance(part, HostLink):
                    self._put_link(part)
        for tenant in (new.keys() | gone.keys()) & self._spaces.keys():
            self._spaces[tenant].change(drop=gone[tenant], put=new[tenant])
        self._host.change(drop=drop, put=put)
        joined = {part.tenant for part in put if isinstance(part, HostLink)}
        for part in drop:
            if isinstance(part, HostLink) and part.tenant not in joined:
                self._host.drop_link(part.tenant)

    def dismiss(self, port: Port) -> None:
        """A workload has left: nobody inherits its connections."""
        self._own -= _owned([port])
        if space := self._spaces.get(port.tenant):
            space.dismiss(_at_near_leg(port), NO_CHANGE)

    def reap(self) -> None:
        """Finish what `dismiss` has left for later."""
        for space in self._spaces.values():
            space.forget_left()

    def uses(self) -> list[ServiceFlowStats]:
        """Who uses which service, and who answers."""
        return [use for tenant in sorted(self._spaces) for use in read_uses(tenant, self._spaces[tenant].netfilter)]

    def is_disturbed(self) -> bool:
        """Whether others may have changed something of ours."""
        return self._host.is_disturbed() or any(space.table.is_disturbed() for space in self._spaces.values())

    def _open(self, tenant: TenantName) -> TenantNetnsDriver:
        if tenant not in self._spaces:
            space = TenantNetnsDriver(self._directory.create(tenant))
            space.prepare()
            self._spaces[tenant] = space
        return self._spaces[tenant]

    def _stands(self, tenant: TenantName, number: int) -> bool:
        space = self._spaces.get(tenant)
        if space is None:
            return False
        space.note_links()
        return all(
            (leg := read_link(self._netlink, outside)) is not None
            and (end := read_link(space.netlink, inside)) is not None
            and end.peer == leg.index
            for outside, inside in _legs(number)
        )

    def _stand(self, space: TenantNetnsDriver, outside: str, inside: str) -> None:
        """The space stands on a leg: what comes by it is for the space, which has its MAC."""
        leg = read_link(self._netlink, outside)
        if leg is None:
            raise DatapathFault(f"device {outside} is gone as soon as it was made")
        self._netlink.send_batch(
            [
                alter_protocols(leg.index, link_local=False),
                alter_link(leg.index, up=True, mac=PORT_MAC),
                create_macvlan(Device(name=inside, mtu=self._mtu), over=leg.index, namespace=space.namespace.fd),
            ]
        )
        if (end := read_link(space.netlink, inside)) is not None:
            quiet = [alter_protocols(end.index, link_local=False), alter_link(end.index, resolves=False)]
            space.netlink.send_batch([*quiet, alter_link(end.index, up=True)])
        read_link(self._netlink, outside)  # being asked, the kernel lets both ends send at once

    def _by_tenant(self, parts: Iterable[StateItem]) -> defaultdict[TenantName, list[StateItem]]:
        """What spaces are told of some parts."""
        found: defaultdict[TenantName, list[StateItem]] = defaultdict(list)
        for part in parts:
            if isinstance(part, RemoteMac):
                others = [each for each in part.addresses if (part.tenant, each) not in self._own]
                found[part.tenant] += [RemoteRoute(part.tenant, prefix_of(each), _FAR, part.vtep) for each in others]
            else:
                found[part.tenant] += _as_inside(part)
        return found

    def _put_link(self, part: HostLink) -> bool:
        return self._host.put_link(part, self._spaces[part.tenant], mtu=self._mtu)


def _legs(number: int) -> tuple[tuple[str, str], ...]:
    """The names of both ends of a tenant's legs, at the switch and in its space."""
    return (near_leg(number), _NEAR_INSIDE), (far_leg(number), _FAR_INSIDE)


def _owned(parts: Iterable[StateItem]) -> set[_Owned]:
    return {(part.tenant, address) for part in parts if isinstance(part, Port) for address in part.addresses}


def _as_inside(part: StateItem) -> list[StateItem]:
    """A part as its space sees it; nothing when it is no concern of the space."""
    match part:
        case Port():
            return [_at_near_leg(part)]
        case RemoteRoute():
            return [replace(part, vni=_FAR)]
        case Gateway():
            return [replace(part, segment=0)]
        case _:
            return [part] if isinstance(part, _AS_THEY_ARE) or is_hosts(part) else []


def _at_near_leg(port: Port) -> Port:
    return replace(port, interface=_NEAR_INSIDE, segment=0)
