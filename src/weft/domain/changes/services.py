"""Services: an address of the network, taken at creation and kept until deletion."""

from __future__ import annotations

import msgspec

from weft.domain import ipam, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.commits import Delete, Write
from weft.domain.errors import Conflict
from weft.domain.planning import Reading, holder_of, put


def put_service(reading: Reading, wanted: model.Service, present: model.Service | None) -> list[Write]:
    """A change of ports or selectors keeps the address (S4); another ipAddress is taken before the old one is freed."""
    reading.require(kinds.TENANT, wanted.tenant, field="tenantName")
    network = reading.require(kinds.NETWORK, wanted.tenant, wanted.network, field="networkName")
    if present is not None and wanted.network != present.network:
        raise Conflict(
            f"networkName of service {wanted.name!r} cannot change: delete and create the service", field="networkName"
        )
    if present is not None and wanted.ip_address in {"", present.vip}:
        changed = msgspec.structs.replace(wanted, vip=present.vip)
        return [] if changed == present else [put(kinds.SERVICE, changed)]
    if wanted.ip_address:
        address = parse_address(wanted.ip_address, field="ipAddress", family=4)
    else:
        address = ipam.choose_address(reading.cluster, network, None, family=4)
    holder = holder_of(kinds.SERVICE, wanted)
    writes = ipam.claim(reading, network, None, address=address, holder=holder, field="ipAddress")
    freed = ipam.release(network, present.vip) if present is not None else []
    return [put(kinds.SERVICE, msgspec.structs.replace(wanted, vip=str(address))), *writes, *freed]


def delete_service(reading: Reading, present: model.Service) -> list[Write]:
    network = reading.get(kinds.NETWORK, present.tenant, present.network)
    freed = ipam.release(network, present.vip) if network else []
    return [Delete(kinds.SERVICE.store_key(present.tenant, present.name)), *freed]
