"""Networks: a subnet that overlaps no other of its tenant, and a tag that is unique in the cluster."""

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

# Contiv shows a local VLAN for vxlan networks; it is never on the wire.
LOCAL_VLANS = (1, MAX_VLAN)


def put_network(reading: ReadSet, wanted: model.Network, present: model.Network | None) -> list[Write]:
    """A network is immutable; a request for the present one is fine."""
    if present is not None:
        _refuse_change(wanted, present)
        return []
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    # Contiv's plugins look up networks and groups in one name space.
    if reading.get(kinds.GROUP, wanted.tenant, wanted.name):
        raise Conflict(
            f"networkName {wanted.name!r} is the name of a group of the tenant: choose another", field="networkName"
        )
    for other in reading.all(kinds.NETWORK, wanted.tenant):
        _refuse_overlap(wanted, other)
    tags, writes = _take_tags(reading, wanted)
    return [put(kinds.NETWORK, msgspec.structs.replace(wanted, tags=tags)), *writes]


def _refuse_change(wanted: model.Network, present: model.Network) -> None:
    desired = msgspec.structs.replace(wanted, tags=present.tags)
    for attribute, member in zip(desired.__struct_fields__, desired.__struct_encode_fields__, strict=True):
        if getattr(desired, attribute) != getattr(present, attribute):
            raise Conflict(
                f"{member} of network {present.key} cannot change: delete and create the network", field=member
            )


def _refuse_overlap(wanted: model.Network, other: model.Network) -> None:
    for family, field in ((4, "subnet"), (6, "ipv6Subnet")):
        subnet, other_subnet = ipam.subnet_of(wanted, family), ipam.subnet_of(other, family)
        # By span, not by prefix: Contiv allows two ranges of one prefix as two networks.
        if subnet and other_subnet and subnet.span.overlaps(other_subnet.span):
            raise Conflict(f"{field} {subnet} overlaps {other_subnet} of network {other.key}", field=field)


def _take_tags(reading: ReadSet, wanted: model.Network) -> tuple[model.NetworkTags, list[Write]]:
    """The VLAN tag or VNI (requested, or the lowest free one) and, for vxlan, a local VLAN (contiv 5, O4)."""
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
    """`Conflict` while groups, services, endpoints, reserved addresses or address blocks of nodes use it.

    The nodes' own endpoints in an infra network do not count; they are deleted with it.
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
    reading.compare_prefix(kinds.ENDPOINT.store_prefix(present.tenant, present.name))
    workloads = [each for each in reading.cluster.endpoints(present.key) if not _is_host_endpoint(present, each)]
    if workloads:
        raise Conflict(
            f"network {present.key} has {len(workloads)} endpoints: delete them first",
            details={"endpoints": len(workloads)},
        )
    if present.nw_type != "infra":
        _refuse_allocations(reading, present)
    # Set at creation.
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
        *(_delete_host_endpoints(reading, present) if present.nw_type == "infra" else ()),
    ]


def _is_host_endpoint(network: model.Network, endpoint: model.Endpoint) -> bool:
    """Whether an endpoint is a node's own in an infra network (contiv 6.4)."""
    return network.nw_type == "infra" and endpoint.endpoint_id == endpoint.host


def _delete_host_endpoints(reading: ReadSet, network: model.Network) -> Iterator[Write]:
    # Deletion by prefix removes whatever is there, so nothing may be added between the plan and the commit.
    reading.compare_prefix(kinds.blocks_of(network.tenant, network.name))
    reading.compare_prefix(kinds.address_claims(network.tenant, network.name))
    yield DeleteAll(kinds.ENDPOINT.store_prefix(network.tenant, network.name))
    yield DeleteAll(kinds.address_claims(network.tenant, network.name))


def _refuse_allocations(reading: ReadSet, present: model.Network) -> None:
    reading.compare_prefix(kinds.address_claims(present.tenant, present.name))
    for family in (4, 6):
        holders = reading.cluster.address_pool(present.key, family).holders
        for stored in holders.values():
            raise Conflict(f"network {present.key} has addresses held by {stored.value.holder}: release them first")
    reading.compare_prefix(kinds.blocks_of(present.tenant, present.name))
    owners = sorted({stored.value.owner for stored in reading.cluster.blocks.get(present.key, {}).values()} - {""})
    if owners:
        raise Conflict(
            f"network {present.key} has address blocks with {', '.join(owners)}: they go with a node's last endpoint",
            details={"nodes": owners},
        )
