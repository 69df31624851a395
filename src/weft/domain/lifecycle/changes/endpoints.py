"""Endpoints: create, update and delete, one commit each, together with their addresses (contiv 2.4, 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.errors import Conflict, Invalid, NotFound
from weft.domain.ids import EndpointKey, NetworkKey, NodeName
from weft.domain.ipam import ipam
from weft.domain.ipam.allocator import EMPTY, NumberSet
from weft.domain.store_types import Delete, Write
from weft.domain.transaction import ReadSet, Transaction, holder_of, put
from weft.domain.validation import check


@dataclass(frozen=True, slots=True)
class Busy:
    """What the planning process knows beyond the store: addresses of commits in flight, and those in cooldown."""

    held: Mapping[tuple[NetworkKey, int], NumberSet] = field(default_factory=dict)
    cooling: Mapping[tuple[NetworkKey, int], NumberSet] = field(default_factory=dict)


def plan_create(reading: ReadSet, wanted: model.Endpoint, *, busy: Busy) -> tuple[model.Endpoint, Transaction]:
    """The endpoint with its addresses, and its commit. An existing one is returned unchanged, with an empty plan."""
    requested = ((4, wanted.ip_address, "IPAddress"), (6, wanted.ipv6_address, "IPv6Address"))
    # Before the other checks, so that an error names the member as Contiv's request spells it.
    asked_for = {family: parse_address(text, field=member, family=family) for family, text, member in requested if text}
    wanted = check(wanted)
    present = reading.get(kinds.ENDPOINT, *wanted.key)
    if present is not None:
        return present, Transaction()  # a runtime repeats a request whose response was lost
    if reading.cluster.get(kinds.TENANT, wanted.tenant) is None:  # not compared: the network below cannot outlive it
        raise Invalid(f"TenantName: tenant {wanted.tenant!r} does not exist: create it first", field="TenantName")
    network = reading.require(kinds.NETWORK, wanted.tenant, wanted.network, field="NetworkName")
    group = reading.require(kinds.GROUP, wanted.tenant, wanted.group, field="ServiceName") if wanted.group else None
    if group is not None and group.network != wanted.network:
        raise Conflict(
            f"group {group.key} belongs to network {group.network!r}, not {wanted.network!r}", field="ServiceName"
        )
    writes: list[Write] = []
    chosen: dict[int, Address] = {}
    holder = holder_of(kinds.ENDPOINT, wanted)
    for family, asked, member in requested:
        if not asked and ipam.subnet_of(network, family) is None:
            continue
        address = asked_for.get(family) or _choose(reading, network, group, family=family, busy=busy)
        writes += ipam.claim(reading, network, group, address=address, holder=holder, field=member)
        chosen[family] = address
    endpoint = msgspec.structs.replace(
        wanted,
        ip_address=str(chosen[4]),
        ipv6_address=str(chosen[6]) if 6 in chosen else "",
        # Derived from the address, so that a peer's ARP entry stays valid when the address is used again.
        mac_address=wanted.mac_address or mac_of(chosen[4]),
    )
    return endpoint, reading.plan([put(kinds.ENDPOINT, endpoint), *writes])


def _choose(reading: ReadSet, network: model.Network, group: model.Group | None, *, family: int, busy: Busy) -> Address:
    return ipam.choose_address(
        reading.cluster,
        network,
        group,
        family=family,
        held=busy.held.get((network.key, family), EMPTY),
        cooling=busy.cooling.get((network.key, family), EMPTY),
    )


def is_same(present: model.Endpoint, endpoint: model.Endpoint) -> bool:
    """Whether both are the same endpoint: they differ at most in what `plan_update` changes."""
    return endpoint == msgspec.structs.replace(
        present, labels=endpoint.labels, container_id=endpoint.container_id, container_name=endpoint.container_name
    )


def plan_publish(reading: ReadSet, endpoint: model.Endpoint) -> Transaction:
    """Publish an endpoint with addresses that its node allocated from its blocks, maybe without the store.

    Empty if it is published already. `Conflict` if another endpoint has its key, `Conflict` or `Invalid` if its blocks,
    network or group do not exist any more: then the node must remove it.
    """
    present = reading.get(kinds.ENDPOINT, *endpoint.key)
    if present is not None and is_same(present, endpoint):
        return Transaction()
    if present is not None:
        raise Conflict(f"endpoint {endpoint.key} is on node {present.host!r} already")
    network = reading.require(kinds.NETWORK, endpoint.tenant, endpoint.network, field="networkName")
    if endpoint.group:
        reading.require(kinds.GROUP, endpoint.tenant, endpoint.group, field="serviceName")
    for text in (endpoint.ip_address, endpoint.ipv6_address):
        if text:
            # The blocks of a node that was garbage-collected may belong to another node by now.
            ipam.hold_block(reading, network, NodeName(endpoint.host), parse_address(text, field="ipAddress"))
    return reading.plan([put(kinds.ENDPOINT, endpoint)])


def plan_delete(reading: ReadSet, key: EndpointKey) -> tuple[model.Endpoint, Transaction]:
    """The deleted endpoint, and its commit, which frees all its addresses (W19)."""
    present = reading.get(kinds.ENDPOINT, *key)
    if present is None:
        raise NotFound(f"endpoint {key} does not exist")
    network = reading.get(kinds.NETWORK, key.tenant, key.network)
    freed = ipam.release(network, present.ip_address, present.ipv6_address) if network else []
    return present, reading.plan([Delete(kinds.ENDPOINT.store_key(*key)), *freed])


def plan_update(
    reading: ReadSet, key: EndpointKey, *, labels: Mapping[str, str], container_id: str, container_name: str
) -> tuple[model.Endpoint, Transaction]:
    """Change the labels (which select it for services), container id and container name of an endpoint."""
    present = reading.get(kinds.ENDPOINT, *key)
    if present is None:
        raise NotFound(f"endpoint {key} does not exist")
    changed = check(
        msgspec.structs.replace(present, labels=dict(labels), container_id=container_id, container_name=container_name)
    )
    return changed, reading.plan([] if changed == present else [put(kinds.ENDPOINT, changed)])


def plan_reserve(
    reading: ReadSet, network: model.Network, group: model.Group | None, *, asked: str, busy: Busy
) -> tuple[Address, Transaction]:
    """Reserve an address before its endpoint exists (`/plugin/allocAddress`); a requested one must be free (W17).

    `NotFound` if the network or group was deleted since the caller read it.
    """
    # Deleted and created again it may have another subnet.
    if reading.get(kinds.NETWORK, *network.key) != network:
        raise NotFound(f"network {network.key} was deleted just now")
    if group is not None and reading.get(kinds.GROUP, *group.key) is None:
        raise NotFound(f"group {group.key} was deleted just now")
    family = parse_address(asked, field="PreferredIPv4Address").family if asked else 4
    address = (
        parse_address(asked, field="PreferredIPv4Address")
        if asked
        else _choose(reading, network, group, family=family, busy=busy)
    )
    pool = reading.cluster.address_pool(network.key, family)
    # Unlike an endpoint, a reservation has no identity that could own the address already.
    if address.number in pool.holders:
        raise Conflict(
            f"address {address} is taken by {pool.holders[address.number].value.holder}", field="PreferredIPv4Address"
        )
    holder = ipam.reservation(group.key if group else network.key)
    writes = ipam.claim(reading, network, group, address=address, holder=holder, field="PreferredIPv4Address")
    return address, reading.plan(writes)


def plan_release(reading: ReadSet, network: model.Network, text: str) -> Transaction:
    """Release a reserved address; `Conflict` for one that an endpoint or service holds."""
    address = parse_address(text, field="IPv4Address")
    stored = reading.cluster.address_pool(network.key, address.family).holders.get(address.number)
    if stored is None:
        return Transaction()
    if not stored.value.holder.startswith(ipam.RESERVED):
        raise Conflict(f"address {address} is held by {stored.value.holder}: delete that instead", field="IPv4Address")
    reading.compare_revision(ipam.claim_key(network, address), stored.revision)
    return reading.plan(ipam.release(network, text))
