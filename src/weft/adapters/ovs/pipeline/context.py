"""What the switch has given numbers to, and the words that flows about it share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from weft.adapters.ovs.openflow.actions import Action, Controller, SetField
from weft.adapters.ovs.pipeline.tables import OUTCOME
from weft.domain.addresses import BITS, Address
from weft.domain.desired.state import Prefix
from weft.domain.ids import TenantName

V4, V6, ARP = 0x0800, 0x86DD, 0x0806
# By family.
ETHER_TYPES: Mapping[int, int] = {4: V4, 6: V6}

# Bits of `ct_state`.
NEW, REPLY, INVALID, TRACKED = 0x01, 0x08, 0x10, 0x20

Conditions = dict[str, int | tuple[int, int]]
# What answers whoever opened the connection.
ANSWERS: Conditions = {"ct_state": (TRACKED | REPLY, TRACKED | REPLY)}


class FlowContext(msgspec.Struct, frozen=True):
    """The numbers of tenants and of ports by their interfaces' names, and where this node's tunnels end."""

    tenants: Mapping[TenantName, int]
    ports: Mapping[str, int]
    vtep: Address
    # The port that leads to the uplinks; 0: there is none.
    trunk: int = 0


def refused(reason: int) -> tuple[Action, ...]:
    """What becomes of a packet that is refused for a reason of our own (`weft.adapters.netns.nft.policy_chains`)."""
    return SetField(OUTCOME, reason), Controller()


def mac_number(text: str) -> int:
    return int(text.replace(":", ""), 16)


def has_connection() -> tuple[int, int]:
    """A `ct_state` of a packet whose connection is known, as it must be for its ends to be asked about."""
    return TRACKED, TRACKED | INVALID


def address_condition(family: int, *, v4: str, v6: str, prefix: Prefix) -> Conditions:
    """A packet of a family whose field has an address of the prefix."""
    bits = BITS[family]
    mask = (1 << bits) - (1 << bits - prefix.length)
    return {"eth_type": ETHER_TYPES[family], (v4 if family == 4 else v6): (prefix.base, mask)}


def prefix_of(address: Address) -> Prefix:
    return Prefix(address.family, address.number, BITS[address.family])


def blocks(first: int, last: int, *, bits: int) -> Iterator[tuple[int, int]]:
    """A range of numbers as the fewest values with masks that cover it."""
    while first <= last:
        size = first & -first or 1 << bits
        while size > last - first + 1:
            size >>= 1
        yield first, (1 << bits) - size
        first += size
