"""A fresh store is marked with our format, one of ours is accepted, and any other is refused with the remedy."""

from __future__ import annotations

import pytest

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict
from weft.domain.ids import DEFAULT_TENANT, NodeName
from weft.domain.lifecycle.store_format import FORMAT, plan_format
from weft.domain.store_types import NEVER, Put, RevisionEquals
from weft.domain.transaction import ReadSet, Transaction

MARKER = str(FORMAT).encode()


def plan(*entries: Put) -> Transaction:
    cluster = Cluster()
    for revision, entry in enumerate(entries, start=1):
        cluster.put(entry.key, entry.value, revision)
    return plan_format(ReadSet(cluster, len(entries) + 1))


def tenant() -> Put:
    return Put(kinds.TENANT.store_key(DEFAULT_TENANT), codec.encode(model.Tenant(name=DEFAULT_TENANT)))


def test_a_fresh_store_is_marked() -> None:
    marked = plan()
    assert marked.writes == (Put(kinds.FORMAT_KEY, MARKER),)
    assert marked.compares == (RevisionEquals(kinds.FORMAT_KEY, NEVER),)


def test_a_node_that_registered_first_leaves_the_store_fresh() -> None:
    """With etcd an agent does not need netmaster to register."""
    node = Put(kinds.NODE.store_key("n1"), codec.encode(model.Node(name=NodeName("n1"))))
    assert plan(node, Put(kinds.alive_node("n1"), b"{}")).writes


def test_a_marked_store_stays_as_it_is() -> None:
    assert plan(Put(kinds.FORMAT_KEY, MARKER), tenant()) == Transaction()


@pytest.mark.parametrize(
    "entries",
    [(tenant(),), (Put(kinds.FORMAT_KEY, b"1"), tenant()), (Put(kinds.FORMAT_KEY, b"99"),)],
    ids=["older", "named", "newer"],
)
def test_another_format_is_refused_with_the_remedy(entries: tuple[Put, ...]) -> None:
    with pytest.raises(Conflict, match="empty store"):
        plan(*entries)
