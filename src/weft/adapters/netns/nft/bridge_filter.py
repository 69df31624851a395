"""What may pass a segment, in nft's own language (docs/design/bridge.md has the picture).

A frame meets two tables. That of the bridge family knows ports and MACs and nothing of connections: it lets in what a
port may say, and notes on the packet between what kinds of ports it passes. Then the kernel shows the packet to the
tenant's usual table, where it is judged as any other; there it seems to come from the bridge and to leave by it. What
nobody has judged still bears the note and is dropped: so policy holds when somebody tells the kernel not to show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.netns.nft.policy_chains import (
    ADDRESS_ENDS,
    BETWEEN,
    BRIDGED,
    NOT_READY,
    OVERLAY_PREFIX,
    PORT_PREFIX,
    ROUTER,
    SPOOFED,
    refusal,
)
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, WORKLOAD

BRIDGE_TABLE: Final = "weft"
# Who may say what on which port (v6 with the link-local address that goes with the MAC); who may say that it has an
# address; and where those find it who look for one.
STATION_SETS: Final = ("stations4", "stations6", "owners6", "solicited6")
# In the tenant's usual table: each bridge with itself, by which it is known what stays on one segment.
SEGMENTS: Final = "segments"
BRIDGE_SYSCTLS: Final = {
    "net/bridge/bridge-nf-call-iptables": "1",
    "net/bridge/bridge-nf-call-ip6tables": "1",
    "net/bridge/bridge-nf-filter-vlan-tagged": "0",
    "net/bridge/bridge-nf-filter-pppoe-tagged": "0",
}

# Of packets between ports of a segment, beside `BRIDGED`, until they are judged.
_FROM_PORT, _TO_PORT = 0x02000000, 0x04000000
_TO_MANY = "01:00:00:00:00:00"

_SETS = (
    "set stations4 { type ifname . ether_addr . ipv4_addr; }",
    "set stations6 { type ifname . ether_addr . ipv6_addr; }",
    "set owners6 { typeof iifname . ether saddr . @th,64,128; }",
    "map solicited6 { typeof @th,64,128 : ether saddr; }",
)
_CHAINS = {
    "arriving": [
        "type filter hook prerouting priority -310; policy drop;",
        "iifname . ether saddr . ip saddr @stations4 accept",
        f'iifname "{OVERLAY_PREFIX}*" goto from_overlay',
        "ether type arp goto from_asker",
        "meta l4proto ipv6-icmp jump from_neighbour",
        "ip6 saddr fe80::/10 goto from_nobody",
        "iifname . ether saddr . ip6 saddr @stations6 accept",
        "ether type { ip, ip6 } goto from_nobody",
    ],
    "from_overlay": [
        "icmpv6 type { nd-router-advert, nd-redirect } drop",
        "icmpv6 type nd-neighbor-solicit ether daddr set @th,64,128 map @solicited6",
        "ether type { ip, ip6, arp } accept",
        "drop",
    ],
    "from_asker": [
        "iifname . ether saddr . arp saddr ip != @stations4 drop",
        "iifname . arp saddr ether . arp saddr ip @stations4 accept",
        "drop",
    ],
    "from_neighbour": [
        f"icmpv6 type {{ nd-router-advert, nd-redirect }} meta mark set {ROUTER:#x} accept",
        "icmpv6 type != { nd-neighbor-solicit, nd-neighbor-advert } return",
        "iifname . ether saddr . ip6 saddr != @stations6 drop",
        "icmpv6 type nd-neighbor-solicit goto from_solicitor",
        "iifname . ether saddr . @th,64,128 @owners6 accept",
        "drop",
    ],
    # Who has the address gets the question, and nobody else. If nobody of this node has it, the bridge answers.
    "from_solicitor": ["ether daddr set @th,64,128 map @solicited6", "accept"],
    # The tenant's table refuses it, and counts and tells that.
    "from_nobody": [f"meta mark set {SPOOFED:#x} accept"],
    "passing": [
        "type filter hook forward priority -200; policy drop;",
        "ether type arp accept",
        f"ether daddr & {_TO_MANY} == {_TO_MANY} icmpv6 type nd-neighbor-solicit goto between_ports",
        f"ether daddr & {_TO_MANY} == {_TO_MANY} drop",
        # Only nodes speak to nodes: it is them that have such MACs.
        f'iifname "{PORT_PREFIX}*" ether daddr & ff:ff:00:00:00:00 == 02:77:00:00:00:00 drop',
        "goto between_ports",
    ],
    "between_ports": [
        f'iifname "{one}*" oifname "{other}*" meta mark set {BRIDGED | note:#x} accept'
        for one, other, note in (
            (PORT_PREFIX, PORT_PREFIX, _FROM_PORT | _TO_PORT),
            (PORT_PREFIX, OVERLAY_PREFIX, _FROM_PORT),
            (OVERLAY_PREFIX, PORT_PREFIX, _TO_PORT),
        )
    ],
    "passed": [
        "type filter hook forward priority 10; policy accept;",
        "meta mark != 0 drop",
    ],
}


def declarations() -> Iterator[str]:
    """The set that these rules need."""
    yield f"set {SEGMENTS} {{ type ifname . ifname; }}"


def chains() -> dict[str, list[str]]:
    """The rules of the tenant's usual table about what passes a segment or is routed between two, by chain."""
    known = [f"{word} {{end}} map @who_answers{family}" for family, word in ((4, "ip"), (6, "ip6"))]
    return {
        "segment": [
            f"meta mark vmap {{ {BRIDGED | _FROM_PORT | _TO_PORT:#x} : goto segment_within, "
            f"{BRIDGED | _FROM_PORT:#x} : goto segment_speaks, {BRIDGED | _TO_PORT:#x} : goto segment_beyond }}",
            # Who has an old MAC of somebody sends to the gateway what need not go there.
            f"iifname . oifname @{SEGMENTS} return",
            # Between networks only services lead; their backends' nodes see nothing but answers.
            "ct direction reply return",
            "ct status dnat return",
            refusal(BETWEEN),
        ],
        "segment_within": ["jump segment_speaks", "goto segment_hears"],
        "segment_speaks": _is_workload([each.format(end="saddr") for each in known]),
        "segment_hears": _is_workload([each.format(end="daddr") for each in known]),
        # A stranger was judged by its own node, which knows it.
        "segment_beyond": ["jump segment_hears", "ct direction reply goto segment_answers", "goto segment_asks"],
        "segment_asks": _is_stranger("asks"),
        "segment_answers": _is_stranger("answers"),
    }


