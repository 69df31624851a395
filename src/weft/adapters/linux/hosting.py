"""The tenant's end of host access, in nft's own language and in entries of its table (docs/design/host.md).

A host's address means two things in a space: workloads call it, and it calls workloads of other nodes. A call goes by
the way out. What answers the host of another node goes back by the overlay, as the call came: it is marked before it is
routed, and a table of its own has the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

INSIDE: Final = "wh0"
"""The tenant's end of its link to the host."""
HOMEWARD_MARK: Final = 0x08000000
"""Of packets that go back by the overlay, from before they are routed until they are judged or sent."""

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
HOST_SETS = tuple(f"{name}{family}" for name in ("hosts", "disguises", "aliases") for family in (4, 6))
"""The sets and maps whose elements are in `host_entries`."""


def declarations() -> Iterator[str]:
    """The sets and maps that host access needs."""
    for family, kind in _ADDRESS_TYPES.items():
        yield f"set hosts{family} {{ type {kind}; }}"
        yield f"map disguises{family} {{ type ifname : {kind}; }}"
        yield f"map aliases{family} {{ type {kind} : {kind}; }}"


def chains() -> dict[str, list[str]]:
    """The rules by chain."""
    return {
        "homeward": [
            "type filter hook prerouting priority mangle; policy accept;",
            *(
                f"ct direction reply ct original {word} saddr @hosts{family} meta mark set {HOMEWARD_MARK:#x}"
                for family, word in _WORDS.items()
            ),
        ],
        "host_calls": [
            "type nat hook prerouting priority -105; policy accept;",
            *(
                f'iifname "{INSIDE}" dnat {word} to {word} daddr map @aliases{family}'
                for family, word in _WORDS.items()
            ),
        ],
        "way_out": [
            "type nat hook postrouting priority 105; policy accept;",
            *(
                f"meta nfproto ipv{family} snat {word} to oifname map @disguises{family}"
                for family, word in _WORDS.items()
            ),
        ],
    }
