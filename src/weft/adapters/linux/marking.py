"""The DSCP of packets from ports, v4 and v6: a verdict map leads from a port to the chain that sets its value.

There is a chain for each value that was ever asked for, and nothing at all in a space where none was.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from weft.adapters.linux.elements import (
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
from weft.adapters.linux.netlink import NetlinkSocket, Refused
from weft.adapters.linux.ruleset import TABLE
from weft.adapters.linux.wire import Request, to_text

_MARKS = SetName(INET, TABLE, "dscp")
_CHAIN = "dscp"
_BASE = f"""\
add map inet {TABLE} {_MARKS.name} {{ type ifname : verdict; }}
add chain inet {TABLE} marking {{ type filter hook prerouting priority mangle; policy accept; }}
flush chain inet {TABLE} marking
add rule inet {TABLE} marking iifname vmap @{_MARKS.name}
"""


def marking(values: Iterable[int]) -> str:
    """The commands that make room for marks of these values, whatever is there already. Marks that stand stay."""
    return _BASE + "".join(
        f"add chain inet {TABLE} {_CHAIN}{value}\n"
        f"flush chain inet {TABLE} {_CHAIN}{value}\n"
        f"add rule inet {TABLE} {_CHAIN}{value} ip dscp set {value}\n"
        f"add rule inet {TABLE} {_CHAIN}{value} ip6 dscp set {value}\n"
        for value in sorted(values)
    )


def put_marks(marks: Mapping[str, int]) -> list[Request]:
    """Set the DSCP of what comes from these ports, which have no mark yet."""
    return put_elements(
        _MARKS,
        [Element(key=interface(port), verdict=Verdict(JUMP, f"{_CHAIN}{value}")) for port, value in marks.items()],
    )


def drop_marks(ports: Iterable[str]) -> list[Request]:
    """Leave alone what comes from these ports, which have a mark."""
    return drop_elements(_MARKS, [Element(key=interface(port)) for port in ports])


def read_marks(netfilter: NetlinkSocket) -> dict[str, int]:
    """The DSCP of each port that has a mark."""
    try:
        elements = read_elements(netfilter, _MARKS)
    except Refused as refusal:
        if refusal.errno != errno.ENOENT:
            raise
        return {}  # nobody has asked for any
    return {
        to_text(element.key): int(element.verdict.chain.removeprefix(_CHAIN))
        for element in elements
        if element.verdict is not None
    }
