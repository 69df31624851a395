"""Realization of writes on the nodes: which nodes have not applied a revision yet, and why.

A waiting client puts the sync request key; its revision is later than all writes before it. A node acknowledges the
request when it has applied everything up to it, so a client waits until every acknowledged revision reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName
from weft.domain.store_types import Revision

State = Literal["Ready", "NotReady", "Unreachable"]

# Of a node that has never acknowledged.
_NO_STATUS = model.SyncStatus()


def is_behind(cluster: Cluster, node: NodeName, revision: Revision, *, ignore_unreachable: bool) -> bool:
    """Whether a node has yet to acknowledge the revision. Deleted nodes do not count, unreachable ones optionally."""
    if cluster.get(kinds.NODE, node) is None or (ignore_unreachable and cluster.is_unreachable(node)):
        return False
    return _status(cluster, node).revision < revision


def pending_nodes(cluster: Cluster, revision: Revision, *, ignore_unreachable: bool) -> Iterator[NodeName]:
    """The nodes that are behind, in the order of their names."""
    # In key order, so that messages are stable.
    for node in cluster.all(kinds.NODE):
        if is_behind(cluster, node.name, revision, ignore_unreachable=ignore_unreachable):
            yield node.name


def node_status(cluster: Cluster, node: NodeName) -> dict[str, Any]:
    """The status of a node: its state, its applied revision and lag behind the last sync request, and its faults."""
    status = _status(cluster, node)
    return {
        "state": state_of(cluster, node),
        "appliedRevision": status.revision,
        "lag": max(cluster.sync_request - status.revision, 0),
        "reasons": list(status.faults),
    }


def state_of(cluster: Cluster, node: NodeName) -> State:
    """The state of a node. Faults of an unreachable node are outdated, so `Unreachable` takes precedence."""
    if cluster.is_unreachable(node):
        return "Unreachable"
    return "NotReady" if _status(cluster, node).faults else "Ready"


def _status(cluster: Cluster, node: NodeName) -> model.SyncStatus:
    return cluster.sync_statuses.get(node, _NO_STATUS)
