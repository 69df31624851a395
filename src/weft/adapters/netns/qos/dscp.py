"""The DSCP of packets from ports, v4 and v6: a verdict map leads from a port to the chain that sets its value.

There is a chain for each value that was ever asked for, and nothing at all in a space where none was. Where ports are
on segments all of it is in the table of the bridge family, as no other can tell ports apart.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from typing import Final

from weft.adapters.netns.nft.base import TABLE
from weft.adapters.netns.nft.bridge_filter import BRIDGE_TABLE
from weft.kernel.netlink.codec import Request, to_text
from weft.kernel.netlink.nft_set import (
    BRIDGE,
    INET,
    JUMP,
    Element,
    SetName,
    Verdict,
    drop_elements,
    interface,
    put_elements,
    read_elements,
)
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket

ROUTED_MARKS: Final = SetName(INET, TABLE, "dscp")
BRIDGED_MARKS: Final = SetName(BRIDGE, BRIDGE_TABLE, "dscp")
_TABLES = {ROUTED_MARKS: f"inet {TABLE}", BRIDGED_MARKS: f"bridge {BRIDGE_TABLE}"}
_CHAIN = "dscp"
_MANGLE = -150


def marking(values: Iterable[int], into: SetName) -> str:
    """The commands that make room for marks of these values, whatever is there already. Marks that stand stay."""
    table = _TABLES[into]
    return (
        f"add map {table} {into.name} {{ type ifname : verdict; }}\n"
        f"add chain {table} marking {{ type filter hook prerouting priority {_MANGLE}; policy accept; }}\n"
        f"flush chain {table} marking\n"
        f"add rule {table} marking iifname vmap @{into.name}\n"
    ) + "".join(
        f"add chain {table} {_CHAIN}{value}\n"
        f"flush chain {table} {_CHAIN}{value}\n"
        f"add rule {table} {_CHAIN}{value} ip dscp set {value}\n"
        f"add rule {table} {_CHAIN}{value} ip6 dscp set {value}\n"
        for value in sorted(values)
    )


def put_marks(marks: Mapping[str, int], into: SetName) -> list[Request]:
    """Set the DSCP of what comes from these ports, which have no mark yet."""
    return put_elements(
        into,
        [Element(key=interface(port), verdict=Verdict(JUMP, f"{_CHAIN}{value}")) for port, value in marks.items()],
    )


def drop_marks(ports: Iterable[str], out_of: SetName) -> list[Request]:
    """Leave alone what comes from these ports, which have a mark."""
    return drop_elements(out_of, [Element(key=interface(port)) for port in ports])


def read_marks(netfilter: NetlinkSocket, marks: SetName) -> dict[str, int]:
    """The DSCP of each port that has a mark."""
    try:
        elements = read_elements(netfilter, marks)
    except NetlinkError as refusal:
        if refusal.errno != errno.ENOENT:
            raise
        return {}  # nobody has asked for any
    return {
        to_text(element.key): int(element.verdict.chain.removeprefix(_CHAIN))
        for element in elements
        if element.verdict is not None
    }
