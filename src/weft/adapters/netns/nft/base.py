"""The nft table `inet weft` of a tenant netns: anti-spoofing of ports, and the chains of the other modules.

A packet from a port is accepted only with the MAC and an address of that port: `l3_spoofguard4` and `l3_spoofguard6`
hold the allowed combinations (`anti_spoofing`), and a port that is in neither cannot send. Pods are not routers, so
router advertisements and redirects from ports are dropped first. Policy is in `policy_chains`, services are in
`service_chains`, host access is in `host.nat_tenant`, bridged traffic is in `bridge_filter`.
"""

from __future__ import annotations

from typing import Final

from weft.adapters.netns.devices import BRIDGE_PREFIX, OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.netns.drop_reasons import DROP_REASONS, DROP_ROGUE_RA, DROP_SPOOFED
from weft.adapters.netns.host import nat_tenant
from weft.adapters.netns.nft import bridge_filter, policy_chains, service_chains
from weft.adapters.netns.nft.commands import replace_table, table_commands
from weft.adapters.netns.nft.entries import TABLE
from weft.adapters.netns.nft.policy_chains import (
    CT_FASTPATH,
    CT_MARK_ACCEPT,
    CT_MARK_ACCEPT_SLOW,
    DROP_COUNTERS,
    drop_with_reason,
)
from weft.adapters.netns.nft.prefix_lookup import PREFIX_LOOKUP_CHAINS

CHAINS: Final = {
    "spoofguard": "accept a port's packets only with its own MAC and addresses; runs before conntrack",
    "drop_spoofed": "drop a packet of any other source (`weft/spoofed`)",
}
SETS: Final = {
    "l3_spoofguard{4,6}": "interface, MAC and address combinations that may send, in routing mode",
    "hairpin_self{4,6}": "addresses of local workloads, each paired with itself: packets of a workload to itself",
}

# The frame's source MAC as raw payload. With `ether saddr` nft adds a check of the device type to the lookup; all our
# devices are Ethernet.
_ETHER_SADDR = "@ll,48,48"
_DECLARATIONS = (
    f"set l3_spoofguard4 {{ typeof iifname . {_ETHER_SADDR} . ip saddr; }}",
    f"set l3_spoofguard6 {{ typeof iifname . {_ETHER_SADDR} . ip6 saddr; }}",
    "set hairpin_self4 { type ipv4_addr . ipv4_addr; }",
    "set hairpin_self6 { type ipv6_addr . ipv6_addr; }",
)
# Next hops have multicast MACs (`devices.HOP_MAC`). The kernel forwards a packet to one only after this statement, so
# nothing is forwarded while the table is missing.
_ALLOW_FORWARDING = "meta pkttype set unicast"
_CHAINS = {
    "spoofguard": [
        "type filter hook prerouting priority -310; policy accept;",
        # Another node that sends as a workload of this one. `inet weft_vxlan` of the host checks all other sources.
        f'iifname "{OVERLAY_PREFIX}*" ip saddr . ip saddr @hairpin_self4 goto drop_spoofed',
        f'iifname "{OVERLAY_PREFIX}*" ip6 saddr . ip6 saddr @hairpin_self6 goto drop_spoofed',
        # Nearly every packet matches one of the next two rules.
        f'iifname "{OVERLAY_PREFIX}*" {_ALLOW_FORWARDING} accept',
        f"iifname . {_ETHER_SADDR} . ip saddr @l3_spoofguard4 {_ALLOW_FORWARDING} accept",
        f'icmpv6 type {{ nd-router-advert, nd-redirect }} iifname "{PORT_PREFIX}*" {drop_with_reason(DROP_ROGUE_RA)}',
        f"iifname . {_ETHER_SADDR} . ip6 saddr @l3_spoofguard6 {_ALLOW_FORWARDING} accept",
        f'iifname "{PORT_PREFIX}*" goto drop_spoofed',
        # The bridge table has set these marks. The drop happens here, where it is counted and logged.
        f'iifname "{BRIDGE_PREFIX}*" meta mark {DROP_SPOOFED:#x} goto drop_spoofed',
        f'iifname "{BRIDGE_PREFIX}*" meta mark {DROP_ROGUE_RA:#x} {drop_with_reason(DROP_ROGUE_RA)}',
        # The pkttype stays: on a bridge all next hops have unicast MACs.
        f'iifname "{BRIDGE_PREFIX}*" accept',
        _ALLOW_FORWARDING,
    ],
    "drop_spoofed": [
        # Every kernel sends these on a new link (MLD, DAD, router solicitations): dropped without a log entry.
        "meta l4proto ipv6-icmp ip6 saddr { ::, fe80::/10 } drop",
        drop_with_reason(DROP_SPOOFED),
    ],
}


def _base() -> str:
    commands = table_commands(
        f"inet {TABLE}",
        declarations=(
            *_DECLARATIONS,
            *policy_chains.declarations(),
            *service_chains.declarations(),
            *nat_tenant.declarations(),
            *bridge_filter.declarations(),
        ),
        chains=policy_chains.chains()
        | service_chains.chains()
        | nat_tenant.chains()
        | bridge_filter.chains()
        | _CHAINS,
        # `policy_epoch` and `prefix_lookup` fill these.
        stubs=(CT_FASTPATH, CT_MARK_ACCEPT, CT_MARK_ACCEPT_SLOW, *PREFIX_LOOKUP_CHAINS),
    )
    # Only existing elements are counted, so every drop reason is an element from the start.
    reasons = ", ".join(f"{number:#x}" for number in DROP_REASONS)
    return commands + f"add element inet {TABLE} {DROP_COUNTERS} {{ {reasons} }}\n"


# The commands that create or update the table. Sets, maps and counters stay.
BASE: Final = _base()

# The commands that create the table from nothing, if something incompatible is in its place.
REBUILD: Final = replace_table(f"inet {TABLE}", BASE)
