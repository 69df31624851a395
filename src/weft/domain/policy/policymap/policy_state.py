"""Policy state items: the lookup tables by which a datapath enforces policy (see `weft.domain.desired.state`).

The datapath maps the source and the destination address of a packet to numeric identities (`IpIdentity`, else
`CidrIdentity`, else 0). It then maps both identities, the protocol and the port to a verdict id (`PolicyEntry`). A
connection is checked against the egress entries of its source and, if they allow it, against the ingress entries of
its destination: on its first packet and again after every policy change. Identities and verdict ids are hashes of
their content, so they are the same on every node and after every restart.

Entries of one direction are looked up in this order; the first match decides:

1. for the pair (local, remote): a single port, a port range, a protocol, any traffic;
2. for the local identity alone (`remote` is None): the same four.

A local identity without an entry for any traffic has no rules in that direction, so the traffic is allowed.
"""

from __future__ import annotations

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Direction

# Flag in the identity of every workload. A packet to a port whose destination lacks it arrived before the port was
# ready.
WORKLOAD = 1 << 28
# Flag in the identity of an address inside a tenant subnet that belongs to no known endpoint. If it is a destination,
# its own node knows it and evaluates policy. If it is a source, its own node has evaluated egress.
UNKNOWN_IDENTITY = 1 << 29
# Flag in every verdict id that drops the packet. Datapaths test this one bit and need no table of verdicts.
VERDICT_DENY = 1 << 31


class IpIdentity(msgspec.Struct, frozen=True, gc=False):
    """The identity of one address."""

    tenant: TenantName
    address: Address
    identity: int

    def __str__(self) -> str:
        return f"identity {self.identity:#x} of {self.address}"


class CidrIdentity(msgspec.Struct, frozen=True, gc=False):
    """The identity of every address in a range that has no `IpIdentity`. Ranges do not overlap."""

    tenant: TenantName
    range: Range
    identity: int

    def __str__(self) -> str:
        return f"identity {self.identity:#x} of {self.range}"


class PolicyEntry(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """The verdict for some flows. Without `protocol` it covers all protocols; without `ports` all ports."""

    tenant: TenantName
    direction: Direction
    local: int
    # None matches any remote identity.
    remote: int | None
    verdict_id: int
    protocol: int | None = None
    # First and last port, both included.
    ports: tuple[int, int] | None = None

    def __str__(self) -> str:
        l4 = "" if self.protocol is None else f" protocol {self.protocol}"
        l4 += "" if self.ports is None else f" ports {self.ports[0]}-{self.ports[1]}"
        remote = "any" if self.remote is None else f"{self.remote:#x}"
        return f"{self.direction} entry local {self.local:#x} remote {remote}{l4}: verdict {self.verdict_id:#x}"


class VerdictCounter(msgspec.Struct, frozen=True, gc=False):
    """The counter of a verdict: packets if it denies, policy evaluations if it allows."""

    tenant: TenantName
    verdict_id: int

    def __str__(self) -> str:
        return f"counter of verdict {self.verdict_id:#x}"


PolicyItem = IpIdentity | CidrIdentity | PolicyEntry | VerdictCounter
