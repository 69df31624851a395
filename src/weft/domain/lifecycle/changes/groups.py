"""Endpoint groups: endpoints of one network with common policies and profile, and maybe an address pool or VLAN tag."""

from __future__ import annotations

import msgspec

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import NetworkKey, StoreKey
from weft.domain.ipam import ipam
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.lifecycle.changes.tags import take_vlan
from weft.domain.store_types import NEVER, Delete, Write
from weft.domain.transaction import ReadSet, holder_of, put, put_claim

# 15 bits, as in Contiv's flow metadata. Ids are claims in the store: a counter would be lost with its process (W6).
GROUP_IDS = (1, (1 << 15) - 1)


def put_group(reading: ReadSet, wanted: model.Group, present: model.Group | None) -> list[Write]:
    """Network, address pool and VLAN tag are immutable (E7, O16); policies, profile and cfgdTag can change."""
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    for policy in wanted.policies:
        reading.require(kinds.POLICY, wanted.tenant, policy, field="policies")
    if wanted.net_profile:
        reading.require(kinds.PROFILE, wanted.tenant, wanted.net_profile, field="netProfile")
    if present is not None:
        for member, desired, stored in (
            ("networkName", wanted.network, present.network),
            ("ipPool", wanted.ip_pool, present.ip_pool),
            ("pktTag", wanted.pkt_tag, present.pkt_tag),
        ):
            if desired != stored:
                raise Conflict(
                    f"{member} of group {present.key} cannot change: delete and create the group", field=member
                )
        changed = msgspec.structs.replace(wanted, group_id=present.group_id)
        return [] if changed == present else [put(kinds.GROUP, changed)]
    network = reading.require(kinds.NETWORK, wanted.tenant, wanted.network, field="networkName")
    # Contiv's plugins look up networks and groups in one name space.
    if reading.get(kinds.NETWORK, wanted.tenant, wanted.name):
        raise Conflict(
            f"groupName {wanted.name!r} is the name of a network of the tenant: choose another", field="groupName"
        )
    if wanted.ip_pool:
        _check_pool(reading, network, wanted)
    number, write = _take_group_id(reading, wanted)
    tags = [_take_tag(reading, network, wanted)] if wanted.pkt_tag else []
    return [put(kinds.GROUP, msgspec.structs.replace(wanted, group_id=number)), write, *tags]


def _check_pool(reading: ReadSet, network: model.Network, wanted: model.Group) -> None:
    """The pool must be inside the network's usable addresses, and without any address in use (E6)."""
    pool, subnet = ipam.pool_of(wanted), ipam.subnet_of(network, 4)
    assert pool is not None
    assert subnet is not None
    if not subnet.usable.covers(pool):
        raise Invalid(
            f"ipPool {pool} is not inside the usable addresses {subnet.usable} of {network.name}", field="ipPool"
        )
    for other in reading.all(kinds.GROUP, wanted.tenant):
        other_pool = ipam.pool_of(other) if other.network == wanted.network else None
        if other_pool and other_pool.overlaps(pool):
            raise Conflict(f"ipPool {pool} overlaps {other_pool} of group {other.key}", field="ipPool")
    gateway = ipam.gateway_of(network, 4)
    if gateway and pool.holds(gateway):
        raise Conflict(f"ipPool {pool} contains the network's gateway {gateway}", field="ipPool")
    reading.compare_prefix(kinds.address_claims(network.tenant, network.name))
    claims = reading.cluster.address_pool(network.key, 4)
    used = claims.taken.next_taken(pool.first, pool.last)
    if used is not None:
        raise Conflict(f"ipPool {pool} contains an address held by {claims.holders[used].value.holder}", field="ipPool")
    # A block that a node takes at the same moment must not contain addresses of the pool.
    reading.compare_prefix(kinds.blocks_of(network.tenant, network.name))
    for block, stored in reading.cluster.blocks.get(network.key, {}).items():
        if (
            stored.value.owner
            and block.family == 4
            and block.number <= pool.last
            and pool.first < block.number + BLOCK_SIZE
        ):
            raise Conflict(f"ipPool {pool} overlaps an address block of node {stored.value.owner}", field="ipPool")


def _take_group_id(reading: ReadSet, wanted: model.Group) -> tuple[int, Write]:
    number = reading.cluster.number_pool("group-id").taken.next_free(*GROUP_IDS)
    if number is None:
        raise Exhausted(f"all {GROUP_IDS[1]} group ids are taken: delete groups that are not needed")
    key = StoreKey(kinds.number_claims("group-id") + str(number))
    reading.compare_revision(key, NEVER)
    return number, put_claim(key, holder_of(kinds.GROUP, wanted))


def _take_tag(reading: ReadSet, network: model.Network, wanted: model.Group) -> Write:
    if network.encap != "vlan":
        raise Invalid(
            f"pktTag is for groups of networks of encap vlan, and {network.name} is of {network.encap}", field="pktTag"
        )
    return take_vlan(reading, wanted=wanted.pkt_tag, holder=holder_of(kinds.GROUP, wanted))[1]


def delete_group(reading: ReadSet, present: model.Group) -> list[Write]:
    """`Conflict` while it has endpoints (E3) or reserved addresses. Rules that refer to it then match nothing (W23)."""
    reading.compare_prefix(kinds.ENDPOINT.store_prefix(present.tenant, present.network))
    count = sum(1 for _ in reading.cluster.group_members(present))
    if count:
        raise Conflict(f"group {present.key} has {count} endpoints: delete them first", details={"endpoints": count})
    reading.compare_prefix(kinds.address_claims(present.tenant, present.network))
    reserved = list(ipam.reserved_for(reading.cluster, NetworkKey(present.tenant, present.network), present.key))
    if reserved:
        raise Conflict(f"address {reserved[0]} is reserved for group {present.key}: release it first")
    numbers = {"group-id": present.group_id, "vlan": present.pkt_tag}
    return [
        Delete(kinds.GROUP.store_key(present.tenant, present.name)),
        *(Delete(StoreKey(kinds.number_claims(pool) + str(number))) for pool, number in numbers.items() if number),
    ]
