"""How a connection to a service is given to one of its backends, in nft's own language (docs/design/services.md).

Only the first packet of a connection comes here, before it is routed. What it asks for becomes a number, which says
how many backends there are and for how long clients are remembered (`spread_number`); a chain for each such number
draws the lot into `meta mark`. So a lookup costs the same with ten services and with thirty thousand, and none of the
large maps has verdicts: the kernel would go through all of them whenever a rule changes.

Policy judges later, when it is known who answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.domain.policy.protocols import PORTED, protocol_name

_COUNT_BITS = 12
HAIRPIN = {4: "169.254.1.1", 6: "100::1"}
"""Who a workload seems to be that reaches itself through a service. Nobody has these: answers come by the way out."""

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_FAMILY_TABLES = ("services", "backends", "tickets", "ticketed", "vips")
SERVICE_SETS = tuple(f"{name}{family}" for name in _FAMILY_TABLES for family in (4, 6))
"""The sets and maps whose elements are in `services`."""
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
        yield f"map services{family} {{ type {front} : mark; }}"
        yield f"map backends{family} {{ type {front} . mark : {kind} . inet_service; }}"
        yield f"map tickets{family} {{ type {front} . classid : classid; }}"
        yield f"map ticketed{family} {{ type {front} . classid : {kind} . inet_service; }}"
        yield f"map spreads{family} {{ type mark : verdict; }}"
        yield f"set vips{family} {{ type {kind}; }}"
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
                f"meta mark set {front} map @services{family} goto serve{family}",
                f"{word} daddr @vips{family} goto unserved",
            ],
            f"serve{family}": [
                "meta mark 0 goto unserved",
                f"meta mark vmap @spreads{family}",
                *_translations(word, "meta mark", f"backends{family}"),
                "meta mark set 0",  # its backends have just become fewer: the first one is there
                *_translations(word, "meta mark", f"backends{family}"),
                "drop",
            ],
            f"resume{family}": [*_translations(word, "meta priority", f"ticketed{family}")],
            f"count{family}": [*_counts(family, word)],
        }
    return found


def spread_commands(numbers: Iterable[int], *, table: str) -> str:
    """What makes the chains for some numbers, whatever is there of them."""
    lines: list[str] = []
    for number in sorted(numbers):
        backends, affinity = number & (1 << _COUNT_BITS) - 1, number >> _COUNT_BITS
        for family, word in _WORDS.items():
            name = f"spread{family}_{backends}_{affinity}"
            lines += [f"add chain inet {table} {name}", f"flush chain inet {table} {name}"]
            rules = (
                _remembering(family, word, backends, affinity)
                if affinity
                else [f"meta mark set numgen random mod {backends}"]
            )
            lines += [f"add rule inet {table} {name} {rule}" for rule in rules]
            lines.append(f"add element inet {table} spreads{family} {{ {number:#x} : jump {name} }}")
    return "".join(f"{line}\n" for line in lines)


def _remembering(family: int, word: str, backends: int, affinity: int) -> list[str]:
    """A client goes where it went before, if that is still there; else it draws, and is remembered.

    Client and front are known by a hash in the mark, as some versions of nft cannot write larger keys. Two that have
    the same one, which is rare, at worst follow each other.
    """
    front = _front(word)
    remember = f"update @clients {{ meta mark timeout {affinity}s : meta priority }} jump resume{family}"
    return [
        f"meta mark set jhash {word} saddr . {front} mod {_HASHES} seed {_SEED:#x} offset {_IS_HASH:#x}",
        f"meta priority set meta mark map @clients {remember}",
        "delete @clients { meta mark : meta priority }",  # what is there stays as it is, whatever it is updated to
        f"meta priority set numgen random mod {backends}",
        f"meta priority set {front} . meta priority map @tickets{family} {remember}",
        "meta priority set 0",
        f"meta priority set {front} . meta priority map @tickets{family} {remember}",
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
