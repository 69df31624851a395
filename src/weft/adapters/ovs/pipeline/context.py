"""What flow builders need to know of the node (`FlowContext`), and match fields and actions that they share (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from weft.adapters.ovs.openflow.actions import Action, Controller, SetField
from weft.adapters.ovs.pipeline.tables import VERDICT
from weft.domain.addresses import BITS, Address, range_to_prefixes
from weft.domain.desired.state import Prefix
from weft.domain.ids import TenantName

# linux/if_ether.h
ETH_P_IP, ETH_P_IPV6, ETH_P_ARP = 0x0800, 0x86DD, 0x0806
# By address family.
ETHER_TYPES: Mapping[int, int] = {4: ETH_P_IP, 6: ETH_P_IPV6}

# Bits of `ct_state` (ovs-fields(7)).
CS_NEW, CS_REPLY_DIR, CS_INVALID, CS_TRACKED = 0x01, 0x08, 0x10, 0x20

Conditions = dict[str, int | tuple[int, int]]
REPLY_DIRECTION: Conditions = {"ct_state": (CS_TRACKED | CS_REPLY_DIR, CS_TRACKED | CS_REPLY_DIR)}
# OVS accepts a match on the connection's addresses (ct_nw_src and the like) only together with such a `ct_state`.
CT_VALID = CS_TRACKED, CS_TRACKED | CS_INVALID


class FlowContext(msgspec.Struct, frozen=True):
    """Tenant IDs, OpenFlow ports by interface name, and the VTEP address of this node."""

    tenants: Mapping[TenantName, int]
    ports: Mapping[str, int]
    vtep: Address
    # OpenFlow port of the patch to the VLAN bridge; 0 without uplinks.
    trunk: int = 0


def drop_with_reason(reason: int) -> tuple[Action, ...]:
    """Drop a packet for a built-in reason, and send a copy to the agent for the drop log.

    The register carries the reason into the packet-in message.
    """
    return SetField(VERDICT, reason), Controller()


def mac_to_int(text: str) -> int:
    return int(text.replace(":", ""), 16)


def address_condition(family: int, *, v4: str, v6: str, prefix: Prefix) -> Conditions:
    """Match packets of a family whose field is in the prefix."""
    bits = BITS[family]
    mask = (1 << bits) - (1 << bits - prefix.length)
    return {"eth_type": ETHER_TYPES[family], (v4 if family == 4 else v6): (prefix.base, mask)}


def host_prefix(address: Address) -> Prefix:
    """The /32 or /128 prefix of an address."""
    return Prefix(address.family, address.number, BITS[address.family])


def range_to_masks(first: int, last: int, *, bits: int) -> Iterator[tuple[int, int]]:
    """Cover a range with the fewest pairs of value and mask, since OpenFlow cannot match ranges."""
    for base, host_bits in range_to_prefixes(first, last, bits=bits):
        yield base, (1 << bits) - (1 << host_bits)
