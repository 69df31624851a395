"""Service parts as entries of the table's sets and maps (`balancing`), and what has been counted there."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from weft.adapters.netns.nft.entries import Entry, set_named
from weft.adapters.netns.nft.service_chains import ANSWERED, ASKED, OUTSIDE, BackendSelector, spread_number
from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServicePart, Vip
from weft.domain.policy.model.protocols import UDP
from weft.kernel.netlink.codec import pack_address, to_big_number, to_number
from weft.kernel.netlink.conntrack import (
    Connection,
    Direction,
    Pattern,
    forget_connections,
    forget_each,
    read_connections,
)
from weft.kernel.netlink.nft_set import Count, Element, mark, read_counts
from weft.kernel.netlink.socket import NetlinkSocket
from weft.ports.datapath import ServiceFlowStats

_PROTOCOL_AND_PORT = struct.Struct(">B3xH2x")  # fields of a key, each filled up to four bytes
_PORT = struct.Struct(">H2x")
# Which side each map of services is for.
_SERVICES = {f"services{side}{family}": side for side in ("", OUTSIDE) for family in (4, 6)}
_MAPS = ("services", "backends", "ticketed")
_NOTHING = Count(0, 0)
_FAMILIES = {4: 4, 16: 6}
# So many connections are found one by one sooner than by reading all.
_FEW = 16


class _Translation(NamedTuple):
    """To whom connections to a front have been led: a backend that has another port now is another one."""

    front: FrontendKey
    address: Address
    port: int


def service_entries(part: ServicePart) -> tuple[Entry, ...]:
    """What a part consists of. No two parts that may be there together have an entry in common."""
    match part:
        case Backend():
            end, front = _end(part.front), _front_key(part.front)
            lot, target = front + mark(part.number), pack_address(part.address) + _PORT.pack(part.port)
            if not part.hash_slot:
                return (Entry(f"backends{end}", Element(key=lot, value=target)),)
            hash_slot = mark(part.hash_slot)
            return (
                Entry(f"tickets{end}", Element(key=lot, value=hash_slot)),
                Entry(f"ticketed{end}", Element(key=front + hash_slot, value=target)),
            )
        case Frontend():
            number = spread_number(part.backends, part.affinity if part.backends else 0)
            name = f"services{_end(part.front)}"
            return (Entry(name, Element(key=_front_key(part.front), value=mark(number))),)
        case Vip():
            return (Entry(f"vips{part.address.family}", Element(key=pack_address(part.address))),)


def _end(front: FrontendKey) -> str:
    """How the names of the maps end in which a front is."""
    return f"{OUTSIDE if front.outside else ''}{front.address.family}"


def _front_key(front: FrontendKey) -> bytes:
    return pack_address(front.address) + _PROTOCOL_AND_PORT.pack(front.protocol, front.port)


def spreads_of(entries: Iterable[Entry]) -> set[BackendSelector]:
    """The numbers for which there must be a chain when these entries are there."""
    fronts = (entry for entry in entries if entry.name in _SERVICES)
    found = {BackendSelector(to_number(entry.element.value), _SERVICES[entry.name]) for entry in fronts}
    return {ensure_lookup_rules for ensure_lookup_rules in found if ensure_lookup_rules.number}


def forget_stale(netlink: NetlinkSocket, *, dropped: Sequence[object], put: Sequence[object]) -> None:
    """Forget what the kernel remembers of fronts of UDP, where connections never end, and is no longer so.

    That is who went to a backend that is gone, and who went to the address of a new front before there was one.
    """
    stale = _translated(dropped) - _translated(put)
    stale |= {_Translation(front, front.address, front.port) for front in _fronts(put) - _fronts(dropped)}
    for family in (4, 6):
        some = [each for each in stale if each.front.address.family == family]
        if not some:
            continue
        if family == 4 and len(some) <= _FEW:
            forget_connections(netlink, [_pattern(each) for each in some], family=family)
        else:
            found = read_connections(netlink, family=family)
            forget_each(netlink, (each for each in found if _translation(each) in stale), family=family)


def forget_untrue(netlink: NetlinkSocket, wanted: Iterable[object], *, dropped: Iterable[Entry]) -> None:
    """The same after entries were dropped whose parts nobody knows: all connections are looked at."""
    gone = [entry for entry in dropped if entry.name.startswith(_MAPS)]
    if not gone:
        return
    parts = [part for part in wanted if isinstance(part, Backend | Frontend)]
    fronts, translated = _fronts(parts), _translated(parts)
    fronts |= {front for entry in gone if (front := _front_of(entry)).protocol == UDP}
    for family in (4, 6):
        untrue = (
            each
            for each in read_connections(netlink, family=family)
            if (found := _translation(each)) is not None and found.front in fronts and found not in translated
        )
        forget_each(netlink, untrue, family=family)


def _front_of(entry: Entry) -> FrontendKey:
    """The front that an entry begins with."""
    size = 4 if entry.name.endswith("4") else 16
    protocol, number = _PROTOCOL_AND_PORT.unpack_from(entry.element.key, size)
    return FrontendKey(_address(entry.element.key[:size]), protocol, number)


def _translated(parts: Iterable[object]) -> set[_Translation]:
    backends = (part for part in parts if isinstance(part, Backend) and part.front.protocol == UDP)
    return {_Translation(_as_seen(part.front), part.address, part.port) for part in backends}


def _fronts(parts: Iterable[object]) -> set[FrontendKey]:
    return {_as_seen(part.front) for part in parts if isinstance(part, Frontend) and part.front.protocol == UDP}


def _as_seen(front: FrontendKey) -> FrontendKey:
    """A front as connections name it, which do not tell by which side they came."""
    return front._replace(outside=False)


def _pattern(found: _Translation) -> Pattern:
    front = found.front
    asked = Direction(destination=front.address, protocol=front.protocol, destination_port=front.port)
    answers = Direction(source=found.address, protocol=front.protocol, source_port=found.port)
    return Pattern(original=asked, reply=answers)


def _translation(connection: Connection) -> _Translation | None:
    asked, answers = connection.original, connection.reply
    if asked.destination is None or answers.source is None:
        return None
    front = FrontendKey(asked.destination, asked.protocol, asked.destination_port)
    return _Translation(front, answers.source, answers.source_port)


def read_uses(tenant: TenantName, netlink: NetlinkSocket) -> Iterator[ServiceFlowStats]:
    """See `weft.ports.datapath.Datapath.service_uses`, for one tenant."""
    for family in (4, 6):
        asked, answered = (read_counts(netlink, set_named(f"{name}{family}")) for name in (ASKED, ANSWERED))
        for pair in asked.keys() | answered.keys():
            yield _use(tenant, pair, asked.get(pair, _NOTHING), answered.get(pair, _NOTHING))


def _use(tenant: TenantName, pair: bytes, asked: Count, answered: Count) -> ServiceFlowStats:
    size = (len(pair) - 8) // 3  # three addresses, a protocol and a port in four bytes each
    client, vip, rest = pair[:size], pair[size : 2 * size], pair[2 * size :]
    return ServiceFlowStats(
        tenant=tenant,
        client=_address(client),
        front=FrontendKey(_address(vip), rest[0], to_big_number(rest[4:6])),
        provider=_address(rest[8:]),
        packets_in=asked.packets,
        octets_in=asked.octets,
        packets_out=answered.packets,
        octets_out=answered.octets,
    )


def _address(data: bytes) -> Address:
    return Address(_FAMILIES[len(data)], to_big_number(data))
