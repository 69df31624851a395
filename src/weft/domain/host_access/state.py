"""Host access as a datapath carries it out, made of small frozen parts (`weft.domain.desired.state`).

A tenant's space is joined to the host by one link. The host speaks from its own addresses, by which it is known in all
spaces of the cluster. Where a subnet is one tenant's alone on a node, the host has a route to it. Where tenants
overlap, the host knows them by private addresses only: a workload by its alias, and whoever calls from there by the
tenant's disguise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.domain.addresses import Address, Range, Subnet
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import protocol_name


class HostLink(msgspec.Struct, frozen=True, gc=False):
    """The way between the host and a tenant's space. Everything that is nobody's in there leaves by it."""

    tenant: TenantName
    # As whom the host speaks, one of a family at most.
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"link of tenant {self.tenant}"


class TenantSubnet(msgspec.Struct, frozen=True, gc=False):
    """A subnet of a tenant: nothing to an address in it that nobody has ever leaves the tenant's space."""

    tenant: TenantName
    subnet: Subnet
    # Whether the host has a route to it; not where the same addresses mean others too.
    routed: bool

    def __str__(self) -> str:
        return f"subnet {self.subnet}"


class RemoteHostReturnRoute(msgspec.Struct, frozen=True, gc=False):
    """An address as which another host calls: what answers it goes back by the overlay, as the call came."""

    tenant: TenantName
    # A network's `wire_number`.
    vni: int
    vtep: str
    address: Address

    def __str__(self) -> str:
        return f"way back to {self.address} by {self.vtep}"


class TenantSnat(msgspec.Struct, frozen=True, gc=False):
    """As whom workloads of a tenant call the host and the world, where their own addresses may mean others there."""

    tenant: TenantName
    address: Address

    def __str__(self) -> str:
        return f"disguise {self.address}"


class OverlapDnat(msgspec.Struct, frozen=True, gc=False):
    """As what the host knows a workload whose own address may mean others there."""

    tenant: TenantName
    address: Address
    workload: Address

    def __str__(self) -> str:
        return f"alias {self.address} of {self.workload}"


class HostPort(msgspec.Struct, frozen=True, gc=False):
    """A port of the host that leads to a workload. Without an address it is that of every address of the host."""

    tenant: TenantName
    family: int
    protocol: int
    port: int
    target: Address
    target_port: int
    address: Address | None = None

    def __str__(self) -> str:
        where = "any address" if self.address is None else str(self.address)
        return f"{protocol_name(self.protocol)} {self.port} of {where} to {self.target} port {self.target_port}"


class NodePortVip(msgspec.Struct, frozen=True, gc=False):
    """Private addresses of a tenant, one of a family at most, behind which its services are asked at node ports.

    What comes by the host and goes back to it, because a host answers for a service, speaks as its door.
    """

    tenant: TenantName
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"door of tenant {self.tenant}"


class NodePort(msgspec.Struct, frozen=True, gc=False):
    """A port of the host that is asked at the same number of the tenant's door."""

    tenant: TenantName
    protocol: int
    port: int

    def __str__(self) -> str:
        return f"node port {protocol_name(self.protocol)} {self.port}"


# Who gets to an address: the host alone, tenants of this node too, or everybody.
Audience = Literal["host", "tenants", "world"]


class ExternalAddress(msgspec.Struct, frozen=True, gc=False):
    """An address of a tenant's services, to which the host has a route."""

    tenant: TenantName
    address: Address
    scope: Audience
    # Where the world must ask from; None: from anywhere.
    sources: tuple[Range, ...] | None = None

    def __str__(self) -> str:
        return f"way of the {self.scope} to {self.address}"


HostPart = (
    HostLink
    | TenantSubnet
    | RemoteHostReturnRoute
    | TenantSnat
    | OverlapDnat
    | HostPort
    | NodePortVip
    | NodePort
    | ExternalAddress
)


_HOSTS = (HostLink, TenantSubnet, TenantSnat, OverlapDnat, HostPort, NodePortVip, NodePort, ExternalAddress)


def is_hosts(part: object) -> bool:
    """Whether a part is something of the host's own, and does not go with the tenant's space."""
    return isinstance(part, _HOSTS)
