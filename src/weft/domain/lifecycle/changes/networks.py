"""Networks: a subnet that overlaps no other of its tenant, a tag that nobody else has."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.domain import kinds, model
from weft.domain.errors import Conflict
from weft.domain.ids import StoreKey
from weft.domain.ipam import ipam
from weft.domain.lifecycle.changes.tags import take_number, take_vlan
from weft.domain.store_types import Delete, DeleteAll, Write
from weft.domain.transaction import ReadSet, holder_of, put
from weft.domain.validation import MAX_VLAN, MAX_VNI, MAX_VNI_SPAN, parse_tag_range

LOCAL_VLANS = (1, MAX_VLAN)


def put_network(reading: ReadSet, wanted: model.Network, present: model.Network | None) -> list[Write]:
    """A network never changes; asking for the one that is there is fine."""
    if present is not None:
        _refuse_change(wanted, present)
        return []
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    if reading.get(kinds.GROUP, wanted.tenant, wanted.name):
        raise Conflict(
            f"networkName {wanted.name!r} is the name of a group of the tenant: choose another", field="networkName"
        )
    for other in reading.all(kinds.NETWORK, wanted.tenant):
        _refuse_overlap(wanted, other)
    tags, writes = _take_tags(reading, wanted)
    return [put(kinds.NETWORK, msgspec.structs.replace(wanted, tags=tags)), *writes]


def _refuse_change(wanted: model.Network, present: model.Network) -> None:
    given = msgspec.structs.replace(wanted, tags=present.tags)
    for attribute, member in zip(given.__struct_fields__, given.__struct_encode_fields__, strict=True):
        if getattr(given, attribute) != getattr(present, attribute):
            raise Conflict(
                f"{member} of network {present.key} cannot change: delete and create the network", field=member
            )


def _refuse_overlap(wanted: model.Network, other: model.Network) -> None:
    for family, field in ((4, "subnet"), (6, "ipv6Subnet")):
        mine, theirs = ipam.subnet_of(wanted, family), ipam.subnet_of(other, family)
        if mine and theirs and mine.span.overlaps(theirs.span):
            raise Conflict(f"{field} {mine} overlaps {theirs} of network {other.key}", field=field)


def _take_tags(reading: ReadSet, wanted: model.Network) -> tuple[model.NetworkTags, list[Write]]:
    """The wire tag (asked for or the lowest free one) and, for vxlan, a local vlan (contiv 5, O4)."""
    holder = holder_of(kinds.NETWORK, wanted)
    if wanted.encap == "vlan":
        vlan, write = take_vlan(reading, wanted=wanted.pkt_tag, holder=holder)
        return model.NetworkTags(vlan=vlan), [write]
    settings = reading.get(kinds.GLOBAL, "global") or model.Global()
    span = parse_tag_range(settings.vxlans, field="vxlans", highest=MAX_VNI, widest=MAX_VNI_SPAN)
    vni, write = take_number(reading, "vni", span, wanted=wanted.pkt_tag, holder=holder)
    local, local_write = take_number(reading, "local-vlan", LOCAL_VLANS, wanted=0, holder=holder)
    return model.NetworkTags(vlan=local, vni=vni), [write, local_write]


def delete_network(reading: ReadSet, present: model.Network) -> list[Write]:
    """Refused while groups, services, endpoints, reserved addresses or nodes' address blocks need it.

    What nodes themselves have in an infra network does not count, and goes with it.
    """
    users = [
        kinds.GROUP.key_text(group)
        for group in reading.all(kinds.GROUP, present.tenant)
        if group.network == present.name
    ]
    users += [
        kinds.SERVICE.key_text(service)
        for service in reading.all(kinds.SERVICE, present.tenant)
        if service.network == present.name
    ]
    if users:
        raise Conflict(
            f"network {present.key} is used by {', '.join(users[:5])}: delete them first",
            details={"users": users[:100]},
        )
    reading.quiet(kinds.ENDPOINT.store_prefix(present.tenant, present.name))
    guests = [each for each in reading.cluster.endpoints(present.key) if not _is_hosts(present, each)]
    if guests:
        raise Conflict(
            f"network {present.key} has {len(guests)} endpoints: delete them first", details={"endpoints": len(guests)}
        )
    if present.nw_type != "infra":
        _refuse_leftovers(reading, present)
    assert present.tags is not None
    tags = (
        {"vlan": present.tags.vlan}
        if present.encap == "vlan"
        else {"vni": present.tags.vni, "local-vlan": present.tags.vlan}
    )
    return [
        Delete(kinds.NETWORK.store_key(present.tenant, present.name)),
        *(Delete(StoreKey(kinds.number_claims(pool) + str(number))) for pool, number in tags.items()),
        DeleteAll(kinds.blocks_of(present.tenant, present.name)),
        *(_hosts_leave(reading, present) if present.nw_type == "infra" else ()),
    ]


def _is_hosts(network: model.Network, endpoint: model.Endpoint) -> bool:
    """Whether an endpoint is a node's own in an infra network, which goes with the network (contiv 6.4)."""
    return network.nw_type == "infra" and endpoint.endpoint_id == endpoint.host


def _hosts_leave(reading: ReadSet, network: model.Network) -> Iterator[Write]:
    reading.quiet(kinds.blocks_of(network.tenant, network.name))
    reading.quiet(kinds.address_claims(network.tenant, network.name))
    yield DeleteAll(kinds.ENDPOINT.store_prefix(network.tenant, network.name))
    yield DeleteAll(kinds.address_claims(network.tenant, network.name))


def _refuse_leftovers(reading: ReadSet, present: model.Network) -> None:
    reading.quiet(kinds.address_claims(present.tenant, present.name))
    for family in (4, 6):
        holders = reading.cluster.address_pool(present.key, family).holders
        for stored in holders.values():
            raise Conflict(f"network {present.key} has addresses held by {stored.value.holder}: release them first")
    reading.quiet(kinds.blocks_of(present.tenant, present.name))
    owners = sorted({stored.value.owner for stored in reading.cluster.blocks.get(present.key, {}).values()} - {""})
    if owners:
        raise Conflict(
            f"network {present.key} has address blocks with {', '.join(owners)}: they go with a node's last endpoint",
            details={"nodes": owners},
        )
