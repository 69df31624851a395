"""How a connection to a service is given to one of its backends, in nft's own language (docs/design/services.md).

Only the first packet of a connection comes here, before it is routed. What it asks for becomes a number, which says
how many backends there are and for how long clients are remembered (`spread_number`); a chain for each such number
draws the lot into `meta mark`. So a lookup costs the same with ten services and with thirty thousand, and none of the
large maps has verdicts: the kernel would go through all of them whenever a rule changes.

Policy judges later, when it is known who answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.adapters.netns.nft.policy_chains import INSIDE
from weft.domain.policy.model.protocols import PORTED, protocol_name

_COUNT_BITS = 12
# Who a workload seems to be that reaches itself through a service. Nobody has these: answers come by the way out.
HAIRPIN = {4: "169.254.1.1", 6: "100::1"}

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
# Ends the names of the maps and chains for those who come by the host, where they are served otherwise than pods.
OUTSIDE = "_outside"
_SIDES = ("", OUTSIDE)
_SIDED_TABLES = ("services", "backends", "tickets", "ticketed")
# The sets and maps whose elements are in `services`.
SERVICE_SETS = (
    *(f"{name}{side}{family}" for name in _SIDED_TABLES for side in _SIDES for family in (4, 6)),
    "vips4",
    "vips6",
)
ASKED, ANSWERED = "asked", "answered"
_MOST_CLIENTS = 1 << 18
_HASHES, _SEED, _IS_HASH = 0x7FFFFFFF, 0x77656674, 0x80000000
_MOST_COUNTS = 1 << 16
_COUNTED_FOR = "1h"


def spread_number(backends: int, affinity: int) -> int:
    """What the map of services says about a front."""
    return affinity << _COUNT_BITS | backends


def declarations() -> Iterator[str]:
    """The sets and maps that balancing consists of."""
    yield f"map clients {{ type mark : classid; flags dynamic,timeout; timeout 1d; size {_MOST_CLIENTS}; }}"
    for family, kind in _ADDRESS_TYPES.items():
        front = f"{kind} . inet_proto . inet_service"
        yield f"set vips{family} {{ type {kind}; }}"
        for side in _SIDES:
            yield f"map services{side}{family} {{ type {front} : mark; }}"
            yield f"map backends{side}{family} {{ type {front} . mark : {kind} . inet_service; }}"
            yield f"map tickets{side}{family} {{ type {front} . classid : classid; }}"
            yield f"map ticketed{side}{family} {{ type {front} . classid : {kind} . inet_service; }}"
            yield f"map spreads{side}{family} {{ type mark : verdict; }}"
        for name in (ASKED, ANSWERED):
            yield (
                f"set {name}{family} {{ type {kind} . {front} . {kind}; "
                f"flags dynamic,timeout; timeout {_COUNTED_FOR}; size {_MOST_COUNTS}; counter; }}"
            )


def chains() -> dict[str, list[str]]:
    """The rules by chain."""
    found = {
        "calls": ["type nat hook prerouting priority dstnat; policy accept;", *_by_family("call")],
        "own_calls": ["type nat hook output priority -100; policy accept;", *_by_family("call")],
        "leaving": [
            "type nat hook postrouting priority srcnat; policy accept;",
            "meta mark set 0 meta priority set none",  # the lot has been drawn, and others look at these
            *(
                f"ct status dnat {word} saddr . {word} daddr @ports_self{family} snat {word} to {HAIRPIN[family]}"
                for family, word in _WORDS.items()
            ),
        ],
        "unserved": ["meta l4proto tcp reject with tcp reset", "reject"],
        "count": [*_by_family("count")],
    }
    for family, word in _WORDS.items():
        front = _front(word)
        found |= {
            f"call{family}": [
                # The host itself is served as its pods are.
                f'iifname "{INSIDE}" {word} saddr != @own{family} meta mark set {front} '
                f"map @services{OUTSIDE}{family} goto serve{OUTSIDE}{family}",
                f"meta mark set {front} map @services{family} goto serve{family}",
                f"{word} daddr @vips{family} goto unserved",
            ],
            f"count{family}": [*_counts(family, word)],
        }
        for side in _SIDES:
            found |= _serving(word, f"{side}{family}")
    return found


def _serving(word: str, end: str) -> dict[str, list[str]]:
    return {
        f"serve{end}": [
            "meta mark 0 goto unserved",
            f"meta mark vmap @spreads{end}",
            *_translations(word, "meta mark", f"backends{end}"),
            "meta mark set 0",  # its backends have just become fewer: the first one is there
            *_translations(word, "meta mark", f"backends{end}"),
            "drop",
        ],
        f"resume{end}": [*_translations(word, "meta priority", f"ticketed{end}")],
    }


class BackendSelector(NamedTuple):
    """A number (`spread_number`) in use, and on which side: for pods, or `OUTSIDE`."""

    number: int
    side: str


def spread_commands(spreads: Iterable[BackendSelector], *, table: str) -> str:
    """What makes the chains for some numbers, whatever is there of them."""
    lines: list[str] = []
    for number, side in sorted(spreads):
        backends, affinity = number & (1 << _COUNT_BITS) - 1, number >> _COUNT_BITS
        for family, word in _WORDS.items():
            end = f"{side}{family}"
            name = f"spread{end}_{backends}_{affinity}"
            lines += [f"add chain inet {table} {name}", f"flush chain inet {table} {name}"]
            rules = (
                _remembering(end, word, backends, affinity)
                if affinity
                else [f"meta mark set numgen random mod {backends}"]
            )
            lines += [f"add rule inet {table} {name} {rule}" for rule in rules]
            lines.append(f"add element inet {table} spreads{end} {{ {number:#x} : jump {name} }}")
    return "".join(f"{line}\n" for line in lines)


def _remembering(end: str, word: str, backends: int, affinity: int) -> list[str]:
    """A client goes where it went before, if that is still there; else it draws, and is remembered.

    Client and front are known by a hash in the mark, as some versions of nft cannot write larger keys. Two that have
    the same one, which is rare, at worst follow each other.
    """
    front = _front(word)
    remember = f"update @clients {{ meta mark timeout {affinity}s : meta priority }} jump resume{end}"
    return [
        f"meta mark set jhash {word} saddr . {front} mod {_HASHES} seed {_SEED:#x} offset {_IS_HASH:#x}",
        f"meta priority set meta mark map @clients {remember}",
        "delete @clients { meta mark : meta priority }",  # what is there stays as it is, whatever it is updated to
        f"meta priority set numgen random mod {backends}",
        f"meta priority set {front} . meta priority map @tickets{end} {remember}",
        "meta priority set 0",
        f"meta priority set {front} . meta priority map @tickets{end} {remember}",
    ]


def _front(word: str) -> str:
    return f"{word} daddr . meta l4proto . th dport"


def _translations(word: str, number: str, name: str) -> Iterator[str]:
    # nft takes a target's port for one only where it has been told the protocol.
    for protocol in PORTED:
        yield f"meta l4proto {protocol_name(protocol)} dnat {word} to {_front(word)} . {number} map @{name}"


def _by_family(chain: str) -> Iterator[str]:
    for family in _WORDS:
        yield f"meta nfproto ipv{family} goto {chain}{family}"


def _counts(family: int, word: str) -> Iterator[str]:
    """Who asked which service, and who answered: packets and bytes of each direction."""
    who = (
        f"ct original {word} saddr . ct original {word} daddr . ct original protocol . ct original proto-dst . "
        f"ct reply {word} saddr"
    )
    for number in PORTED:
        for direction, name in (("original", ASKED), ("reply", ANSWERED)):
            yield (
                f"meta nfproto ipv{family} ct original protocol {protocol_name(number)} "
                f"ct direction {direction} update @{name}{family} {{ {who} }}"
            )
