"""Endpoints: created, updated and deleted one commit each, with their addresses (facts 2.4, 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from weft.domain import ipam, kinds, model
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.allocator import EMPTY, NumberSet
from weft.domain.commits import Delete, Write
from weft.domain.errors import Conflict, Invalid, NotFound
from weft.domain.ids import EndpointKey, NetworkKey
from weft.domain.planning import Plan, Reading, holder_of, put
from weft.domain.validation import check


@dataclass(frozen=True, slots=True)
class Busy:
    """What the deciding process knows beyond the store: addresses being claimed right now, and those that rest."""

    held: Mapping[tuple[NetworkKey, int], NumberSet] = field(default_factory=dict)
    resting: Mapping[tuple[NetworkKey, int], NumberSet] = field(default_factory=dict)


def plan_create(reading: Reading, wanted: model.Endpoint, *, busy: Busy) -> tuple[model.Endpoint, Plan]:
    """The endpoint as it will be, and its commit. One that exists is given back unchanged, with an empty plan."""
    wanted = check(wanted)
    present = reading.get(kinds.ENDPOINT, *wanted.key)
    if present is not None:
        return present, Plan()
    if reading.cluster.get(kinds.TENANT, wanted.tenant) is None:  # not compared: its network keeps a tenant alive
        raise Invalid(f"TenantName: tenant {wanted.tenant!r} does not exist: create it first", field="TenantName")
    network = reading.require(kinds.NETWORK, wanted.tenant, wanted.network, field="NetworkName")
    group = reading.require(kinds.GROUP, wanted.tenant, wanted.group, field="ServiceName") if wanted.group else None
    if group is not None and group.network != wanted.network:
        raise Conflict(
            f"group {group.key} belongs to network {group.network!r}, not {wanted.network!r}", field="ServiceName"
        )
    writes: list[Write] = []
    chosen: dict[int, Address] = {}
    for family, asked in ((4, wanted.ip_address), (6, wanted.ipv6_address)):
        if not asked and ipam.subnet_of(network, family) is None:
            continue
        address = (
            parse_address(asked, field="IPAddress" if family == 4 else "IPv6Address", family=family)
            if asked
            else _choose(reading, network, group, family=family, busy=busy)
        )
        writes += ipam.claim(reading, network, group, address=address, holder=holder_of(kinds.ENDPOINT, wanted))
        chosen[family] = address
    endpoint = msgspec.structs.replace(
        wanted,
        ip_address=str(chosen[4]),
        ipv6_address=str(chosen[6]) if 6 in chosen else "",
        mac_address=mac_of(chosen[4]),
    )
    return endpoint, reading.plan([put(kinds.ENDPOINT, endpoint), *writes])


def _choose(reading: Reading, network: model.Network, group: model.Group | None, *, family: int, busy: Busy) -> Address:
    return ipam.choose_address(
        reading.cluster,
        network,
        group,
        family=family,
        held=busy.held.get((network.key, family), EMPTY),
        resting=busy.resting.get((network.key, family), EMPTY),
    )


def plan_delete(reading: Reading, key: EndpointKey) -> tuple[model.Endpoint, Plan]:
    """The endpoint that goes, and its commit; every address it had is free again (W19)."""
    present = reading.get(kinds.ENDPOINT, *key)
    if present is None:
        raise NotFound(f"endpoint {key} does not exist")
    network = reading.get(kinds.NETWORK, key.tenant, key.network)
    freed = ipam.release(network, present.ip_address, present.ipv6_address) if network else []
    return present, reading.plan([Delete(kinds.ENDPOINT.store_key(*key)), *freed])


def plan_update(
    reading: Reading, key: EndpointKey, *, labels: Mapping[str, str], container_id: str, container_name: str
) -> tuple[model.Endpoint, Plan]:
    """What a container's start or end changes: its labels (which services it provides for), id and name."""
    present = reading.get(kinds.ENDPOINT, *key)
    if present is None:
        raise NotFound(f"endpoint {key} does not exist")
    changed = check(
        msgspec.structs.replace(present, labels=dict(labels), container_id=container_id, container_name=container_name)
    )
    return changed, reading.plan([] if changed == present else [put(kinds.ENDPOINT, changed)])


def plan_reserve(
    reading: Reading, network: model.Network, group: model.Group | None, *, asked: str, busy: Busy
) -> tuple[Address, Plan]:
    """An address ahead of its endpoint (`/plugin/allocAddress`); a requested one must be free (W17)."""
    reading.get(kinds.NETWORK, *network.key)
    family = parse_address(asked, field="PreferredIPv4Address").family if asked else 4
    address = (
        parse_address(asked, field="PreferredIPv4Address")
        if asked
        else _choose(reading, network, group, family=family, busy=busy)
    )
    pool = reading.cluster.address_pool(network.key, family)
    if address.number in pool.holders:
        raise Conflict(
            f"address {address} is taken by {pool.holders[address.number].value.holder}", field="PreferredIPv4Address"
        )
    holder = f"{ipam.RESERVED}{group.key if group else network.key}"
    return address, reading.plan(ipam.claim(reading, network, group, address=address, holder=holder))


def plan_release(reading: Reading, network: model.Network, text: str) -> Plan:
    """Give back an address that was reserved; one that an endpoint or service holds goes with its holder only."""
    address = parse_address(text, field="IPv4Address")
    stored = reading.cluster.address_pool(network.key, address.family).holders.get(address.number)
    if stored is None:
        return Plan()
    if not stored.value.holder.startswith(ipam.RESERVED):
        raise Conflict(f"address {address} is held by {stored.value.holder}: delete that instead", field="IPv4Address")
    reading.at(ipam.claim_key(network, address), stored.revision)
    return reading.plan(ipam.release(network, text))
