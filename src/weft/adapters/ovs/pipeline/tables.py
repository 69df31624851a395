"""The tables of our bridge and its registers, declared as data: docs/reference/ovs-tables.md is made from them.

A packet goes through the tables in the order of their numbers. What no flow of a table speaks of is dropped there.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Table(IntEnum):
    """Where a packet is looked up."""

    ARRIVAL = 0
    NEIGHBOURS = 1
    ADVERTISE = 2
    SPREAD = 3
    TRACK = 4
    ROUTE = 5
    SERVICE = 6
    ASKS = 7
    ANSWERS = 8
    PLACES = 9
    EGRESS = 10
    EGRESS_MET = 11
    INGRESS = 12
    INGRESS_MET = 13
    MARKING = 14
    INWARD = 15
    LEAVE = 16
    WHOLE = 17


PURPOSES: Final[dict[Table, str]] = {
    Table.ARRIVAL: "Who is this from? A workload's port speaks with its own MAC and addresses, an overlay's device "
    "with frames for this node, an uplink with frames of a network's tag; nobody else speaks. Writes the tenant and "
    "where the packet came from.",
    Table.NEIGHBOURS: "ARP requests and neighbour solicitations of workloads, answered here for every address that the "
    "tenant has: where nodes route all of them are behind this node; on a segment each is told with its own MAC, "
    "unless the cluster's `arpMode` is flood.",
    Table.ADVERTISE: "The second half of an answer to a neighbour solicitation.",
    Table.SPREAD: "What is said about addresses on a segment and not answered here: to the one it is for or, where it "
    "is flooded, to all.",
    Table.TRACK: "Hands packets to the connection tracker, in the tenant's zone.",
    Table.ROUTE: "The way to the target: a port here, an overlay and the node behind it, the uplinks, or the tenant's "
    "space, for services, names, the host and the world; on a segment only to who is spoken to by MAC, or by the "
    "gateway. What answers a connection that came from the space goes back there. Gateways answer to echo requests. "
    "Packets without a connection are dropped. Writes the port to leave by, and what kind of one it is.",
    Table.SERVICE: "Writes the protocol of the connection and the port that its first packet went to; of SCTP, of "
    "which not every tracker knows ports, the packet's own. What is asked of the space itself is not judged.",
    Table.ASKS: "The number of who opened the connection (`weft.domain.policy.policymap.policy_state`).",
    Table.ANSWERS: "The number of who it was opened to.",
    Table.PLACES: "What is decided by where a packet comes from and goes to: nothing passes from overlay to overlay, "
    "or to and from a port that is nobody's; what a node does not know is judged by the node that does.",
    Table.EGRESS: "The rows of who asks: writes the outcome.",
    Table.EGRESS_MET: "Counts outcomes, and drops where they refuse.",
    Table.INGRESS: "The rows of who answers: writes the outcome.",
    Table.INGRESS_MET: "Counts outcomes, and drops where they refuse.",
    Table.MARKING: "Packets of workloads whose group's profile says so get its DSCP, and pass the meter of "
    "what the port sends where there is one.",
    Table.INWARD: "Packets to a port whose workload asked for a limit pass the meter of what goes to it.",
    Table.LEAVE: "New connections are remembered, and datagrams in pieces put together once more; all else leaves by "
    "the port that was found.",
    Table.WHOLE: "What was let pass whole leaves by the port that was found. Later pieces are not judged, because none "
    "comes so far without the first.",
}

TENANT, ASKS, ANSWERS, OUTCOME, LEAVES_BY = "reg0", "reg1", "reg2", "reg3", "reg4"
CAME_FROM, GOES_TO, PROTOCOL, PORT, SCRATCH = "reg5", "reg6", "reg7", "reg8", "reg9"
SEGMENT, MARK = "reg10", "reg11"

REGISTERS: Final[dict[str, str]] = {
    TENANT: "the tenant, by its number on this node, which is its zone of the connection tracker too",
    ASKS: "the number of who opened the connection",
    ANSWERS: "the number of who it was opened to",
    OUTCOME: "the outcome that a row gave, or a reason of our own to refuse the packet",
    LEAVES_BY: "the port the packet leaves by",
    CAME_FROM: "where the packet came from: 1 a workload, 2 another node, 3 an uplink, where anybody may be, "
    "4 the tenant's space",
    GOES_TO: "where it goes to: the same",
    PROTOCOL: "the connection's protocol",
    PORT: "the port that the connection's first packet went to",
    SCRATCH: "for exchanging two fields",
    SEGMENT: "the segment that the packet is on, in bridge mode",
    MARK: "what a new connection is marked with: 1 the space opened it, 2 it asks something of the space",
}

FROM_WORKLOAD, FROM_NODE, FROM_WIRE, FROM_SPACE = 1, 2, 3, 4


def reference() -> str:
    """The page about all this."""
    lines = [
        "# The tables of the ovs datapath",
        "",
        "Made from `weft.adapters.ovs.pipeline.tables` by `make docs`. A packet goes through the tables in the order of their",
        "numbers; what no flow of a table speaks of is dropped there. All flows of ours have the cookie",
        "`0x77656674…`; flows of others on the same bridge are left alone.",
        "",
        "| table | name | what happens there |",
        "|---|---|---|",
        *(f"| {table.value} | {table.name.lower()} | {purpose} |" for table, purpose in PURPOSES.items()),
        "",
        "| register | holds |",
        "|---|---|",
        *(f"| {name} | {meaning} |" for name, meaning in REGISTERS.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201  a page for a person
