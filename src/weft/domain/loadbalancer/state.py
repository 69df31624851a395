"""Load-balancer state items: frontends and backends as a datapath holds them.

The datapath picks a backend at random for each new connection to a frontend. With session affinity it stores the hash
slot of the chosen backend per client, until the client is idle for the affinity timeout or the backend is removed. A
frontend without backends rejects connections at once, and so do all other ports of a VIP.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import protocol_name


class FrontendKey(NamedTuple):
    """Address, protocol and port of a service. An `external` frontend takes precedence for traffic via the host."""

    address: Address
    protocol: int
    port: int
    # Only with `externalTrafficPolicy: Local`, where pods and external clients get different backends.
    external: bool = False

    def __str__(self) -> str:
        suffix = " (external)" if self.external else ""
        return f"{protocol_name(self.protocol)} {self.port} of {self.address}{suffix}"


class Backend(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """One backend of a frontend, numbered from 0."""

    tenant: TenantName
    frontend: FrontendKey
    # The datapath draws a random number below `Frontend.backends` and looks the backend up by it.
    number: int
    address: Address
    port: int
    # What the affinity table stores for the backend's clients; 0 without session affinity.
    hash_slot: int = 0

    def __str__(self) -> str:
        return f"backend {self.number} of {self.frontend}: port {self.port} of {self.address}"


class Frontend(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """A frontend with its number of backends, and its affinity timeout in seconds (0: no session affinity)."""

    tenant: TenantName
    frontend: FrontendKey
    backends: int
    affinity: int = 0

    def __str__(self) -> str:
        return f"{self.frontend} with {self.backends} backends and {self.affinity} s of session affinity"


class Vip(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """An address that has frontends only: connections to its other ports are rejected."""

    tenant: TenantName
    address: Address

    def __str__(self) -> str:
        return f"service address {self.address}"


class FrontendSources(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The only sources that may open connections to a frontend, be they pods, hosts or others; without any, nobody.

    They are compared before translation. A frontend without this item is open to every source.
    """

    tenant: TenantName
    frontend: FrontendKey
    sources: tuple[Range, ...]

    def __str__(self) -> str:
        return f"sources of {self.frontend}: {', '.join(map(str, self.sources)) or 'none'}"


ServiceItem = Backend | Frontend | Vip | FrontendSources
