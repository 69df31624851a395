"""The nftables table of a tenant's space: what may come out of a port, and how it is judged (`nft` judges it in tests).

A packet from a port passes only with the MAC and an address of that port: two sets hold who may say what (`voices`),
and a port that is in neither says nothing. Routers do not live in pods, so what only routers say is refused first.
What may be said to whom is in `judging`, who answers for a service in `balancing`,
what host and tenant are to each other in `hosting`, and what passes a bridge in `bridging`.
"""

from __future__ import annotations

from weft.adapters.netns.host import nat_tenant
from weft.adapters.netns.nft import bridge_filter, policy_chains, service_chains
from weft.adapters.netns.nft.policy_chains import (
    BRIDGE_PREFIX,
    KNOWN,
    OVERLAY_PREFIX,
    PORT_PREFIX,
    REASONS,
    ROUTER,
    SPOOFED,
    STAMP,
    STAMP_WATCHED,
    refusal,
)
from weft.adapters.netns.nft.prefix_lookup import WAY_CHAINS

TABLE = "weft"

# Who may say what.
VOICE_SETS = ("ports4", "ports6")
# Who speaks to itself when both ends of a packet are the same.
SELF_SETS = ("ports_self4", "ports_self6")

# A frame's MAC of who sent it. By its name nft has every packet compared with Ethernet first, and all devices are.
_SENDER = "@ll,48,48"
_SETS = (
    f"set ports4 {{ typeof iifname . {_SENDER} . ip saddr; }}",
    f"set ports6 {{ typeof iifname . {_SENDER} . ip6 saddr; }}",
    "set ports_self4 { type ipv4_addr . ipv4_addr; }",
    "set ports_self6 { type ipv6_addr . ipv6_addr; }",
)
# What comes to a group's MAC, as all does that is to be forwarded (`facts.HOP_MAC`), is forwarded after this only.
_FORWARD = "meta pkttype set unicast"
_CHAINS = {
    "arrival": [
        "type filter hook prerouting priority -310; policy accept;",
        # These two come first, as nearly every packet meets one of them.
        f'iifname "{OVERLAY_PREFIX}*" {_FORWARD} accept',
        f"iifname . {_SENDER} . ip saddr @ports4 {_FORWARD} accept",
        f'icmpv6 type {{ nd-router-advert, nd-redirect }} iifname "{PORT_PREFIX}*" {refusal(ROUTER)}',
        f"iifname . {_SENDER} . ip6 saddr @ports6 {_FORWARD} accept",
        f'iifname "{PORT_PREFIX}*" goto from_nobody',
        f'iifname "{BRIDGE_PREFIX}*" meta mark {SPOOFED:#x} goto from_nobody',
        f'iifname "{BRIDGE_PREFIX}*" meta mark {ROUTER:#x} {refusal(ROUTER)}',
        f'iifname "{BRIDGE_PREFIX}*" accept',  # what passes it is unicast, or else the bridge's to tell
        _FORWARD,
    ],
    "from_nobody": [
        # What every kernel says on a new link, and nobody here has to hear.
        "meta l4proto ipv6-icmp ip6 saddr { ::, fe80::/10 } drop",
        refusal(SPOOFED),
    ],
}


def _base() -> str:
    """Declare, empty, and fill: one transaction, in which sets, maps and their counts stay as they are."""
    chains = policy_chains.chains() | service_chains.chains() | nat_tenant.chains() | bridge_filter.chains() | _CHAINS
    lines = [f"add table inet {TABLE}", f"table inet {TABLE} {{"]
    lines += [
        *_SETS,
        *policy_chains.declarations(),
        *service_chains.declarations(),
        *nat_tenant.declarations(),
        *bridge_filter.declarations(),
    ]
    lines += [f"chain {name} {{ }}" for name in (KNOWN, STAMP, STAMP_WATCHED, *WAY_CHAINS)]
    lines += [f"chain {name} {{ {rules[0] if _is_hook(rules[0]) else ''} }}" for name, rules in chains.items()]
    lines.append("}")
    lines += [f"flush chain inet {TABLE} {name}" for name in chains]
    lines += [
        f"add rule inet {TABLE} {name} {rule}" for name, rules in chains.items() for rule in rules if not _is_hook(rule)
    ]
    reasons = ", ".join(f"{number:#x}" for number in REASONS)
    lines.append(f"add element inet {TABLE} reasons {{ {reasons} }}")
    return "\n".join(lines) + "\n"


def _is_hook(rule: str) -> bool:
    return rule.startswith("type ")


# The commands that make the table, whatever is there of it.
BASE = _base()

# The commands that make the table anew, where somebody has put something else in its place.
REBUILD = f"add table inet {TABLE}\ndelete table inet {TABLE}\n{BASE}"
