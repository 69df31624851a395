"""Policy evaluation of the linux datapath as nft chains and maps (docs/design/linux-policy.md has the diagram).

Policy is evaluated per connection, whichever of its packets arrives: the source is the source address of the original
direction, the destination is the source address of the reply direction, which is the backend where NAT applies. So
replies and ICMP errors are allowed exactly while the connection could be opened again, and removing a rule also ends
the connections it allowed. During evaluation `meta mark` holds the source identity and then the verdict, and
`meta priority` holds the destination identity.

An allowed connection gets the conntrack mark of the current policy epoch (`policy_epoch`) and is not evaluated again
while that epoch lasts. Sets may change while a packet is being evaluated, so a packet may see half of a transaction.
Then its connection carries the mark of an old epoch at the next hook, which evaluates it again with the new rules. A
packet that sees another commit there is dropped (`weft/policy-race`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.netns.devices import (
    BRIDGE_PREFIX,
    OVERLAY_PREFIX,
    POLICY_DEFERRED_HOP_LIMIT,
    PORT_PREFIX,
    TENANT_HOST_LINK,
)
from weft.adapters.netns.drop_reasons import (
    DROP_CROSS_NETWORK,
    DROP_ENDPOINT_NOT_READY,
    DROP_INVALID,
    DROP_OVERLAY_TRANSIT,
    DROP_POLICY_RACE,
    DROP_UNKNOWN_IDENTITY,
    NFLOG_GROUP,
)
from weft.adapters.netns.nft.commands import ADDRESS_TYPES, IP
from weft.domain.policy.model.protocols import PORTED, protocol_name
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, VERDICT_DENY, WORKLOAD

CT_FASTPATH: Final = "ct_fastpath"
CT_MARK_ACCEPT: Final = "ct_mark_accept"
CT_MARK_ACCEPT_SLOW: Final = "ct_mark_accept_slow"
# The chain that each forward hook goes to if the connection's mark is not of the current epoch. `policy_epoch` replaces
# the rules of these hooks and of the three chains above with every epoch.
EVAL_CHAINS: Final = {"forward": "policy_eval", "forward_recheck": "policy_recheck", "forward_final": "policy_final"}

VERDICT_COUNTERS: Final = "verdict_counters"
DROP_COUNTERS: Final = "drop_counters"

# Packet mark, combined with more bits, of frames on a bridge until policy is evaluated (`bridge_filter`).
BRIDGED: Final = 0x01000000

# What each chain does; docs/reference/nft-tables.md lists them.
CHAINS: Final = {
    "forward": "accept the current epoch's connections; everything else goes to `policy_eval`",
    "forward_recheck": "the same again, for packets in flight during an nft commit: on to `policy_recheck`",
    "forward_final": "the same a third time: on to `policy_final`",
    "policy_eval": "count service traffic, drop invalid and transit packets, then evaluate policy",
    "policy_recheck": "evaluate policy again with the current rules",
    "policy_final": "drop what still has no mark of the current epoch (`weft/policy-race`)",
    "ct_fastpath": "accept connections that carry a mark of the current epoch",
    "ct_mark_accept": "mark the connection with the current epoch and accept",
    "ct_mark_accept_slow": "the same with the slow-path bit: `forward` does not accept it, `ct_fastpath` does",
    "input": "policy for packets to the node itself: neighbour discovery and DNS are allowed",
    "input_recheck": "the same again, for packets in flight during an nft commit",
    "input_final": "drop packets in flight during two nft commits (`weft/policy-race`)",
    "src_identity{4,6}": "look up the source identity into `meta mark`",
    "dst_identity{4,6}": "look up the destination identity into `meta priority`",
    "policy_dispatch{4,6}": "check the interfaces, then evaluate egress and ingress where they are enforced",
    "original_dir": "interface checks for a packet of the original direction",
    "reply_dir": "interface checks for a packet of the reply direction",
    "unknown_src": "from the overlay with an unknown identity: drop it if its own node has deferred policy",
    "unknown_src_ingress": "evaluate the ingress rules of the destination; without any it is allowed",
    "unknown_replier": "reply from the overlay with an unknown identity: allowed, its connection was opened here",
    "unknown_dst": "to the overlay with an unknown identity: forward with hop limit 255, the remote node evaluates it",
    "egress{4,6}": "look up the egress verdict, the most specific entry first",
    "egress_verdict{4,6}": "count the egress verdict; drop, or go on with ingress",
    "ingress_src_identity{4,6}": "look up the source identity again: the egress verdict has replaced it in `meta mark`",
    "ingress{4,6}": "look up the ingress verdict, the most specific entry first",
    "ingress_verdict": "count the ingress verdict; drop or allow",
    "policy_allow": "clear the packet marks, then mark the connection",
    "policy_allow_slow": "the same for connections of which every packet needs further processing",
    "drop_reason": "count a built-in (non-policy) drop, then `log_drop`",
    "log_drop": f"log to nflog group {NFLOG_GROUP}, rate-limited, and drop",
}
SETS: Final = {
    "ip_identity_src{4,6}": "identity of an address, for the source",
    "ip_identity_dst{4,6}": "the same for the destination",
    "cidr_host_identity_src{4,6}": "identity of a single address out of a CIDR or range, for the source",
    "cidr_host_identity_dst{4,6}": "the same for the destination",
    "cidr_identity_src{4,6}": "identity of a prefix, for the source; the key encodes base and length",
    "cidr_identity_dst{4,6}": "the same for the destination",
    **{
        f"{direction}_{template}": purpose.format(direction=direction)
        for direction in Direction
        for template, purpose in {
            "enforced": "identities with {direction} rules; all others skip the {direction} lookup",
            "pair_port": "{direction} verdict by local and remote identity, protocol and port",
            "pair_ports": "{direction} verdict by local and remote identity, protocol and prefix of ports",
            "pair_protocol": "{direction} verdict by local and remote identity and protocol",
            "pair_all": "{direction} verdict by local and remote identity",
            "any_port": "{direction} verdict by local identity, protocol and port",
            "any_ports": "{direction} verdict by local identity, protocol and prefix of ports",
            "any_protocol": "{direction} verdict by local identity and protocol",
            "any_all": "{direction} verdict by local identity alone: the default of an enforced identity",
        }.items()
    },
    VERDICT_COUNTERS: "packets per verdict; for verdicts that allow, one per connection and epoch",
    DROP_COUNTERS: "packets per built-in (non-policy) drop reason",
}

_HOP_LIMITS = ("ip ttl", "ip6 hoplimit")
_L4_TYPES = {
    "port": " . inet_proto . inet_service",
    "ports": " . inet_proto . inet_service",
    "protocol": " . inet_proto",
    "all": "",
}
# Where the source and destination identities are during evaluation, and the nft type of each. nft gives the two
# registers different types, so every address map exists twice.
_SRC, _DST = ("meta mark", "mark"), ("meta priority", "classid")
# The local and the remote identity of each direction.
_ENDS = {Direction.EGRESS: (_SRC, _DST), Direction.INGRESS: (_DST, _SRC)}
# For each end: the register of its identity, and the address it is looked up by.
IDENTITY_LOOKUPS: Final = {
    "src": (_SRC[0], "ct original {ip} saddr"),
    "dst": (_DST[0], "ct reply {ip} saddr"),
}


def drop_with_reason(reason: int) -> str:
    """Return the end of a rule that drops for a built-in (non-policy) reason."""
    return f"meta mark set {reason:#x} goto drop_reason"


# Forwarding takes one hop off before the forward hook. A packet that its source node deferred has 254 there; if this
# node does not know the source either, no node can evaluate policy for it.
_DROP_DEFERRED = tuple(
    f"{hops} >= {POLICY_DEFERRED_HOP_LIMIT - 1} {drop_with_reason(DROP_UNKNOWN_IDENTITY)}" for hops in _HOP_LIMITS
)
_EVALUATE = ("meta nfproto ipv4 goto src_identity4", "meta nfproto ipv6 goto src_identity6")
# What an earlier hook deferred to the destination's node. It has no mark, because no verdict was reached.
_DEFERRED = tuple(f'oifname "{OVERLAY_PREFIX}*" {hops} {POLICY_DEFERRED_HOP_LIMIT} accept' for hops in _HOP_LIMITS)
_ON_BRIDGE = f'iifname "{BRIDGE_PREFIX}*" oifname "{BRIDGE_PREFIX}*"'
_RETURN_TO_REMOTE_HOST = f'oifname "{TENANT_HOST_LINK}" jump remote_host_return'
_DISCOVERY = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"
_INPUT = (
    'iifname "lo" accept',
    f"jump {CT_FASTPATH}",
    f"{_DISCOVERY} accept",
    f"ct state invalid,untracked {drop_with_reason(DROP_INVALID)}",
    "ct direction reply accept",
    f'iifname "{BRIDGE_PREFIX}*" fib daddr type local fib daddr . iif type != local '
    f"{drop_with_reason(DROP_CROSS_NETWORK)}",
    # DNS queries are for netdns, which applies its own policy: every workload of a tenant may resolve its names.
    *(f'iifname "{prefix}*" meta l4proto {{ tcp, udp }} th dport 53 accept' for prefix in (PORT_PREFIX, BRIDGE_PREFIX)),
)


def policy_map_name(direction: Direction, *, paired: bool, l4: str) -> str:
    """Return the map of a direction's entries, by identity pair or by local identity, for one form of L4 match."""
    return f"{direction}_{'pair' if paired else 'any'}_{l4}"


