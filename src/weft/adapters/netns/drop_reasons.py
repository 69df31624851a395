"""Drop reasons of the datapath itself, beside the verdicts of policy rules. Both datapaths use the same ones.

A drop carries one number: in nftables the packet mark that nflog reports, in Open vSwitch a register. It is either the
verdict of a policy rule or one of these reasons.
"""

from __future__ import annotations

from typing import Final

# nflog group to which nftables logs dropped packets.
NFLOG_GROUP: Final = 87

# Verdict ids use at most one of these four bits (VERDICT_DENY), so no verdict equals a drop reason.
_REASON_BITS: Final = 0xF0000000

# The numbers appear in rules of a running node: a restarted agent must read back the same ones, so only append.
DROP_SPOOFED: Final = _REASON_BITS | 1
DROP_ROGUE_RA: Final = _REASON_BITS | 2
DROP_INVALID: Final = _REASON_BITS | 3
DROP_OVERLAY_TRANSIT: Final = _REASON_BITS | 4
DROP_ENDPOINT_NOT_READY: Final = _REASON_BITS | 5
DROP_UNKNOWN_IDENTITY: Final = _REASON_BITS | 6
DROP_POLICY_RACE: Final = _REASON_BITS | 7
DROP_CROSS_NETWORK: Final = _REASON_BITS | 8
DROP_UNKNOWN_VTEP: Final = _REASON_BITS | 9

# The names that `netctl` and the metric `weft_dropped_packets_total` show.
DROP_REASONS: Final = {
    DROP_SPOOFED: "weft/spoofed",
    DROP_ROGUE_RA: "weft/rogue-ra",
    DROP_INVALID: "weft/invalid",
    DROP_OVERLAY_TRANSIT: "weft/overlay-transit",
    DROP_ENDPOINT_NOT_READY: "weft/endpoint-not-ready",
    DROP_UNKNOWN_IDENTITY: "weft/unknown-identity",
    DROP_POLICY_RACE: "weft/policy-race",
    DROP_CROSS_NETWORK: "weft/cross-network",
    DROP_UNKNOWN_VTEP: "weft/unknown-vtep",
}

# Reported by `ofproto/trace` only: no rule drops for this reason, the packet has no output port.
NO_ROUTE: Final = "weft/no-route"
