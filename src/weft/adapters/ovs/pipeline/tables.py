"""OpenFlow tables and registers of the integration bridge, as data; docs/reference/ovs-tables.md is generated.

A packet passes the tables in ascending order. A table drops what none of its flows matches.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Table(IntEnum):
    """The OpenFlow tables by number."""

    CLASSIFIER = 0
    ARP_RESPONDER = 1
    ND_RESPONDER = 2
    FLOOD = 3
    CONNTRACK_ZONE = 4
    L3_FORWARDING = 5
    L4_KEY = 6
    SRC_IDENTITY = 7
    DST_IDENTITY = 8
    LOCALITY_CHECK = 9
    EGRESS_RULE = 10
    EGRESS_METRIC = 11
    INGRESS_RULE = 12
    INGRESS_METRIC = 13
    EGRESS_METER = 14
    INGRESS_METER = 15
    CONNTRACK_COMMIT = 16
    OUTPUT = 17


# Names as Antrea writes them, for the reference page. Only letters and digits, so that they are valid OVS table names.
NAMES: Final[dict[Table, str]] = {
    Table.CLASSIFIER: "Classifier",
    Table.ARP_RESPONDER: "ARPResponder",
    Table.ND_RESPONDER: "NDResponder",
    Table.FLOOD: "Flood",
    Table.CONNTRACK_ZONE: "ConntrackZone",
    Table.L3_FORWARDING: "L3Forwarding",
    Table.L4_KEY: "L4Key",
    Table.SRC_IDENTITY: "SrcIdentity",
    Table.DST_IDENTITY: "DstIdentity",
    Table.LOCALITY_CHECK: "LocalityCheck",
    Table.EGRESS_RULE: "EgressRule",
    Table.EGRESS_METRIC: "EgressMetric",
    Table.INGRESS_RULE: "IngressRule",
    Table.INGRESS_METRIC: "IngressMetric",
    Table.EGRESS_METER: "EgressMeter",
    Table.INGRESS_METER: "IngressMeter",
    Table.CONNTRACK_COMMIT: "ConntrackCommit",
    Table.OUTPUT: "Output",
}

PURPOSES: Final[dict[Table, str]] = {
    Table.CLASSIFIER: "Classify packets by ingress port and VLAN tag, write `tenant` and `pkt_source`, and enforce "
    "SpoofGuard: a workload port may only send with its own MAC and addresses.",
    Table.ARP_RESPONDER: "Answer ARP requests of workloads, and turn neighbour solicitations into advertisements; "
    "in bridge mode with `arpMode` flood pass them on to Flood.",
    Table.ND_RESPONDER: "Fill in the fields of neighbour advertisements that ARPResponder made, and send them back.",
    Table.FLOOD: "Forward ARP and neighbour discovery on a segment, to the owner of the target or, with `arpMode` "
    "flood, to all members.",
    Table.CONNTRACK_ZONE: "Send packets through conntrack in the tenant's zone.",
    Table.L3_FORWARDING: "Find the output port (workload, tunnel, uplink or tenant netns), rewrite MACs, decrement the "
    "TTL, answer echo requests to gateways, and drop packets of invalid connections.",
    Table.L4_KEY: "Load protocol and destination port of the connection (for SCTP, of the packet); skip policy for "
    "service VIPs and DNS, which the tenant netns handles.",
    Table.SRC_IDENTITY: "Map the source address of the connection to an identity "
    "(`weft.domain.policy.policymap.policy_state`).",
    Table.DST_IDENTITY: "Map the destination address of the connection to an identity.",
    Table.LOCALITY_CHECK: "Drop tunnel-to-tunnel transit and packets of workloads without an identity; for an unknown "
    "identity, defer policy to the node that knows the identity.",
    Table.EGRESS_RULE: "Look up the policy entries of the source identity, and write `verdict`.",
    Table.EGRESS_METRIC: "Count egress verdicts, and drop denied packets.",
    Table.INGRESS_RULE: "Look up the policy entries of the destination identity, and write `verdict`.",
    Table.INGRESS_METRIC: "Count ingress verdicts, and drop denied packets.",
    Table.EGRESS_METER: "Set the DSCP of packets from workloads with a QoS profile, and apply the meter for what the "
    "workload sends.",
    Table.INGRESS_METER: "Apply the meter for what is sent to a workload.",
    Table.CONNTRACK_COMMIT: "Commit new connections, pass fragments through conntrack again, and output the rest.",
    Table.OUTPUT: "Output datagrams that ConntrackCommit reassembled; later fragments skip policy, because none gets "
    "here without the first one.",
}

TENANT, SRC_IDENTITY, DST_IDENTITY, VERDICT, OUTPUT_PORT = "reg0", "reg1", "reg2", "reg3", "reg4"
PKT_SOURCE, PKT_DESTINATION, L4_PROTOCOL, L4_DST_PORT, SCRATCH = "reg5", "reg6", "reg7", "reg8", "reg9"
SEGMENT, CT_MARK = "reg10", "reg11"

# Each register with its name and what it holds.
REGISTERS: Final[dict[str, tuple[str, str]]] = {
    TENANT: ("tenant", "node-local tenant ID, which is also the tenant's conntrack zone"),
    SRC_IDENTITY: ("src_identity", "identity of the connection's source"),
    DST_IDENTITY: ("dst_identity", "identity of the connection's destination"),
    VERDICT: ("verdict", "verdict of the policy entry, or a built-in drop reason"),
    OUTPUT_PORT: ("output_port", "output port"),
    PKT_SOURCE: ("pkt_source", "kind of the ingress port: 1 local workload, 2 remote node, 3 uplink, 4 tenant netns"),
    PKT_DESTINATION: ("pkt_destination", "kind of the output port, with the same values"),
    L4_PROTOCOL: ("l4_protocol", "IP protocol of the connection"),
    L4_DST_PORT: ("l4_dst_port", "destination port of the connection's first packet"),
    SCRATCH: ("scratch", "temporary, for swapping two fields"),
    SEGMENT: ("segment", "segment of the packet in bridge mode, else 0"),
    CT_MARK: ("ct_mark", "mark of a new connection: 1 opened by the tenant netns, 2 addressed to the tenant netns"),
}

# Values of `PKT_SOURCE` and `PKT_DESTINATION`. Anybody may send from an uplink, only Weft nodes from a tunnel.
LOCAL_WORKLOAD, REMOTE_NODE, UPLINK, TENANT_NETNS = 1, 2, 3, 4
# Matches `REMOTE_NODE` and `UPLINK`.
FROM_OUTSIDE = 2, 2


def reference() -> str:
    """Render docs/reference/ovs-tables.md."""
    lines = [
        "# Tables of the ovs datapath",
        "",
        "Generated from `weft.adapters.ovs.pipeline.tables` by `make docs`. A packet passes the tables in ascending",
        "order; a table drops what none of its flows matches. Flows of Weft have the cookie `0x77656674…`; Weft does",
        "not touch other flows of the bridge. `ovs-ofctl --names dump-flows` shows the names.",
        "",
        "| table | name | purpose |",
        "|---|---|---|",
        *(f"| {table.value} | {NAMES[table]} | {purpose} |" for table, purpose in PURPOSES.items()),
        "",
        "| register | name | holds |",
        "|---|---|---|",
        *(f"| {register} | {name} | {meaning} |" for register, (name, meaning) in REGISTERS.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201  a page for a person
