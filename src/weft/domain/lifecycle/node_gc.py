"""Garbage collection of dead nodes: when their endpoints and blocks are reclaimed (ADR 2, W12). Time is a parameter."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName
from weft.domain.ipam import ipam
from weft.domain.store_types import NEVER, Delete, Revision, Write
from weft.domain.transaction import ReadSet, Transaction, put

# Endpoints reclaimed in one commit: etcd accepts 128 operations, and an endpoint takes up to three.
BATCH = 30


def nodes_to_mark(cluster: Cluster) -> Iterator[NodeName]:
    """Nodes whose reachability differs from what their document says."""
    for node in cluster.all(kinds.NODE):
        if cluster.is_unreachable(node.name) == (node.unreachable_since == 0):
            yield node.name


def plan_mark(reading: ReadSet, name: NodeName, *, now: float) -> Transaction:
    """Record since when a node is unreachable, or that it is reachable again.

    A node writes its document without the mark in the same commit as its leased key, so that a mark is always newer
    than the last connection of the node.
    """
    node = reading.get(kinds.NODE, name)
    if node is None:
        return Transaction()
    since = 0.0
    if reading.cluster.is_unreachable(name):
        since = now
        # A node that reconnects at the same moment must not be marked.
        reading.compare_revision(kinds.alive_node(name), NEVER)
    if (since == 0) == (node.unreachable_since == 0):
        return Transaction()
    return reading.plan([put(kinds.NODE, msgspec.structs.replace(node, unreachable_since=since))])


class Silence:
    """For how long one leader has seen nodes unreachable, by a clock that no other machine shares.

    The mark in a node's document is the wall clock of the leader that wrote it. A difference of that to the clock of
    another leader says nothing, so each leader counts from when it first sees a mark (M4).
    """

    def __init__(self) -> None:
        # The revision of the mark, and when we saw it first: a node that reconnects gets a new revision.
        self._seen: dict[NodeName, tuple[Revision, float]] = {}

    def observe(self, cluster: Cluster, *, now: float) -> None:
        """Note the unreachable nodes, and forget the others."""
        before, self._seen = self._seen, {}
        for (name,), stored in cluster.tables[kinds.NODE.prefix].items():
            node = NodeName(name)
            if is_marked(cluster, node, stored.revision):
                known = before.get(node)
                self._seen[node] = known if known and known[0] == stored.revision else (stored.revision, now)

    def longer_than(self, limit: float, *, now: float) -> Iterator[tuple[NodeName, Revision]]:
        """The nodes that are unreachable longer than the limit, with the revision of their mark.

        They stop allocating after the same time (--offline-limit).
        """
        return ((name, revision) for name, (revision, since) in self._seen.items() if now - since > limit)


def is_marked(cluster: Cluster, name: NodeName, revision: Revision) -> bool:
    """Whether a node is unreachable, and has been so since the mark of this revision."""
    stored = cluster.get(kinds.NODE, name)
    if stored is None or stored.revision != revision:
        return False
    return bool(stored.value.unreachable_since) and cluster.is_unreachable(name)


def plan_collect(reading: ReadSet, name: NodeName, *, marked: Revision) -> Transaction:
    """Reclaim a batch of a dead node's endpoints; its document goes last, with its blocks. Empty when all is done.

    `marked` is the revision of the mark that is old enough: a later one is another silence. The commit compares the
    node's leased key as absent, so that a node that reconnects keeps what is left. The node's own commits compare the
    same key as present, so that none of them can interleave.
    """
    reading.get(kinds.NODE, name)
    if not is_marked(reading.cluster, name, marked):
        return Transaction()
    reading.compare_revision(kinds.alive_node(name), NEVER)
    own = [endpoint for endpoint in reading.cluster.all(kinds.ENDPOINT) if endpoint.host == name]
    if own:
        return reading.plan([write for endpoint in own[:BATCH] for write in _reclaim(reading, endpoint)])
    blocks = {
        ipam.block_key(network, block): stored.revision
        for network in reading.cluster.all(kinds.NETWORK)
        for block, stored in reading.cluster.blocks.get(network.key, {}).items()
        if stored.value.owner == name
    }
    writes: list[Write] = []
    # The document is the proof that something is left: it goes only with the last batch.
    if len(blocks) <= BATCH:
        writes += [Delete(kinds.NODE.store_key(name)), Delete(kinds.applied_key(name))]
    for key, revision in list(blocks.items())[:BATCH]:
        reading.compare_revision(key, revision)
        writes.append(Delete(key))
    return reading.plan(writes)


def _reclaim(reading: ReadSet, endpoint: model.Endpoint) -> list[Write]:
    reading.get(kinds.ENDPOINT, *endpoint.key)  # compared: nothing of a newer endpoint of the same key is freed
    stored = reading.cluster.get(kinds.NETWORK, endpoint.tenant, endpoint.network)
    freed = ipam.release(stored.value, endpoint.ip_address, endpoint.ipv6_address) if stored else []
    return [Delete(kinds.ENDPOINT.store_key(*endpoint.key)), *freed]
