"""Service state as entries of nft sets and maps (`service_chains`), their counters, and stale service connections."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from weft.adapters.netns.nft.entries import Entry, set_named
from weft.adapters.netns.nft.service_chains import (
    EXTERNAL,
    STATS_ORIGINAL,
    STATS_REPLY,
    BackendSelector,
    pick_chain,
    selector_id,
)
from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, FrontendSources, ServiceItem, Vip
from weft.domain.policy.model.protocols import UDP
from weft.kernel.netlink.codec import pack_address, to_int, to_int_be
from weft.kernel.netlink.conntrack import (
    Connection,
    Direction,
    Pattern,
    delete_connections,
    flush_matching,
    read_connections,
)
from weft.kernel.netlink.nft_set import Count, Element, mark, read_counts
from weft.kernel.netlink.socket import NetlinkSocket
from weft.ports.datapath import ServiceFlowStats

# nft pads every field of a concatenated key to four bytes.
_PROTOCOL_AND_PORT = struct.Struct(">B3xH2x")
_PORT = struct.Struct(">H2x")
_SCOPES = {f"services{scope}{family}": scope for scope in ("", EXTERNAL) for family in (4, 6)}
# Maps whose keys begin with a frontend: if one of their entries is dropped, its connections may be stale.
_FRONTEND_MAPS = ("services", "backends", "backend_by_hash")
_ZERO = Count(0, 0)
_FAMILIES = {4: 4, 16: 6}
# Up to this many connections, filtered deletes are faster than a dump of the whole table.
_MAX_FILTERED_DELETES = 16


class _Translation(NamedTuple):
    """A frontend and the backend that its connections were translated to. Another port makes it another backend."""

    frontend: FrontendKey
    address: Address
    port: int


def service_entries(item: ServiceItem) -> tuple[Entry, ...]:
    """Return the entries of a state item. No two items that may exist together share an entry."""
    return ENTRY_BUILDERS[type(item)](item)


def _backend_entries(item: Backend) -> tuple[Entry, ...]:
    suffix, frontend = _suffix(item.frontend), _frontend_key(item.frontend)
    index, target = frontend + mark(item.number), pack_address(item.address) + _PORT.pack(item.port)
    if not item.hash_slot:
        return (Entry(f"backends{suffix}", Element(key=index, value=target)),)
    # With affinity clients are bound to the slot, which does not change when backends are renumbered.
    hash_slot = mark(item.hash_slot)
    return (
        Entry(f"backend_hash{suffix}", Element(key=index, value=hash_slot)),
        Entry(f"backend_by_hash{suffix}", Element(key=frontend + hash_slot, value=target)),
    )


def _frontend_entries(item: Frontend) -> tuple[Entry, ...]:
    number = selector_id(item.backends, item.affinity if item.backends else 0)
    name = f"services{_suffix(item.frontend)}"
    return (Entry(name, Element(key=_frontend_key(item.frontend), value=mark(number))),)


def _source_entries(item: FrontendSources) -> tuple[Entry, ...]:
    suffix, frontend = _suffix(item.frontend), _frontend_key(item.frontend)
    return (
        Entry(f"restricted{suffix}", Element(key=frontend)),
        *(
            Entry(
                f"service_sources{suffix}",
                Element(
                    key=frontend + pack_address(Address(span.family, span.first)),
                    key_end=frontend + pack_address(Address(span.family, span.last)),
                ),
            )
            for span in item.sources
        ),
    )


def _vip_entries(item: Vip) -> tuple[Entry, ...]:
    return (Entry(f"vips{item.address.family}", Element(key=pack_address(item.address))),)


# Dispatch by exact type: a cluster may have tens of thousands of backends.
ENTRY_BUILDERS: Final[dict[type, Callable[[Any], tuple[Entry, ...]]]] = {
    Backend: _backend_entries,
    Frontend: _frontend_entries,
    FrontendSources: _source_entries,
    Vip: _vip_entries,
}


def _suffix(frontend: FrontendKey) -> str:
    """Return the suffix of the maps that a frontend is in."""
    return f"{EXTERNAL if frontend.external else ''}{frontend.address.family}"


def _frontend_key(frontend: FrontendKey) -> bytes:
    return pack_address(frontend.address) + _PROTOCOL_AND_PORT.pack(frontend.protocol, frontend.port)


def backend_selectors(entries: Iterable[Entry]) -> set[BackendSelector]:
    """Return the selectors whose chains must exist before these entries do."""
    frontends = (entry for entry in entries if entry.name in _SCOPES)
    selectors = {BackendSelector(to_int(entry.element.value), _SCOPES[entry.name]) for entry in frontends}
    return {selector for selector in selectors if selector.number}


def selector_of(entry: Entry) -> BackendSelector:
    """Return the selector of an element of one of `SELECTOR_MAPS`."""
    return BackendSelector(to_int(entry.element.key), EXTERNAL if EXTERNAL in entry.name else "")


def unused_selector_commands(entries: Iterable[Entry], *, table: str) -> str:
    """Return commands that delete elements of `SELECTOR_MAPS` and their chains, in one transaction."""
    lines: list[str] = []
    for entry in entries:
        number = to_int(entry.element.key)
        # The element refers to the chain, so it goes first.
        lines.append(f"delete element inet {table} {entry.name} {{ {number:#x} }}")
        lines.append(f"delete chain inet {table} {pick_chain(number, entry.name.removeprefix('lb_slots'))}")
    return "".join(f"{line}\n" for line in lines)


def flush_stale_connections(netlink: NetlinkSocket, *, dropped: Sequence[object], put: Sequence[object]) -> None:
    """Delete the conntrack entries of UDP that a change has made stale: those to a backend that is gone, and those
    that went to the address of a new frontend before it existed.

    A UDP flow has no end: while its client sends, its conntrack entry lives and keeps the old translation.
    """
    stale = _translations(dropped) - _translations(put)
    new = _udp_frontends(put) - _udp_frontends(dropped)
    stale |= {_Translation(frontend, frontend.address, frontend.port) for frontend in new}
    for family in (4, 6):
        of_family = [translation for translation in stale if translation.frontend.address.family == family]
        if not of_family:
            continue
        # The kernel's conntrack filter picks the wrong entries for v6 addresses, so those are found by a dump.
        if family == 4 and len(of_family) <= _MAX_FILTERED_DELETES:
            flush_matching(netlink, [_pattern(translation) for translation in of_family], family=family)
        else:
            connections = read_connections(netlink, family=family)
            delete_connections(netlink, (each for each in connections if _translation(each) in stale), family=family)


def flush_unwanted_connections(netlink: NetlinkSocket, wanted: Iterable[object], *, dropped: Iterable[Entry]) -> None:
    """Delete the conntrack entries of UDP that match no wanted backend, after unknown entries were dropped."""
    gone = [entry for entry in dropped if entry.name.startswith(_FRONTEND_MAPS)]
    if not gone:
        return
    items = [item for item in wanted if isinstance(item, Backend | Frontend)]
    frontends, translations = _udp_frontends(items), _translations(items)
    frontends |= {frontend for entry in gone if (frontend := _frontend_of(entry)).protocol == UDP}
    for family in (4, 6):
        unwanted = (
            each
            for each in read_connections(netlink, family=family)
            if (found := _translation(each)) is not None and found.frontend in frontends and found not in translations
        )
        delete_connections(netlink, unwanted, family=family)


def _frontend_of(entry: Entry) -> FrontendKey:
    """Return the frontend that an entry's key begins with."""
    size = 4 if entry.name.endswith("4") else 16
    protocol, number = _PROTOCOL_AND_PORT.unpack_from(entry.element.key, size)
    return FrontendKey(_address(entry.element.key[:size]), protocol, number)


