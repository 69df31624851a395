"""How far the nodes have come, judged by what they told: who has not carried out what was written, and why.

A wish in the store asks every node for a receipt; its revision is later than all that was written before it. A node
answers when it has carried out everything up to the wish, so whoever waits compares receipts with the wish's revision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName
from weft.domain.store_types import Revision

State = Literal["alive", "not ready", "silent"]

_NOTHING = model.Receipt()


def is_behind(cluster: Cluster, node: NodeName, revision: Revision, *, skip_silent: bool) -> bool:
    """Whether a node has not told yet that it carried out all up to the revision. A node that is gone is not waited
    for, and with `skip_silent` neither is one that is not heard."""
    if cluster.get(kinds.NODE, node) is None or (skip_silent and cluster.is_silent(node)):
        return False
    return _receipt(cluster, node).revision < revision


def laggards(cluster: Cluster, revision: Revision, *, skip_silent: bool) -> Iterator[NodeName]:
    """The nodes that are behind, in the order of their names."""
    for node in cluster.all(kinds.NODE):
        if is_behind(cluster, node.name, revision, skip_silent=skip_silent):
            yield node.name


def node_status(cluster: Cluster, node: NodeName) -> dict[str, Any]:
    """What is known of a node: its state, how far it has come, how far that is behind the last wish, and its faults."""
    receipt = _receipt(cluster, node)
    return {
        "state": state_of(cluster, node),
        "realisedRevision": receipt.revision,
        "lag": max(cluster.receipt_wish - receipt.revision, 0),
        "reasons": list(receipt.faults),
    }


def state_of(cluster: Cluster, node: NodeName) -> State:
    """Silence counts more than what a node said before it fell silent."""
    if cluster.is_silent(node):
        return "silent"
    return "not ready" if _receipt(cluster, node).faults else "alive"


def _receipt(cluster: Cluster, node: NodeName) -> model.Receipt:
    return cluster.receipts.get(node, _NOTHING)
