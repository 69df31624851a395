"""Desired state as kernel objects: the addresses, routes, neighbours, FDB and nft entries of each state item (pure).

A state item is realized when all its objects exist. No object belongs to two items, so items come and go independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from weft.adapters.netns.devices import (
    TENANT_HOST_LINK,
    next_hop,
    overlay_hop_mac,
    overlay_mac,
    overlay_name,
    segment_name,
)
from weft.adapters.netns.host.nat_tenant import (
    dnat_entries,
    link_entries,
    link_neighbours,
    link_routes,
    node_port_vip_entries,
    return_entries,
    snat_entries,
    subnet_route,
)
from weft.adapters.netns.nft import policy_maps, service_maps
from weft.adapters.netns.nft.anti_spoofing import segment_entry, spoofguard_entries
from weft.adapters.netns.nft.entries import Entry
from weft.domain.addresses import BITS, Address, parse_address
from weft.domain.desired.segments import RemoteMac, Segment
from weft.domain.desired.state import Gateway, Port, RemoteRoute, StateItem, VxlanPeer
from weft.domain.host_access.state import (
    HostLink,
    NodePortVip,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.kernel.netlink.link import LOOPBACK_IFINDEX
from weft.kernel.netlink.neigh import DEFAULT_FDB_MAC, FdbEntry, Neighbour
from weft.kernel.netlink.route import LinkAddress, Prefix, Route

T = TypeVar("T")

KernelObject = LinkAddress | Route | Neighbour | FdbEntry | Entry
# Interface indexes of the devices of a tenant netns, by name.
Indexes = Mapping[str, int]

# Items that consist of nft entries alone. There may be tens of thousands of them.
_ENTRY_BUILDERS: Final = {**policy_maps.ENTRY_BUILDERS, **service_maps.ENTRY_BUILDERS}
NFT_ONLY_ITEMS: Final = tuple(_ENTRY_BUILDERS)


class KernelState(msgspec.Struct, frozen=True):
    """The kernel objects of a set of state items, besides devices."""

    addresses: frozenset[LinkAddress] = frozenset()
    routes: frozenset[Route] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    fdb_entries: frozenset[FdbEntry] = frozenset()
    entries: frozenset[Entry] = frozenset()


def host_prefix(address: Address) -> Prefix:
    """Return the /32 or /128 of an address."""
    return Prefix(address, BITS[address.family])


def kernel_state_of(items: Iterable[StateItem], indexes: Indexes) -> KernelState:
    """Return the kernel objects of state items. What needs a device that does not exist is left out."""
    entries: set[Entry] = set()
    objects: list[KernelObject] = []
    for item in items:
        # Dispatch by exact type: the frequent kinds cost one lookup each.
        kind = type(item)
        if build_entries := _ENTRY_BUILDERS.get(kind):
            entries.update(build_entries(item))
        elif build_objects := _OBJECT_BUILDERS.get(kind):
            objects += build_objects(item, indexes)
    return KernelState(
        addresses=_of_type(LinkAddress, objects),
        routes=_of_type(Route, objects),
        neighbours=_of_type(Neighbour, objects),
        fdb_entries=_of_type(FdbEntry, objects),
        entries=_of_type(Entry, objects) | entries,
    )


def _of_type(kind: type[T], objects: Iterable[KernelObject]) -> frozenset[T]:
    return frozenset(each for each in objects if isinstance(each, kind))


def _segment(item: Segment, indexes: Indexes) -> Iterator[KernelObject]:  # noqa: ARG001 (one signature for all)
    yield segment_entry(segment_name(item.number))


def _gateway(item: Gateway, indexes: Indexes) -> Iterator[KernelObject]:
    # In routing mode the gateway is on loopback: every port of the node answers for it.
    link = indexes.get(segment_name(item.segment)) if item.segment else LOOPBACK_IFINDEX
    if link:
        yield LinkAddress(link=link, prefix=host_prefix(item.address), prefix_route=False)


def _vxlan_peer(item: VxlanPeer, indexes: Indexes) -> Iterator[KernelObject]:
    link, bridge = indexes.get(overlay_name(item.vni)), indexes.get(segment_name(item.vni), 0)
    if not link:
        return
    vtep = parse_address(item.vtep, field="vtep")
    mac = _peer_mac(vtep, bridged=bool(bridge))
    yield Neighbour(link=bridge or link, address=next_hop(vtep), mac=mac)
    yield FdbEntry(link=link, mac=mac, remote=vtep)
    if bridge:
        # The bridge has an FDB of its own, beside that of the VXLAN device.
        yield FdbEntry(link=link, mac=mac)
    if item.floods:
        yield FdbEntry(link=link, mac=DEFAULT_FDB_MAC, remote=vtep)


def _peer_mac(vtep: Address, *, bridged: bool) -> str:
    return overlay_mac(vtep) if bridged else overlay_hop_mac(vtep)


def _remote_route(item: RemoteRoute, indexes: Indexes) -> Iterator[KernelObject]:
    if link := indexes.get(overlay_name(item.vni)):
        to = Prefix(Address(item.prefix.family, item.prefix.base), item.prefix.length)
        yield Route(to=to, link=link, via=next_hop(parse_address(item.vtep, field="vtep")), on_link=True)


def _remote_mac(item: RemoteMac, indexes: Indexes) -> Iterator[KernelObject]:
    link, bridge = indexes.get(overlay_name(item.vni)), indexes.get(segment_name(item.vni), 0)
    if not link:
        return
    yield FdbEntry(link=link, mac=item.mac, remote=parse_address(item.vtep, field="vtep"))
    yield FdbEntry(link=link, mac=item.mac)
    for address in item.addresses if bridge else ():
        yield Neighbour(link=bridge, address=address, mac=item.mac)
        yield Route(to=host_prefix(address), link=bridge)


def _port(item: Port, indexes: Indexes) -> Iterator[KernelObject]:
    if link := indexes.get(item.interface):
        yield from port_routes(item, indexes)
        yield from port_neighbours(item, indexes)
        yield from port_fdb_entries(item, link)
        yield from spoofguard_entries(item)


def _host_link(item: HostLink, indexes: Indexes) -> Iterator[KernelObject]:
    if link := indexes.get(TENANT_HOST_LINK):
        yield from link_routes(link)
        yield from link_neighbours(link)
        yield from link_entries(item)


def _tenant_subnet(item: TenantSubnet, indexes: Indexes) -> Iterator[KernelObject]:  # noqa: ARG001
    yield subnet_route(item)


def _remote_host_return_route(item: RemoteHostReturnRoute, indexes: Indexes) -> Iterator[KernelObject]:
    if TENANT_HOST_LINK not in indexes:
        return
    bridge = indexes.get(segment_name(item.vni))
    if link := bridge or indexes.get(overlay_name(item.vni)):
        mac = _peer_mac(parse_address(item.vtep, field="vtep"), bridged=bool(bridge))
        yield Neighbour(link=link, address=item.address, mac=mac)
        yield from return_entries(item, link=link)


_OBJECT_BUILDERS: Final[dict[type, Callable[[Any, Indexes], Iterator[KernelObject]]]] = {
    Segment: _segment,
    Gateway: _gateway,
    VxlanPeer: _vxlan_peer,
    RemoteRoute: _remote_route,
    RemoteMac: _remote_mac,
    Port: _port,
    HostLink: _host_link,
    TenantSubnet: _tenant_subnet,
    RemoteHostReturnRoute: _remote_host_return_route,
    TenantSnat: lambda item, _: snat_entries(item),
    OverlapDnat: lambda item, _: dnat_entries(item),
    NodePortVip: lambda item, _: node_port_vip_entries(item),
}


def port_routes(port: Port, indexes: Indexes) -> set[Route]:
    """Return the node's routes to a workload."""
    return {Route(to=host_prefix(address), link=link) for link in _link_to(port, indexes) for address in port.addresses}


def port_neighbours(port: Port, indexes: Indexes) -> set[Neighbour]:
    """Return the permanent neighbour entries of a workload: the node never sends ARP or ND for it."""
    return {
        Neighbour(link=link, address=address, mac=port.mac)
        for link in _link_to(port, indexes)
        for address in port.addresses
    }


def port_fdb_entries(port: Port, link: int) -> set[FdbEntry]:
    """Return the static FDB entries of a workload on a bridge."""
    return {FdbEntry(link=link, mac=port.mac)} if port.segment else set()


def _link_to(port: Port, indexes: Indexes) -> tuple[int, ...]:
    """Return the device by which a workload is reached; none if it does not exist."""
    link = indexes.get(segment_name(port.segment) if port.segment else port.interface)
    return (link,) if link else ()