def enforced_set_name(direction: Direction) -> str:
    """Return the set of identities for which a direction is enforced."""
    return f"{direction}_enforced"


def identity_key(direction: Direction, *, paired: bool) -> str:
    """Return the identity part of the key of a direction's entries."""
    (local, _), (remote, _) = _ENDS[direction]
    return f"{local} . {remote}" if paired else local


def verdict_chain(direction: Direction, family: int) -> str:
    """Return the chain that applies the verdict of a direction."""
    return f"egress_verdict{family}" if direction is Direction.EGRESS else "ingress_verdict"


def declarations() -> Iterator[str]:
    """Declare the sets and maps of policy. `policy_maps` makes their elements."""
    for family, address_type in ADDRESS_TYPES.items():
        for end, (_, identity_type) in (("src", _SRC), ("dst", _DST)):
            for name in ("ip_identity", "cidr_host_identity", "cidr_identity"):
                yield f"map {name}_{end}{family} {{ type {address_type} : {identity_type}; }}"
    for direction, ((_, local), (_, remote)) in _ENDS.items():
        yield f"set {enforced_set_name(direction)} {{ type {local}; }}"
        for paired, identities in ((True, f"{local} . {remote}"), (False, local)):
            for l4, l4_type in _L4_TYPES.items():
                name = policy_map_name(direction, paired=paired, l4=l4)
                yield f"map {name} {{ type {identities}{l4_type} : mark; }}"
    yield f"set {VERDICT_COUNTERS} {{ type mark; counter; }}"
    yield f"set {DROP_COUNTERS} {{ type mark; counter; }}"