def _translations(items: Iterable[object]) -> set[_Translation]:
    backends = (item for item in items if isinstance(item, Backend) and item.frontend.protocol == UDP)
    return {_Translation(_in_conntrack(item.frontend), item.address, item.port) for item in backends}


def _udp_frontends(items: Iterable[object]) -> set[FrontendKey]:
    return {
        _in_conntrack(item.frontend) for item in items if isinstance(item, Frontend) and item.frontend.protocol == UDP
    }


def _in_conntrack(frontend: FrontendKey) -> FrontendKey:
    """Return a frontend as conntrack entries show it: they do not distinguish external clients from pods."""
    return frontend._replace(external=False)


def _pattern(translation: _Translation) -> Pattern:
    frontend = translation.frontend
    original = Direction(destination=frontend.address, protocol=frontend.protocol, destination_port=frontend.port)
    reply = Direction(source=translation.address, protocol=frontend.protocol, source_port=translation.port)
    return Pattern(original=original, reply=reply)


def _translation(connection: Connection) -> _Translation | None:
    original, reply = connection.original, connection.reply
    if original.destination is None or reply.source is None:
        return None
    frontend = FrontendKey(original.destination, original.protocol, original.destination_port)
    return _Translation(frontend, reply.source, reply.source_port)


def read_service_stats(tenant: TenantName, netlink: NetlinkSocket) -> Iterator[ServiceFlowStats]:
    """Read the statistics of one tenant; see `weft.ports.datapath.Datapath.service_flows`."""
    for family in (4, 6):
        original, reply = (read_counts(netlink, set_named(f"{name}{family}")) for name in (STATS_ORIGINAL, STATS_REPLY))
        for flow in original.keys() | reply.keys():
            yield _flow_stats(tenant, flow, original.get(flow, _ZERO), reply.get(flow, _ZERO))


def _flow_stats(tenant: TenantName, flow: bytes, original: Count, reply: Count) -> ServiceFlowStats:
    # The key: client, VIP, protocol and port in four bytes each, backend.
    size = (len(flow) - 8) // 3
    client, vip, rest = flow[:size], flow[size : 2 * size], flow[2 * size :]
    return ServiceFlowStats(
        tenant=tenant,
        client=_address(client),
        frontend=FrontendKey(_address(vip), rest[0], to_int_be(rest[4:6])),
        provider=_address(rest[8:]),
        packets_in=original.packets,
        bytes_in=original.octets,
        packets_out=reply.packets,
        bytes_out=reply.octets,
    )


def _address(data: bytes) -> Address:
    return Address(_FAMILIES[len(data)], to_int_be(data))
