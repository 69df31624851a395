"""Policy as a datapath carries it out: lookups by number, made of small frozen parts (`weft.domain.desired.state`).

A packet's source and target become numbers (`IpIdentity`, else `CidrIdentity`, else 0), and the numbers with protocol and port become
an outcome (`PolicyEntry`). A connection meets the outcome of its source's egress rows and, when that lets it pass, of its
target's ingress rows, with its first packet and again after every change. A number means the same on every node and
after every restart, as it is made from what it stands for.

Rows of one direction are asked in this order, the first that fits decides:

1. of the pair (local, remote): one port, a range of ports, a protocol, everything;
2. of the local number alone (`remote` is None): the same four.

A local number without a row for everything has no rules in that direction: it lets pass.
"""

from __future__ import annotations

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Direction

# Set in the number of every workload. A packet to a port whose target has it not came before the port was ready.
WORKLOAD = 1 << 28
# Set in the numbers of addresses of the tenant's networks which nobody here has been heard of. Its own node, which
# knows it, judges what it says and what is said to it, or has done so already.
UNKNOWN_IDENTITY = 1 << 29
# Set in the number of every outcome that drops the packet.
VERDICT_DENY = 1 << 31


class IpIdentity(msgspec.Struct, frozen=True, gc=False):
    """Who is at an address."""

    tenant: TenantName
    address: Address
    number: int

    def __str__(self) -> str:
        return f"{self.address} as {self.number:#x}"


class CidrIdentity(msgspec.Struct, frozen=True, gc=False):
    """Who is at any address of a range for which no `IpIdentity` speaks. Ranges do not overlap."""

    tenant: TenantName
    range: Range
    number: int

    def __str__(self) -> str:
        return f"{self.range} as {self.number:#x}"


class PolicyEntry(msgspec.Struct, frozen=True, gc=False):
    """What becomes of the packets of some flows. Without a protocol it is about all of them, and so with ports."""

    tenant: TenantName
    direction: Direction
    local: int
    remote: int | None
    outcome: int
    protocol: int | None = None
    # First and last, both included.
    ports: tuple[int, int] | None = None

    def __str__(self) -> str:
        service = "" if self.protocol is None else f" protocol {self.protocol}"
        service += "" if self.ports is None else f" ports {self.ports[0]}-{self.ports[1]}"
        remote = "anyone" if self.remote is None else f"{self.remote:#x}"
        return f"{self.direction} of {self.local:#x} with {remote}{service} is {self.outcome:#x}"


class VerdictCounter(msgspec.Struct, frozen=True, gc=False):
    """The count of an outcome: of packets where it refuses, of judgements where it lets pass."""

    tenant: TenantName
    outcome: int

    def __str__(self) -> str:
        return f"count of {self.outcome:#x}"


PolicyPart = IpIdentity | CidrIdentity | PolicyEntry | VerdictCounter
