"""Balancing as a datapath carries it out: lookups by where a connection goes, made of small frozen parts.

A new connection to a front is given to one of its backends by lot. Where a client is to stay with its backend, the
ticket of the one it drew is remembered for it until it has been silent for the given time, or the backend goes. A front
without backends refuses at once, and so does all the rest of an address that has fronts.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import protocol_name


class FrontendKey(NamedTuple):
    """Where a service is asked. One that is asked `outside` counts before the other for what comes by the host."""

    address: Address
    protocol: int
    port: int
    outside: bool = False

    def __str__(self) -> str:
        where = " from outside" if self.outside else ""
        return f"{protocol_name(self.protocol)} {self.port} of {self.address}{where}"


class Backend(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """One of those that connections to a front may be given to, by its number from 0 on."""

    tenant: TenantName
    front: FrontendKey
    number: int
    address: Address
    port: int
    # What its clients are remembered by; 0 where nobody is.
    hash_slot: int = 0

    def __str__(self) -> str:
        return f"backend {self.number} of {self.front}: port {self.port} of {self.address}"


class Frontend(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """A front, how many backends it has, and for how many seconds a silent client is remembered (0: not at all)."""

    tenant: TenantName
    front: FrontendKey
    backends: int
    affinity: int = 0

    def __str__(self) -> str:
        return f"{self.front} with {self.backends} backends, remembering clients for {self.affinity} s"


class Vip(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """An address that is nothing but fronts."""

    tenant: TenantName
    address: Address

    def __str__(self) -> str:
        return f"service address {self.address}"


ServicePart = Backend | Frontend | Vip
