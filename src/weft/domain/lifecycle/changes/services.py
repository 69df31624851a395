"""Services: a VIP of each address family of the network, claimed at creation and kept until deletion."""

from __future__ import annotations

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Conflict, Invalid
from weft.domain.ipam import ipam
from weft.domain.store_types import Delete, Write
from weft.domain.transaction import ReadSet, holder_of, put


def put_service(reading: ReadSet, wanted: model.Service, present: model.Service | None) -> list[Write]:
    """A change of ports or selectors keeps the VIPs (S4). A new VIP is claimed in the commit that frees the old one."""
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    network = reading.require(kinds.NETWORK, wanted.tenant, wanted.network, field="networkName")
    if present is not None and wanted.network != present.network:
        raise Conflict(
            f"networkName of service {wanted.name!r} cannot change: delete and create the service", field="networkName"
        )
    writes: list[Write] = []
    current = (present.vip, present.ipv6_vip) if present else ("", "")
    vips: dict[int, str] = {}
    for family, requested, vip in zip((4, 6), (wanted.ip_address, wanted.ipv6_address), current, strict=True):
        vips[family] = vip
        # No request means "keep it": clients send the whole object without its VIP.
        if vip and requested in {"", vip}:
            continue
        field = "ipAddress" if family == 4 else "ipv6Address"
        if address := _choose(reading, network, requested, family=family, field=field):
            holder = holder_of(kinds.SERVICE, wanted)
            # The claim and the release are one commit: the service is never without a VIP.
            writes += ipam.claim(reading, network, None, address=address, holder=holder, field=field)
            writes += ipam.release(network, vip)
            vips[family] = str(address)
    changed = msgspec.structs.replace(wanted, vip=vips[4], ipv6_vip=vips[6])
    return [] if changed == present else [put(kinds.SERVICE, changed), *writes]


def _choose(reading: ReadSet, network: model.Network, requested: str, *, family: int, field: str) -> Address | None:
    """The requested address, or the lowest free one; None if the network has no subnet of the family."""
    if ipam.subnet_of(network, family) is not None:
        if requested:
            return parse_address(requested, field=field, family=family)
        return ipam.choose_address(reading.cluster, network, None, family=family)
    if requested:
        raise Invalid(
            f"{field} {requested}: network {network.key} has no IPv{family} subnet: leave it empty", field=field
        )
    return None


def delete_service(reading: ReadSet, present: model.Service) -> list[Write]:
    network = reading.get(kinds.NETWORK, present.tenant, present.network)
    freed = ipam.release(network, present.vip, present.ipv6_vip) if network else []
    return [Delete(kinds.SERVICE.store_key(present.tenant, present.name)), *freed]
