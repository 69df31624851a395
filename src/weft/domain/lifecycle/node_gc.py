"""When a silent node's endpoints and blocks are taken back (ADR 2, W12), decided with the time passed in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import NodeName
from weft.domain.ipam import ipam
from weft.domain.store_types import NEVER, Delete, Write
from weft.domain.transaction import ReadSet, Transaction, put

# Endpoints collected in one commit: stores bound the size of a commit.
BATCH = 30


def nodes_to_mark(cluster: Cluster) -> Iterator[NodeName]:
    """Nodes whose silence began or ended and is not written down yet."""
    for node in cluster.all(kinds.NODE):
        if cluster.is_silent(node.name) == (node.silent_since == 0):
            yield node.name


def plan_mark(reading: ReadSet, name: NodeName, *, now: float) -> Transaction:
    """Write down since when a node is silent, or that it is heard again.

    A node puts its document anew, unmarked, in the commit in which it shows itself; so a mark that is there was made
    after the node was last heard of.
    """
    node = reading.get(kinds.NODE, name)
    if node is None:
        return Transaction()
    since = 0.0
    if reading.cluster.is_silent(name):
        since = now
        reading.at(kinds.alive_node(name), NEVER)
    if (since == 0) == (node.silent_since == 0):
        return Transaction()
    return reading.plan([put(kinds.NODE, msgspec.structs.replace(node, silent_since=since))])


def nodes_to_collect(cluster: Cluster, *, now: float, limit: float) -> Iterator[NodeName]:
    """Nodes that have been silent for longer than the limit, which they themselves obey too."""
    return (node.name for node in cluster.all(kinds.NODE) if _is_dead(cluster, node, now=now, limit=limit))


def _is_dead(cluster: Cluster, node: model.Node, *, now: float, limit: float) -> bool:
    return bool(node.silent_since) and cluster.is_silent(node.name) and now - node.silent_since > limit


def plan_collect(reading: ReadSet, name: NodeName, *, now: float, limit: float) -> Transaction:
    """Take back a part of what a dead node had; its own document goes last, with its blocks. Empty when all is done.

    The node's leased key is compared as absent, so a node that comes back in this very moment keeps what is left. The
    node's own commits compare the same key as theirs, so none of them can come in between.
    """
    node = reading.get(kinds.NODE, name)
    if node is None or not _is_dead(reading.cluster, node, now=now, limit=limit):
        return Transaction()
    reading.at(kinds.alive_node(name), NEVER)
    mine = [endpoint for endpoint in reading.cluster.all(kinds.ENDPOINT) if endpoint.host == name]
    if mine:
        return reading.plan([write for endpoint in mine[:BATCH] for write in _take_back(reading, endpoint)])
    blocks = {
        ipam.block_key(network, block): stored.revision
        for network in reading.cluster.all(kinds.NETWORK)
        for block, stored in reading.cluster.blocks.get(network.key, {}).items()
        if stored.value.owner == name
    }
    writes: list[Write] = []
    if len(blocks) <= BATCH:
        writes += [Delete(kinds.NODE.store_key(name)), Delete(kinds.receipt_of(name))]
    for key, revision in list(blocks.items())[:BATCH]:
        reading.at(key, revision)
        writes.append(Delete(key))
    return reading.plan(writes)


def _take_back(reading: ReadSet, endpoint: model.Endpoint) -> list[Write]:
    reading.get(kinds.ENDPOINT, *endpoint.key)
    stored = reading.cluster.get(kinds.NETWORK, endpoint.tenant, endpoint.network)
    freed = ipam.release(stored.value, endpoint.ip_address, endpoint.ipv6_address) if stored else []
    return [Delete(kinds.ENDPOINT.store_key(*endpoint.key)), *freed]
