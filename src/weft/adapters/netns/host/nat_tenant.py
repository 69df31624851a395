"""The tenant's end of host access, in nft's own language and in entries of its table (docs/design/host.md).

A host's address means two things in a space: workloads call it, and it calls workloads of other nodes. Routes lead to
it by the way out. What answers the host of another node goes back as the call came, mostly by the overlay: it is marked
when it has been judged, and taken off the link at its very end (`HOME_BASE`), so that no other packet is asked about
it. Calls that came by the link, to a port of our host, have a label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.netns.nft.policy_chains import INSIDE, OVERLAY_PREFIX

# Of packets that go back by the overlay, from when they are judged until they are sent.
_HOMEWARD_MARK = 0x08000000
# The label, a bit by its number, of connections that were opened from beyond the link.
_BY_LINK = 1

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_NAMES = ("hosts", "own", "outward", "turns", "disguises", "aliases")
# The sets and maps whose elements are in `host_entries`.
HOST_SETS = tuple(f"{name}{family}" for name in _NAMES for family in (4, 6))
HOME_TABLE: Final = "weft"
# Of the table that belongs to the link: the devices by which the hosts of other nodes are answered.
HOMES: Final = ("homes4", "homes6")


def declarations() -> Iterator[str]:
    """The sets and maps that host access needs."""
    for family, kind in _ADDRESS_TYPES.items():
        yield f"set hosts{family} {{ type {kind}; }}"
        yield f"set own{family} {{ type {kind}; }}"
        for name in ("outward", "turns", "disguises"):
            yield f"map {name}{family} {{ type ifname : {kind}; }}"
        yield f"map aliases{family} {{ type {kind} : {kind}; }}"


def chains() -> dict[str, list[str]]:
    """The rules by chain."""
    return {
        "homeward": [
            f"ct direction reply ct original {word} saddr @hosts{family} ct label != {_BY_LINK} "
            f"meta mark set {_HOMEWARD_MARK:#x}"
            for family, word in _WORDS.items()
        ],
        "host_calls": [
            "type nat hook prerouting priority -105; policy accept;",
            f'iifname "{INSIDE}" ct label set {_BY_LINK}',
            *(
                f'iifname "{INSIDE}" dnat {word} to {word} daddr map @aliases{family}'
                for family, word in _WORDS.items()
            ),
        ],
        "way_out": [
            "type nat hook postrouting priority 105; policy accept;",
            *(rule for family, word in _WORDS.items() for rule in _guises(family, word)),
            *(
                f"meta nfproto ipv{family} snat {word} to oifname map @disguises{family}"
                for family, word in _WORDS.items()
            ),
        ],
    }


def _guises(family: int, word: str) -> Iterator[str]:
    """As whom those speak who came by the host, where who answers would look for them elsewhere.

    Another node knows only the host of this one; and what goes back to the host must not seem to be from beyond it.
    """
    for way, name in ((f"{OVERLAY_PREFIX}*", "outward"), (INSIDE, "turns")):
        yield (
            f'meta nfproto ipv{family} iifname "{INSIDE}" oifname "{way}" snat {word} to iifname map @{name}{family}'
        )


def _home_base() -> str:
    table = f"netdev {HOME_TABLE}"
    maps = (f"map homes{family} {{ type {kind} : iface_index; }}" for family, kind in _ADDRESS_TYPES.items())
    rules = (
        f"meta mark != {_HOMEWARD_MARK:#x} accept",
        "meta mark set 0",  # vxlan looks for its way by it too
        *(f"fwd {word} to {word} daddr device {word} daddr map @homes{family}" for family, word in _WORDS.items()),
        "drop",
    )
    lines = [
        f"add table {table}",
        f"table {table} {{",
        *maps,
        f'chain leaving {{ type filter hook egress device "{INSIDE}" priority 0; policy accept; }}',
        "}",
        f"flush chain {table} leaving",
        *(f"add rule {table} leaving {rule}" for rule in rules),
    ]
    return "\n".join(lines) + "\n"


# The commands that make the table of the link, which must be there, whatever is there of the table.
HOME_BASE: Final = _home_base()
HOME_REBUILD: Final = f"add table netdev {HOME_TABLE}\ndelete table netdev {HOME_TABLE}\n{HOME_BASE}"