def _is_workload(lookups: list[str]) -> list[str]:
    return [
        "meta priority set 0",
        *(f"meta priority set {each}" for each in lookups),
        f"meta priority & {WORKLOAD:#x} == 0 {refusal(NOT_READY)}",
    ]


def _is_stranger(end: str) -> list[str]:
    """The number of who speaks, as `judging` finds it: what is surer comes later."""
    into, where = ADDRESS_ENDS[end]
    words = ((4, "ip"), (6, "ip6"))
    return [
        f"{into} set 0",
        *(f"meta nfproto ipv{family} jump where_{end}{family}" for family, _ in words),
        *(
            f"{into} set {where.format(word=word)} map @{name}_{end}{family}"
            for name in ("spot", "who")
            for family, word in words
        ),
        f"{into} & {UNKNOWN_IDENTITY:#x} != 0 goto pass",
    ]


def _base() -> str:
    """Declare, empty, and fill, as `ruleset` does."""
    lines = [f"add table bridge {BRIDGE_TABLE}", f"table bridge {BRIDGE_TABLE} {{", *_SETS]
    lines += [
        f"chain {name} {{ {rules[0] if rules[0].startswith('type ') else ''} }}" for name, rules in _CHAINS.items()
    ]
    lines.append("}")
    lines += [f"flush chain bridge {BRIDGE_TABLE} {name}" for name in _CHAINS]
    lines += [
        f"add rule bridge {BRIDGE_TABLE} {name} {rule}"
        for name, rules in _CHAINS.items()
        for rule in rules
        if not rule.startswith("type ")
    ]
    return "\n".join(lines) + "\n"


# The commands that make the bridge family's table, whatever is there of it.
BRIDGE_BASE: Final = _base()
BRIDGE_REBUILD: Final = f"add table bridge {BRIDGE_TABLE}\ndelete table bridge {BRIDGE_TABLE}\n{BRIDGE_BASE}"
