"""The tenant's end of host access, in nft's own language and in entries of its table (docs/design/host.md).

A host's address means two things in a space: workloads call it, and it calls workloads of other nodes. A call goes by
the way out. What answers the host of another node goes back as the call came, mostly by the overlay: it is marked
before it is routed, and a table of its own has the way. Calls that came by the link, to a port of our host, have a
label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.linux.judging import OVERLAY_PREFIX

INSIDE: Final = "wh0"
"""The tenant's end of its link to the host."""
HOMEWARD_MARK: Final = 0x08000000
"""Of packets that go back by the overlay, from before they are routed until they are judged or sent."""
_BY_LINK = 1
"""The label, a bit by its number, of connections that were opened from beyond the link."""

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_NAMES = ("hosts", "own", "outward", "turns", "disguises", "aliases")
HOST_SETS = tuple(f"{name}{family}" for name in _NAMES for family in (4, 6))
"""The sets and maps whose elements are in `host_entries`."""


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
            "type filter hook prerouting priority mangle; policy accept;",
            *(
                f"ct direction reply ct original {word} saddr @hosts{family} ct label != {_BY_LINK} "
                f"meta mark set {HOMEWARD_MARK:#x}"
                for family, word in _WORDS.items()
            ),
            f'iifname "{INSIDE}" ct state new ct label set {_BY_LINK}',
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