def chains() -> dict[str, list[str]]:
    """Return the rules by chain."""
    rules = {
        # Three hooks at the same point: sets change within a packet's way through one hook, rules only between hooks.
        "forward": ["type filter hook forward priority filter; policy drop;"],
        "forward_recheck": ["type filter hook forward priority filter + 1; policy drop;"],
        "forward_final": ["type filter hook forward priority filter + 2; policy drop;"],
        "policy_eval": [
            "ct status dnat jump service_stats",
            _RETURN_TO_REMOTE_HOST,
            f"jump {CT_FASTPATH}",
            f"{_ON_BRIDGE} meta mark & {BRIDGED:#x} != 0 {_DISCOVERY} accept",
            f"ct state invalid,untracked {drop_with_reason(DROP_INVALID)}",
            f"{_ON_BRIDGE} jump bridge_policy",
            f'iifname "{OVERLAY_PREFIX}*" oifname "{OVERLAY_PREFIX}*" {drop_with_reason(DROP_OVERLAY_TRANSIT)}',
            *_EVALUATE,
        ],
        "policy_recheck": [f"jump {CT_FASTPATH}", f"{_ON_BRIDGE} {_DISCOVERY} accept", *_DEFERRED, *_EVALUATE],
        "policy_final": [
            # Policy has been evaluated: without the mark `bridge_final` lets the frame pass.
            f"{_ON_BRIDGE} meta mark set 0",
            f"jump {CT_FASTPATH}",
            f"{_ON_BRIDGE} {_DISCOVERY} accept",
            *_DEFERRED,
            drop_with_reason(DROP_POLICY_RACE),
        ],
        "input": ["type filter hook input priority filter; policy drop;", *_INPUT, *_EVALUATE],
        "input_recheck": ["type filter hook input priority filter + 1; policy drop;", *_INPUT, *_EVALUATE],
        "input_final": [
            "type filter hook input priority filter + 2; policy drop;",
            *_INPUT,
            drop_with_reason(DROP_POLICY_RACE),
        ],
        "original_dir": _interface_checks(sender="meta mark", receiver="meta priority", unknown="unknown_src"),
        "reply_dir": _interface_checks(sender="meta priority", receiver="meta mark", unknown="unknown_replier"),
        "unknown_src": [*_DROP_DEFERRED, "goto unknown_src_ingress"],
        # Egress was evaluated by the source's node, which alone knows its rules. Ingress is not left to it: nobody may
        # have the address, and a node must not pass the rules of others with addresses that it has made up.
        "unknown_src_ingress": [
            *(
                f"meta nfproto ipv{family} meta priority @{enforced_set_name(Direction.INGRESS)} goto ingress{family}"
                for family in IP
            ),
            "goto policy_allow",
        ],
        "unknown_replier": [*_DROP_DEFERRED, "goto policy_allow"],
        "unknown_dst": [
            f"meta mark set 0 meta priority set none {hops} set {POLICY_DEFERRED_HOP_LIMIT} accept"
            for hops in _HOP_LIMITS
        ],
        "ingress_verdict": [
            f"meta mark @{VERDICT_COUNTERS}",
            f"meta mark & {VERDICT_DENY:#x} != 0 goto log_drop",
            "goto policy_allow",
        ],
        "drop_reason": [f"meta mark @{DROP_COUNTERS}", "goto log_drop"],
        # The limit protects the agent from a flood of drops: nflog copies each logged packet to user space.
        "log_drop": [f"limit rate 200/second burst 400 packets log group {NFLOG_GROUP} snaplen 128", "drop"],
        "policy_allow": [
            # VXLAN routes its outer packet by the mark, and qdiscs classify by the priority.
            "meta mark set 0 meta priority set none",
            "ct status dnat goto policy_allow_slow",
            *(f"ct original {ip} saddr @remote_host_ips{family} goto policy_allow_slow" for family, ip in IP.items()),
            *(f'{match} "{BRIDGE_PREFIX}*" goto policy_allow_slow' for match in ("iifname", "oifname")),
            f"goto {CT_MARK_ACCEPT}",
        ],
        # Service connections are counted, replies to remote hosts are redirected, and bridged frames carry a mark that
        # must be cleared. All of that happens in `policy_eval`, which the plain mark would skip.
        "policy_allow_slow": [_RETURN_TO_REMOTE_HOST, f"goto {CT_MARK_ACCEPT_SLOW}"],
    }
    for family, ip in IP.items():
        rules |= _family_chains(family, ip)
    return rules


