"""The format of a store: the layout of its keys and documents. Netmaster and agents refuse a
store of another format.

Every store has the key `format`. Stores from before this key have other key and member names (`wishes/receipt`,
`silentSince`). Read by this version they would lose state silently, so they are refused as a whole.
"""

from __future__ import annotations

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict
from weft.domain.store_types import NEVER, Put
from weft.domain.transaction import ReadSet, Transaction

# Raise it with every change after which older netmasters and agents would misread the store. The embedded store's
# file has the same number as its `user_version`, see `weft.adapters.stores.sqlite_file`.
FORMAT = 2

_REMEDY = "start with an empty store (another etcd, or one without keys under /weft/)"


def check_format(cluster: Cluster) -> None:
    """`Conflict` for a store of another format, or of none although a netmaster has written it."""
    if cluster.format and cluster.format != str(FORMAT):
        raise Conflict(f"the store has format {cluster.format}, this Weft reads format {FORMAT}: {_REMEDY}")
    if not cluster.format and any(cluster.tables[kind.prefix] for kind in kinds.CONFIGURABLE):
        raise Conflict(f"an older Weft wrote this store, this Weft reads format {FORMAT}: {_REMEDY}")


def check_global(cluster: Cluster) -> None:
    """`Conflict` while the cluster's settings are stored but were never read.

    The defaults would be a guess: in a cluster in bridge mode they mean routing, so that a node would rebuild all of
    its ports in the wrong mode. Settings that become unreadable later keep their last good value.
    """
    if cluster.get(kinds.GLOBAL, "global") is None and cluster.is_unreadable(kinds.GLOBAL, "global"):
        key = kinds.GLOBAL.store_key("global")
        reason = cluster.faults[key].reason
        raise Conflict(
            f"{key} in the store cannot be read: {reason}; set the global settings again (netctl global set)"
        )


def plan_format(reading: ReadSet) -> Transaction:
    """The commit that marks a fresh store; empty if it has the marker. `Conflict` for a store of another format."""
    cluster = reading.cluster
    # An agent may reach a fresh etcd before netmaster and register its node there. Only netmaster writes configuration:
    # configuration without the marker is that of an older netmaster.
    check_format(cluster)
    if cluster.format:
        return Transaction()
    reading.compare_revision(kinds.FORMAT_KEY, NEVER)
    return reading.plan([Put(kinds.FORMAT_KEY, str(FORMAT).encode())])
