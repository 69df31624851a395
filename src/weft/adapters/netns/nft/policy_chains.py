"""How a packet is judged, as chains and maps in nft's own language (docs/design/linux-policy.md has the picture).

A connection is judged by its two ends, whichever packet of it comes: the source of its first direction asks, the source
of its reply direction answers in the end, wherever addresses are translated. So replies and ICMP errors pass exactly as
long as the connection may be opened anew, and a rule that goes takes its connections along. While a packet is judged,
`meta mark` has the number of who asks and then the outcome, `meta priority` has the number of who answers.

A connection that passes gets the stamp of the present policy (`stamps`), and is not judged again while that is valid.
Sets change under a packet that is being judged, so it may have met a half of a change: then its stamp is an old one at
the next hook, where the new rules judge it again. Who is overtaken there too is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.domain.policy.model.protocols import PORTED, protocol_name
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, VERDICT_DENY, WORKLOAD

PORT_PREFIX = "wp"
OVERLAY_PREFIX = "wx"
BRIDGE_PREFIX = "wb"

# The tenant's end of its link to the host.
INSIDE: Final = "wh0"

KNOWN, STAMP, STAMP_WATCHED = "known", "stamp", "stamp_watched"
# What follows the hooks of what is forwarded, where the stamp of a packet's connection is not the present one. The
# rules of these hooks and of the three chains above come and go with the stamp (`stamps`).
UNKNOWN_CHAINS: Final = {"forward": "unknown", "forward_again": "unknown_again", "forward_sure": "unknown_sure"}

# The nflog group that is told of refused packets.
DROP_GROUP = 87

# Beyond every outcome: those have at most the highest of these bits.
_OWN_REASON = 0xF0000000
SPOOFED, ROUTER, INVALID, TRANSIT, NOT_READY, UNKNOWN, UNSURE, BETWEEN = (
    _OWN_REASON | number for number in range(1, 9)
)
REASONS: Final = {
    SPOOFED: "weft/spoofed",
    ROUTER: "weft/router",
    INVALID: "weft/invalid",
    TRANSIT: "weft/transit",
    NOT_READY: "weft/not-ready",
    UNKNOWN: "weft/stranger",
    UNSURE: "weft/unsure",
    BETWEEN: "weft/other-network",
}
# The mark, with more of it, of packets that pass a segment and are not judged yet (`bridging`).
BRIDGED: Final = 0x01000000

# The hop limit that says: who sent this on did not know its target. Nothing else that was forwarded has so many.
UNJUDGED: Final = 255

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_HOP_LIMITS = ("ip ttl", "ip6 hoplimit")
_SERVICE_TYPES = {
    "port": " . inet_proto . inet_service",
    "ports": " . inet_proto . inet_service",
    "protocol": " . inet_proto",
    "all": "",
}
_ASKS, _ANSWERS = ("meta mark", "mark"), ("meta priority", "classid")
# The local and the remote end in each direction: where its number is, and of what type nft takes that to be.
_ENDS = {Direction.EGRESS: (_ASKS, _ANSWERS), Direction.INGRESS: (_ANSWERS, _ASKS)}
# Where the number of each end goes, and where its address is.
ADDRESS_ENDS: Final = {
    "asks": (_ASKS[0], "ct original {word} saddr"),
    "answers": (_ANSWERS[0], "ct reply {word} saddr"),
}


def refusal(reason: int) -> str:
    """The end of a rule that refuses for a reason of our own."""
    return f"meta mark set {reason:#x} goto refuse_own"


_JUDGE = ("meta nfproto ipv4 goto judge4", "meta nfproto ipv6 goto judge6")
# What an earlier hook leaves to the target's node: not stamped, as nobody has judged it.
_PASSED_ON = tuple(f'oifname "{OVERLAY_PREFIX}*" {hops} {UNJUDGED} accept' for hops in _HOP_LIMITS)
_ON_SEGMENT = f'iifname "{BRIDGE_PREFIX}*" oifname "{BRIDGE_PREFIX}*"'
_LEAD_HOME = f'oifname "{INSIDE}" jump homeward'
_DISCOVERY = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"
_INPUT = (
    'iifname "lo" accept',
    f"jump {KNOWN}",
    f"{_DISCOVERY} accept",
    f"ct state invalid,untracked {refusal(INVALID)}",
    "ct direction reply accept",
    f'iifname "{BRIDGE_PREFIX}*" fib daddr type local fib daddr . iif type != local {refusal(BETWEEN)}',
    # Who may ask what is for netdns to say: the names of a tenant are for all of its workloads.
    *(f'iifname "{prefix}*" meta l4proto {{ tcp, udp }} th dport 53 accept' for prefix in (PORT_PREFIX, BRIDGE_PREFIX)),
)


def map_name(direction: Direction, *, paired: bool, service: str) -> str:
    """The map of the rows of a direction, of a pair or of anyone, for a port, ports, a protocol or all services."""
    return f"{direction}_{'pair' if paired else 'any'}_{service}"


def policed_name(direction: Direction) -> str:
    """The set of the numbers that have rules in a direction."""
    return f"{direction}_policed"


def pair_key(direction: Direction, *, paired: bool) -> str:
    """What the rows of a direction are found by, besides the service."""
    (local, _), (remote, _) = _ENDS[direction]
    return f"{local} . {remote}" if paired else local


def ports_then(direction: Direction, family: int) -> str:
    """The chain for those who have met a row of a direction."""
    return f"egress_met{family}" if direction is Direction.EGRESS else "ingress_met"


def declarations() -> Iterator[str]:
    """The sets and maps that policy consists of; their elements are in `policy`."""
    for family, kind in _ADDRESS_TYPES.items():
        for number, (_, number_type) in (("asks", _ASKS), ("answers", _ANSWERS)):
            for name in ("who", "spot", "where"):
                yield f"map {name}_{number}{family} {{ type {kind} : {number_type}; }}"
    for direction, ((_, local), (_, remote)) in _ENDS.items():
        yield f"set {policed_name(direction)} {{ type {local}; }}"
        for paired, numbers in ((True, f"{local} . {remote}"), (False, local)):
            for service, service_type in _SERVICE_TYPES.items():
                name = map_name(direction, paired=paired, service=service)
                yield f"map {name} {{ type {numbers}{service_type} : mark; }}"
    yield "set tallies { type mark; counter; }"
    yield "set reasons { type mark; counter; }"


def chains() -> dict[str, list[str]]:
    """The rules by chain."""
    found = {
        "forward": ["type filter hook forward priority filter; policy drop;"],
        "forward_again": ["type filter hook forward priority filter + 1; policy drop;"],
        "forward_sure": ["type filter hook forward priority filter + 2; policy drop;"],
        "unknown": [
            "ct status dnat jump count",
            _LEAD_HOME,
            f"jump {KNOWN}",
            f"{_ON_SEGMENT} meta mark & {BRIDGED:#x} != 0 {_DISCOVERY} accept",
            f"ct state invalid,untracked {refusal(INVALID)}",
            f"{_ON_SEGMENT} jump segment",
            f'iifname "{OVERLAY_PREFIX}*" oifname "{OVERLAY_PREFIX}*" {refusal(TRANSIT)}',
            *_JUDGE,
        ],
        "unknown_again": [f"jump {KNOWN}", f"{_ON_SEGMENT} {_DISCOVERY} accept", *_PASSED_ON, *_JUDGE],
        "unknown_sure": [
            f"{_ON_SEGMENT} meta mark set 0",  # it has been judged (`bridging`)
            f"jump {KNOWN}",
            f"{_ON_SEGMENT} {_DISCOVERY} accept",
            *_PASSED_ON,
            refusal(UNSURE),
        ],
        "input": ["type filter hook input priority filter; policy drop;", *_INPUT, *_JUDGE],
        "input_again": ["type filter hook input priority filter + 1; policy drop;", *_INPUT, *_JUDGE],
        "input_sure": ["type filter hook input priority filter + 2; policy drop;", *_INPUT, refusal(UNSURE)],
        "forth": _places(speaks="meta mark", hears="meta priority"),
        "back": _places(speaks="meta priority", hears="meta mark"),
        # One hop fewer is left where it is forwarded again. Two nodes that know one end each judge nothing.
        "from_stranger": [*(f"{hops} >= {UNJUDGED - 1} {refusal(UNKNOWN)}" for hops in _HOP_LIMITS), "goto pass"],
        "to_stranger": [f"meta mark set 0 meta priority set none {hops} set {UNJUDGED} accept" for hops in _HOP_LIMITS],
        "ingress_met": ["meta mark @tallies", f"meta mark & {VERDICT_DENY:#x} != 0 goto refuse", "goto pass"],
        "refuse_own": ["meta mark @reasons", "goto refuse"],
        "refuse": [f"limit rate 200/second burst 400 packets log group {DROP_GROUP} snaplen 128", "drop"],
        # Vxlan looks for its way by the mark, and queues for theirs by the priority.
        "pass": [
            "meta mark set 0 meta priority set none",
            "ct status dnat goto watch",
            *(f"ct original {word} saddr @hosts{family} goto watch" for family, word in _WORDS.items()),
            *(f'{way} "{BRIDGE_PREFIX}*" goto watch' for way in ("iifname", "oifname")),
            f"goto {STAMP}",
        ],
        # Who asked a service is counted, who answers a host of another node is led home, and bridges note things.
        "watch": [_LEAD_HOME, f"goto {STAMP_WATCHED}"],
    }
    for family, word in _WORDS.items():
        found |= _family_chains(family, word)
    return found


def _family_chains(family: int, word: str) -> dict[str, list[str]]:
    return {
        f"judge{family}": _number("asks", family, word, then=f"judge_target{family}"),
        f"judge_target{family}": _number("answers", family, word, then=f"judge_ends{family}"),
        f"judge_ends{family}": [
            "ct direction original jump forth",
            "ct direction reply jump back",
            f"meta mark @{policed_name(Direction.EGRESS)} goto egress{family}",
            f"meta priority @{policed_name(Direction.INGRESS)} goto ingress{family}",
            "goto pass",
        ],
        f"egress{family}": list(_lookups(Direction.EGRESS, family)),
        f"egress_met{family}": [
            "meta mark @tallies",
            f"meta mark & {VERDICT_DENY:#x} != 0 goto refuse",
            f"meta priority @{policed_name(Direction.INGRESS)} goto judge_again{family}",
            "goto pass",
        ],
        f"judge_again{family}": _number("asks", family, word, then=f"ingress{family}"),
        f"ingress{family}": list(_lookups(Direction.INGRESS, family)),
    }


def _number(end: str, family: int, word: str, *, then: str) -> list[str]:
    """Who is at the address of an end: known, alone in a range, in a prefix (`ways`), or nobody of whom is spoken."""
    into, where = ADDRESS_ENDS[end]
    address = where.format(word=word)
    return [
        *(f"{into} set {address} map @{name}_{end}{family} goto {then}" for name in ("who", "spot")),
        f"{into} set 0",
        f"jump where_{end}{family}",
        f"goto {then}",
    ]


def _places(*, speaks: str, hears: str) -> list[str]:
    """What is decided by where a packet comes from and goes to, and by the numbers of who speaks and who hears it."""
    return [
        # What leaves a port after its owner has left is nobody's, and not a stranger's.
        f'iifname "{PORT_PREFIX}*" {speaks} & {WORKLOAD:#x} == 0 {refusal(NOT_READY)}',
        f'oifname "{PORT_PREFIX}*" {hears} & {WORKLOAD:#x} == 0 {refusal(NOT_READY)}',
        f'iifname "{OVERLAY_PREFIX}*" {speaks} & {UNKNOWN_IDENTITY:#x} != 0 goto from_stranger',
        f'oifname "{OVERLAY_PREFIX}*" {hears} & {UNKNOWN_IDENTITY:#x} != 0 goto to_stranger',
        # On a segment nobody is found before he is known, and strangers beyond the overlay have passed before this.
        f'iifname "{BRIDGE_PREFIX}*" {speaks} & {UNKNOWN_IDENTITY:#x} != 0 {refusal(NOT_READY)}',
        f'oifname "{BRIDGE_PREFIX}*" {hears} & {UNKNOWN_IDENTITY:#x} != 0 {refusal(UNKNOWN)}',
    ]


def _lookups(direction: Direction, family: int) -> Iterator[str]:
    """The rows in their order. Everything has one, so whoever met none was overtaken: the next hook judges it again."""
    then = ports_then(direction, family)
    for paired in (True, False):
        key, name = pair_key(direction, paired=paired), map_name(direction, paired=paired, service="")
        # nft takes a connection's port for one only where it has been told family and protocol.
        for number in PORTED:
            yield (
                f"meta nfproto ipv{family} ct original protocol {protocol_name(number)} meta mark set "
                f"{key} . ct original protocol . ct reply proto-src map @{name}port goto {then}"
            )
        yield f"jump {name}ports{family}"
        yield f"meta mark set {key} . ct original protocol map @{name}protocol goto {then}"
        yield f"meta mark set {key} map @{name}all goto {then}"
    yield "accept"