def _family_chains(family: int, ip: str) -> dict[str, list[str]]:
    return {
        f"src_identity{family}": _identity_lookup("src", family, ip, then=f"dst_identity{family}"),
        f"dst_identity{family}": _identity_lookup("dst", family, ip, then=f"policy_dispatch{family}"),
        f"policy_dispatch{family}": [
            "ct direction original jump original_dir",
            "ct direction reply jump reply_dir",
            f"meta mark @{enforced_set_name(Direction.EGRESS)} goto egress{family}",
            f"meta priority @{enforced_set_name(Direction.INGRESS)} goto ingress{family}",
            "goto policy_allow",
        ],
        f"egress{family}": list(_verdict_lookups(Direction.EGRESS, family)),
        f"egress_verdict{family}": [
            f"meta mark @{VERDICT_COUNTERS}",
            f"meta mark & {VERDICT_DENY:#x} != 0 goto log_drop",
            f"meta priority @{enforced_set_name(Direction.INGRESS)} goto ingress_src_identity{family}",
            "goto policy_allow",
        ],
        f"ingress_src_identity{family}": _identity_lookup("src", family, ip, then=f"ingress{family}"),
        f"ingress{family}": list(_verdict_lookups(Direction.INGRESS, family)),
    }


def _identity_lookup(end: str, family: int, ip: str, *, then: str) -> list[str]:
    """Look up an end's identity: by address, by single address of a CIDR, by prefix (`prefix_lookup`), else 0."""
    register, address = IDENTITY_LOOKUPS[end]
    address = address.format(ip=ip)
    return [
        *(
            f"{register} set {address} map @{name}_{end}{family} goto {then}"
            for name in ("ip_identity", "cidr_host_identity")
        ),
        f"{register} set 0",
        f"jump cidr_identity_{end}{family}",
        f"goto {then}",
    ]


