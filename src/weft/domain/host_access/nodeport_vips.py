"""The doors of tenants: private addresses made from their names, the same on every node and after every restart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from weft.domain import kinds
from weft.domain.addresses import Address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.ids import TenantName

# The private v4 addresses from this number on are doors; those before are for disguises and aliases.
FIRST_DOOR = 0xF000
_DOORS = 0x1000 - 1
_DOORS_V6 = 0xFD77_6566_7400_0002 << 64


def doors(cluster: Cluster) -> dict[TenantName, tuple[Address, Address]]:
    """The door of every tenant, v4 and v6. Where two names come to the same v4 address the later one gets the next."""
    base = parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").base + FIRST_DOOR
    return _doors(base, (tenant.name for tenant in cluster.all(kinds.TENANT)))


def _doors(base: int, tenants: Iterable[TenantName]) -> dict[TenantName, tuple[Address, Address]]:
    taken: set[int] = set()
    found: dict[TenantName, tuple[Address, Address]] = {}
    for tenant in tenants:
        digest = int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big")
        number = digest % _DOORS
        while number in taken and len(taken) < _DOORS:
            number = (number + 1) % _DOORS
        taken.add(number)
        found[tenant] = Address(4, base + number), Address(6, _DOORS_V6 | digest)
    return found
