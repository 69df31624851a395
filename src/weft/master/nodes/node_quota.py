"""Quotas of keys and bytes that one node may have in the store (M3): a node cannot fill the memory of all others.

The usage follows the mirror, so that a check costs no read. Commits in flight are not in it yet: a node may exceed its
quota by what it has in flight at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Denied
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_keys import AddressClaimKey, BlockKey, ObjectKey, parse_store_key
from weft.domain.store_types import Change, Listing, Put, Write

# A node with 1,000 workloads of two families has some 3,000 keys and 2 MB.
MAX_KEYS = 20_000
MAX_BYTES = 32 << 20
# Apart from the keys: a node that has reached its quota must still be able to renew its sign of life. An agent has one,
# and leaves one behind at each restart until that expires.
MAX_LEASES = 1000


# Below it are the keys that name the owners of leases.
LEASE_OWNERS = f"{kinds.ALIVE}/leases/"


class NodeQuotas(Collector):
    """A subscriber of the mirror, behind the cluster, and a collector of Prometheus metrics."""

    def __init__(self, cluster: Cluster, *, max_keys: int = MAX_KEYS, max_bytes: int = MAX_BYTES) -> None:
        self._cluster = cluster
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        # Whose each key is, and its size.
        self._owned: dict[StoreKey, tuple[str, int]] = {}
        self._keys: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        # Whose each lease is, by the key that names its owner.
        self._lease_owners: dict[StoreKey, str] = {}
        self._leases: Counter[str] = Counter()
        self._exceeded = {"keys": 0, "bytes": 0, "leases": 0}

    def replace(self, listing: Listing) -> None:
        self._owned.clear()
        self._keys.clear()
        self._bytes.clear()
        self._lease_owners.clear()
        self._leases.clear()
        for entry in listing.entries:
            self._put(entry.key, entry.value)

    def apply(self, change: Change) -> None:
        for event in change.events:
            self._put(event.key, event.value)

    def check(self, node: NodeName, writes: Sequence[Write]) -> None:
        """`Denied` if the node would exceed its quota by these writes."""
        keys, size = self._keys[node], self._bytes[node]
        for write in writes:
            if isinstance(write, Put):
                owner, before = self._owned.get(write.key, ("", 0))
                is_new = owner != node
                keys += is_new
                size += len(write.key) + len(write.value) - (0 if is_new else before)
        for name, wanted, most in (("keys", keys, self._max_keys), ("bytes", size, self._max_bytes)):
            # What it has already may stay and be replaced; only growth is refused.
            if wanted > most and wanted > (self._keys if name == "keys" else self._bytes)[node]:
                self._exceeded[name] += 1
                raise Denied(
                    f"quota exceeded: node {node} would have {wanted} {name} in the store, the limit is {most}: "
                    "delete endpoints of the node, or find out what writes them"
                )

    def check_lease(self, node: NodeName) -> None:
        """`Denied` if the node has too many leases to get another one."""
        if self._leases[node] >= MAX_LEASES:
            self._exceeded["leases"] += 1
            raise Denied(
                f"quota exceeded: node {node} has {MAX_LEASES} leases, the limit: revoke some, or let them expire"
            )

    def _put_lease(self, key: StoreKey, value: bytes | None) -> None:
        if before := self._lease_owners.pop(key, None):
            self._leases[before] -= 1
            if not self._leases[before]:
                del self._leases[before]
        if value is not None:
            owner = self._lease_owners[key] = value.decode(errors="replace")
            self._leases[owner] += 1

    def _put(self, key: StoreKey, value: bytes | None) -> None:
        if key.startswith(LEASE_OWNERS):
            self._put_lease(key, value)
            return
        if before := self._owned.pop(key, None):
            owner, size = before
            self._keys[owner] -= 1
            self._bytes[owner] -= size
            if not self._keys[owner]:
                del self._keys[owner], self._bytes[owner]
        if value is not None and (owner := self._owner(key)):
            size = len(key) + len(value)
            self._owned[key] = owner, size
            self._keys[owner] += 1
            self._bytes[owner] += size

    def _owner(self, key: StoreKey) -> str:
        """The node that a key counts for; empty for keys of masters."""
        match parse_store_key(key):
            case ObjectKey(kinds.ENDPOINT, parts):
                stored = self._cluster.get(kinds.ENDPOINT, *parts)
                return stored.value.host if stored else ""
            case BlockKey(network, first):
                block = self._cluster.blocks.get(network, {}).get(first)
                return block.value.owner if block else ""
            case AddressClaimKey(network, address):
                claim = self._cluster.address_pool(network, address.family).holders.get(address.number)
                parts = tuple(claim.value.holder.split(":"))[1:] if claim else ()
                holder = self._cluster.get(kinds.ENDPOINT, *parts)
                return holder.value.host if holder else ""
        folder, _, rest = key.partition("/")
        group, _, name = rest.partition("/")
        if folder in (kinds.STATUS, kinds.ALIVE) and group == "nodes":
            return name.partition("/")[0]
        return ""

    def collect(self) -> Iterator[Metric]:
        usage = GaugeMetricFamily(
            "weft_store_largest_node", "Keys and bytes in the store of the node that has most", labels=("unit",)
        )
        for unit, counts in (("keys", self._keys), ("bytes", self._bytes)):
            usage.add_metric((unit,), max(counts.values(), default=0))
        yield usage
        exceeded = CounterMetricFamily(
            "weft_store_quota_exceeded", "Commits and leases of nodes refused because of their quota", labels=("unit",)
        )
        for unit, count in self._exceeded.items():
            exceeded.add_metric((unit,), count)
        yield exceeded