def _interface_checks(*, sender: str, receiver: str, unknown: str) -> list[str]:
    """Decide by interface and by the identities of the packet's sender and receiver.

    `unknown` is the chain for packets of unknown senders behind the overlay.
    """
    return [
        # A packet that leaves a port after its endpoint was removed has no workload identity. It must not count as one
        # of unknown identity, which could be allowed.
        f'iifname "{PORT_PREFIX}*" {sender} & {WORKLOAD:#x} == 0 {drop_with_reason(DROP_ENDPOINT_NOT_READY)}',
        f'oifname "{PORT_PREFIX}*" {receiver} & {WORKLOAD:#x} == 0 {drop_with_reason(DROP_ENDPOINT_NOT_READY)}',
        f'iifname "{OVERLAY_PREFIX}*" {sender} & {UNKNOWN_IDENTITY:#x} != 0 goto {unknown}',
        f'oifname "{OVERLAY_PREFIX}*" {receiver} & {UNKNOWN_IDENTITY:#x} != 0 goto unknown_dst',
        # On a bridge the MAC of a destination arrives together with its identity, so nothing is deferred; unknown
        # identities from the overlay were evaluated before (`bridge_from_overlay`).
        f'iifname "{BRIDGE_PREFIX}*" {sender} & {UNKNOWN_IDENTITY:#x} != 0 {drop_with_reason(DROP_ENDPOINT_NOT_READY)}',
        f'oifname "{BRIDGE_PREFIX}*" {receiver} & {UNKNOWN_IDENTITY:#x} != 0 {drop_with_reason(DROP_UNKNOWN_IDENTITY)}',
    ]


def _verdict_lookups(direction: Direction, family: int) -> Iterator[str]:
    """Look up a verdict, the most specific entry first. Every enforced identity has a default entry."""
    then = verdict_chain(direction, family)
    for paired in (True, False):
        key, prefix = identity_key(direction, paired=paired), policy_map_name(direction, paired=paired, l4="")
        # nft only accepts a conntrack port where family and protocol are given before it.
        for number in PORTED:
            yield (
                f"meta nfproto ipv{family} ct original protocol {protocol_name(number)} meta mark set "
                f"{key} . ct original protocol . ct reply proto-src map @{prefix}port goto {then}"
            )
        yield f"jump {prefix}ports{family}"
        yield f"meta mark set {key} . ct original protocol map @{prefix}protocol goto {then}"
        yield f"meta mark set {key} map @{prefix}all goto {then}"
    # A packet that finds no entry was in flight during an nft commit. It gets no conntrack mark, so the next hook
    # evaluates it again.
    yield "accept"
