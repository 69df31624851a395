"""Host-access state items: routes and NAT between the host, the tenants and the world (`weft.domain.desired.state`).

One veth link connects a tenant netns to the host. The host sends from its own addresses, which policy knows on all
nodes. If a subnet belongs to a single tenant on a node, the host has a route to it. If subnets of tenants overlap, the
host reaches their workloads only through private addresses (`OverlapDnat`), and traffic from these workloads leaves
with the tenant's private address as its source (`TenantSnat`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.domain.addresses import Address, Subnet
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import FrontendSources
from weft.domain.policy.model.protocols import protocol_name


class HostLink(msgspec.Struct, frozen=True, gc=False):
    """The veth link between the host and a tenant netns, with the default route of the netns through it."""

    tenant: TenantName
    # The source addresses of the host, at most one per family.
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"link of tenant {self.tenant}"


class TenantSubnet(msgspec.Struct, frozen=True, gc=False):
    """A subnet of a tenant. Packets to unused addresses in it are dropped; they never take the default route."""

    tenant: TenantName
    subnet: Subnet
    # Whether the host has a route to it: not if another tenant or a host uses the same addresses.
    routed: bool

    def __str__(self) -> str:
        return f"subnet {self.subnet}"


class RemoteHostReturnRoute(msgspec.Struct, frozen=True, gc=False):
    """A route back to another host's address through the overlay, by which its packets arrive."""

    tenant: TenantName
    # The `encap_id` of the network: a VNI or a VLAN tag.
    vni: int
    vtep: str
    address: Address

    def __str__(self) -> str:
        return f"return route to {self.address} via {self.vtep}"


class TenantSnat(msgspec.Struct, frozen=True, gc=False):
    """The source address of a tenant's traffic to the host and the world if its subnets overlap another tenant's."""

    tenant: TenantName
    address: Address

    def __str__(self) -> str:
        return f"SNAT address {self.address}"


class OverlapDnat(msgspec.Struct, frozen=True, gc=False):
    """The private address by which the host reaches a workload whose subnet overlaps another tenant's."""

    tenant: TenantName
    address: Address
    workload: Address

    def __str__(self) -> str:
        return f"DNAT from {self.address} to {self.workload}"


class HostPort(msgspec.Struct, frozen=True, gc=False):
    """A host port that is DNATed to a workload. Without an address it is a port of every host address."""

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
    """Private addresses of a tenant, at most one per family, at which its services have their node ports.

    If the backend of a service is a host, traffic that came through the host returns to it with this source address.
    """

    tenant: TenantName
    addresses: tuple[Address, ...]

    def __str__(self) -> str:
        return f"NodePort VIP of tenant {self.tenant}"


class NodePort(msgspec.Struct, frozen=True, gc=False):
    """A host port that is DNATed to the same port of the tenant's `NodePortVip`."""

    tenant: TenantName
    protocol: int
    port: int

    def __str__(self) -> str:
        return f"node port {protocol_name(self.protocol)} {self.port}"


# From where an address is reachable: the host alone, tenants of this node too, or anywhere.
AddressScope = Literal["host", "tenants", "world"]


class ExternalAddress(msgspec.Struct, frozen=True, gc=False):
    """An address of a tenant's services to which the host has a route."""

    tenant: TenantName
    address: Address
    scope: AddressScope

    def __str__(self) -> str:
        return f"external address {self.address} for {self.scope}"


HostAccessItem = (
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


# Return routes live in the tenant netns only. Sources are checked wherever a frontend is translated: by the host too,
# if it has the address itself.
_HOST_SCOPED = (
    HostLink,
    TenantSubnet,
    TenantSnat,
    OverlapDnat,
    HostPort,
    NodePortVip,
    NodePort,
    ExternalAddress,
    FrontendSources,
)


def is_host_scoped(item: object) -> bool:
    """Return whether a state item lives in the host netns, and so does not vanish with the tenant netns."""
    return isinstance(item, _HOST_SCOPED)
