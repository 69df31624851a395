"""NodePort VIPs: private addresses per tenant, derived from its name, so the same on every node and after restarts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from weft.domain import kinds
from weft.domain.addresses import Address, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.ids import TenantName

# pvtSubnet is a /16. NodePort VIPs start at this offset; SNAT and DNAT addresses of overlapping tenants are below it.
FIRST_NODEPORT_VIP = 0xF000
# The last address of the subnet is its broadcast address.
_VIP_COUNT = 0x1000 - 1
_VIPS_V6 = 0xFD77_6566_7400_0002 << 64


def nodeport_vips(cluster: Cluster) -> dict[TenantName, tuple[Address, Address]]:
    """Return the v4 and v6 VIP of every tenant. On a v4 collision the later tenant gets the next free address."""
    base = parse_subnet_v4(cluster.global_settings().pvt_subnet, field="pvtSubnet").base + FIRST_NODEPORT_VIP
    return _assign_vips(base, (tenant.name for tenant in cluster.all(kinds.TENANT)))


def _assign_vips(base: int, tenants: Iterable[TenantName]) -> dict[TenantName, tuple[Address, Address]]:
    taken: set[int] = set()
    vips: dict[TenantName, tuple[Address, Address]] = {}
    for tenant in tenants:
        digest = int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big")
        number = digest % _VIP_COUNT
        # With more tenants than addresses the search would never end; then v4 VIPs are shared.
        while number in taken and len(taken) < _VIP_COUNT:
            number = (number + 1) % _VIP_COUNT
        taken.add(number)
        vips[tenant] = Address(4, base + number), Address(6, _VIPS_V6 | digest)
    return vips
