"""The cluster's state in memory: the decoded content of the store at a revision, with the indexes decisions need.

A mirror of the store feeds it; all others only read it. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from weft.domain import kinds, model
from weft.domain.addresses import Address, Range, parse_range
from weft.domain.codec import Read
from weft.domain.errors import WeftError
from weft.domain.ids import EndpointKey, GroupKey, NetworkKey, NodeName, StoreKey, TenantName, store_key
from weft.domain.ipam.allocator import BLOCK_SIZE, NumberSet
from weft.domain.kinds import Kind
from weft.domain.store_documents import (
    UNREADABLE_BLOCK,
    UNREADABLE_CLAIM,
    Unreadable,
    decode_stored,
    unreadable,
)
from weft.domain.store_keys import (
    AddressClaimKey,
    AliveKey,
    AppliedKey,
    BlockKey,
    NumberClaimKey,
    ObjectKey,
    ParsedKey,
    SingletonKey,
    parse_store_key,
)
from weft.domain.store_types import NEVER, Change, DeleteAll, Listing, Put, Revision, Write

T = TypeVar("T", bound=model.Value)

# Kinds that are absent while their document cannot be read. All others keep their last good value: losing a policy, a
# group or a network would open or cut traffic of others.
_WRITTEN_BY_NODES = frozenset({kinds.ENDPOINT.prefix, kinds.NODE.prefix})


class Stored(NamedTuple, Generic[T]):
    """A value and the revision of its last put."""

    value: T
    revision: int


class NumberPool:
    """The numbers allocated in one pool, and the holder of each."""

    __slots__ = ("holders", "taken")

    def __init__(self) -> None:
        self.holders: dict[int, Stored[model.Claim]] = {}
        self.taken = NumberSet()

    def put(self, number: int, claim: Stored[model.Claim]) -> None:
        self.holders[number] = claim
        self.taken.add(number)

    def drop(self, number: int) -> None:
        self.holders.pop(number, None)
        self.taken.discard(number)

    def copy(self) -> NumberPool:
        twin = NumberPool()
        twin.holders = dict(self.holders)
        twin.taken = self.taken.copy()
        return twin


class Cluster:
    """All that the control plane knows. Keys of unknown kinds are ignored, so that a newer Weft can share the store."""

    def __init__(self) -> None:
        # By kind: how often a document could not be read, once for each revision of a key. Never reset.
        self.decode_errors: dict[str, int] = {}
        self.faults: dict[StoreKey, Unreadable] = {}
        # During a listing: the faults from before, which are not counted again.
        self._counted: Mapping[StoreKey, Unreadable] = {}
        self.reset()

    def reset(self) -> None:
        """Empty the snapshot."""
        # By kind prefix, then by key parts. The type of a value follows from its kind, which a dict type cannot say.
        self.tables: dict[str, dict[tuple[str, ...], Stored[Any]]] = {kind.prefix: {} for kind in kinds.ALL}
        # Endpoints of a network: the table by key would have to be scanned for each ADD.
        self.by_network: dict[NetworkKey, dict[str, Stored[model.Endpoint]]] = {}
        # Addresses of endpoints by network and family, for the search of the next free one.
        self.in_use: dict[tuple[NetworkKey, int], NumberSet] = {}
        # Endpoints with an address that neither a block of their node nor a claim of theirs covers. Routes, policy,
        # services and DNS ignore them: a node that writes to etcd directly could take over any address (H3).
        self.uncovered: dict[tuple[str, ...], None] = {}
        # Endpoints that are covered, or no longer so, because of blocks and claims in the last change.
        self.cover_changed: list[StoreKey] = []
        # Address pools of groups, which other endpoints must not use.
        self.pools: dict[NetworkKey, dict[str, Range]] = {}
        self.numbers: dict[str, NumberPool] = {}
        self.addresses: dict[tuple[NetworkKey, int], NumberPool] = {}
        self.blocks: dict[NetworkKey, dict[Address, Stored[model.Block]]] = {}
        self.alive: dict[str, dict[str, bytes]] = {"nodes": {}, "masters": {}}
        # What each node has acknowledged, and the revision of the last request for an acknowledgement.
        self.sync_statuses: dict[str, model.SyncStatus] = {}
        self.sync_request: Revision = NEVER
        # The leader's address, and the revision of its fence.
        self.leader: tuple[str, int] | None = None
        self.restoring = False
        # The store's format; empty before netmaster has marked it.
        self.format = ""
        # Keys that cannot be read, with the reason; /readyz and /inspect/driver show them.
        self.faults = {}
        # Members that only a newer Weft knows: written back when this Weft updates the document.
        self.unknown: dict[StoreKey, Mapping[str, object]] = {}

    def replace(self, listing: Listing) -> None:
        """Replace the content by a full listing."""
        # Endpoints are left out: they are most of the store, and a second copy of them would cost its memory.
        known = {prefix: table for prefix, table in self.tables.items() if prefix not in _WRITTEN_BY_NODES}
        self._counted = self.faults
        self.reset()
        for entry in listing.entries:
            self.put(entry.key, entry.value, entry.revision)
        self._counted = {}
        # After the listing: only what is unreadable needs its last good value, and nearly always nothing is.
        for key, fault in self.faults.items():
            self._keep_last_good(key, fault.revision, known)

    def _keep_last_good(self, key: StoreKey, revision: int, known: Mapping[str, Mapping[Any, Stored[Any]]]) -> None:
        parsed = parse_store_key(key)
        if not isinstance(parsed, ObjectKey) or parsed.kind.prefix in _WRITTEN_BY_NODES:
            return
        if stored := known[parsed.kind.prefix].get(parsed.parts):
            self._index_object(parsed.kind, Stored(stored.value, revision))

    def apply(self, change: Change) -> None:
        """Apply the events of one revision."""
        self.cover_changed = []
        for event in change.events:
            if event.value is None:
                self.drop(event.key)
            else:
                self.put(event.key, event.value, change.revision)

    def copy(self) -> Cluster:
        """A copy to simulate changes on."""
        twin = Cluster()
        # Every attribute is a snapshot of immutable values, so that a shallow copy of containers suffices.
        for name, table in vars(self).items():
            setattr(twin, name, _copied(table))
        return twin

    def carry_out(self, writes: Iterable[Write]) -> list[StoreKey]:
        """Apply the writes of a commit to a copy; the keys that changed."""
        touched: list[StoreKey] = []
        for write in writes:
            if isinstance(write, Put):
                self.put(write.key, write.value, 1)
                touched.append(write.key)
                continue
            gone = self.keys_under(write.prefix) if isinstance(write, DeleteAll) else [write.key]
            for key in gone:
                self.drop(key)
            touched += gone
        return touched

    def keys_under(self, prefix: StoreKey) -> list[StoreKey]:
        """The keys of objects under a prefix; claims and blocks are not included."""
        # A prefix is not a key: it may have any number of parts, so the key parser does not apply.
        folder, *lead = prefix.rstrip("/").split("/")
        table = self.tables.get(folder, {})
        return [store_key(folder, *parts) for parts in table if list(parts[: len(lead)]) == lead]

    def put(self, key: StoreKey, value: bytes, revision: int) -> None:
        """Add one entry of the store. One that cannot be read becomes a fault for operators; nothing is raised."""
        parsed = parse_store_key(key)
        try:
            # Decoded before anything is changed: a document that fails half-way must leave nothing in the indexes.
            self._put(parsed, key, value, revision, decode_stored(parsed, value))
        except (WeftError, ValueError) as error:
            self._put_unreadable(parsed, key, unreadable(parsed, key, error, revision=revision))
        else:
            self.faults.pop(key, None)

    def _put(self, parsed: ParsedKey, key: StoreKey, value: bytes, revision: int, found: Read[Any] | None) -> None:
        if found is not None:
            self._note_unknown(key, found)
        match parsed, found:
            case ObjectKey(kind, _), Read(document):
                self._index_object(kind, Stored(document, revision))
            case AddressClaimKey(network, address), Read(document):
                self._set_claim(network, address, Stored(document, revision))
            case NumberClaimKey(pool, number), Read(document):
                self.number_pool(pool).put(number, Stored(document, revision))
            case BlockKey(network, first), Read(document):
                self._set_block(network, first, Stored(document, revision))
            case AppliedKey(node), Read(document):
                self.sync_statuses[node] = document
            case AliveKey(group, name), _:
                self.alive.setdefault(group, {})[name] = value
            case SingletonKey(kinds.SYNC_REQUEST_KEY), _:
                self.sync_request = revision
            case SingletonKey(kinds.LEADER_KEY), _:
                self.leader = (kinds.leader_address(value), revision)
            case SingletonKey(kinds.RESTORE_KEY), _:
                self.restoring = True
            case SingletonKey(kinds.FORMAT_KEY), _:
                self.format = value[:20].decode(errors="replace")

    def _put_unreadable(self, parsed: ParsedKey, key: StoreKey, fault: Unreadable) -> None:
        """Record a fault, and what holds in spite of it: the last good value, or that an address is taken."""
        if self._counted.get(key) != fault:
            self.decode_errors[fault.kind] = self.decode_errors.get(fault.kind, 0) + 1
        before = self.get(parsed.kind, *parsed.parts) if isinstance(parsed, ObjectKey) else None
        self.drop(key)
        if before is not None and isinstance(parsed, ObjectKey):
            self._keep_last_good(key, fault.revision, {parsed.kind.prefix: {parsed.parts: before}})
        match parsed:
            case AddressClaimKey(network, address):
                self._set_claim(network, address, Stored(UNREADABLE_CLAIM, fault.revision))
            case NumberClaimKey(pool, number):
                self.number_pool(pool).put(number, Stored(UNREADABLE_CLAIM, fault.revision))
            case BlockKey(network, first):
                self._set_block(network, first, Stored(UNREADABLE_BLOCK, fault.revision))
        self.faults[key] = fault

    def _index_object(self, kind: Kind[Any], stored: Stored[Any]) -> None:
        decoded = stored.value
        # Index by the value's own strings, not by slices of the key: with many objects the copies would add up.
        own_parts = kind.key_parts(decoded)
        before = self.tables[kind.prefix].get(own_parts)
        self.tables[kind.prefix][own_parts] = stored
        if isinstance(decoded, model.Group):
            self._drop_pool(before)
            self._put_pool(decoded)
        elif isinstance(decoded, model.Endpoint):
            if before is not None:
                self._drop_endpoint(before.value)
            self.by_network.setdefault(decoded.network_key, {})[decoded.endpoint_id] = stored
            addresses = decoded.addresses
            for address in addresses:
                self.numbers_in_use(decoded.network_key, address.family).add(address.number)
            if not self._covers(decoded, addresses):
                self.uncovered[own_parts] = None

    def _note_unknown(self, key: StoreKey, found: Read[Any]) -> None:
        if found.unknown:
            self.unknown[key] = found.unknown
        else:
            self.unknown.pop(key, None)

    def unreadable_objects(self, kind: Kind[Any], *lead: str) -> Iterator[StoreKey]:
        """The keys of unreadable objects of a kind whose keys start with these parts."""
        for key in self.faults:
            parsed = parse_store_key(key)
            if isinstance(parsed, ObjectKey) and parsed.kind is kind and parsed.parts[: len(lead)] == lead:
                yield key

    def exists(self, kind: Kind[Any], *parts: str) -> bool:
        """Whether the store has a document of the object, readable or not. Garbage is no proof of a deletion."""
        return parts in self.tables[kind.prefix] or self.is_unreadable(kind, *parts)

    def is_unreadable(self, kind: Kind[Any], *parts: str) -> bool:
        """Whether the stored document of an object cannot be read; there may be a last good value of it."""
        return bool(self.faults) and kind.store_key(*parts) in self.faults

    def drop(self, key: StoreKey) -> None:
        """Remove one entry; absent already is fine."""
        self.faults.pop(key, None)
        self.unknown.pop(key, None)
        match parse_store_key(key):
            case ObjectKey(kind, parts):
                gone = self.tables[kind.prefix].pop(parts, None)
                self._drop_pool(gone)
                if gone is not None:
                    self._drop_endpoint(gone.value)
            case AddressClaimKey(network, address):
                self._set_claim(network, address, None)
            case NumberClaimKey(pool, number):
                self.number_pool(pool).drop(number)
            case BlockKey(network, first):
                self._set_block(network, first, None)
            case AliveKey(group, name):
                self.alive.get(group, {}).pop(name, None)
            case AppliedKey(node):
                self.sync_statuses.pop(node, None)
            case SingletonKey(kinds.SYNC_REQUEST_KEY):
                self.sync_request = NEVER
            case SingletonKey(kinds.LEADER_KEY):
                self.leader = None
            case SingletonKey(kinds.RESTORE_KEY):
                self.restoring = False
            case SingletonKey(kinds.FORMAT_KEY):
                self.format = ""

    def _set_claim(self, network: NetworkKey, address: Address, claim: Stored[model.Claim] | None) -> None:
        pool = self.address_pool(network, address.family)
        before = pool.holders.get(address.number)
        if claim is None:
            pool.drop(address.number)
        else:
            pool.put(address.number, claim)
        for holder in {each.value.holder for each in (before, claim) if each}:
            kind, _, parts = holder.partition(":")
            if kind == kinds.ENDPOINT.name and (found := self.get(kinds.ENDPOINT, *parts.split(":"))):
                self._check_cover(found.value)

    def _set_block(self, network: NetworkKey, first: Address, block: Stored[model.Block] | None) -> None:
        blocks = self.blocks.setdefault(network, {})
        before = blocks.pop(first, None)
        if block is not None:
            blocks[first] = block
        if (before and before.value.owner) == (block and block.value.owner):
            return
        # Nearly always a block is taken before, and returned after, an endpoint has one of its addresses.
        last = first.number + BLOCK_SIZE - 1
        if self.numbers_in_use(network, first.family).next_taken(first.number, last) is None:
            return
        for endpoint in list(self.endpoints(network)):
            if any(each.family == first.family and first.number <= each.number <= last for each in endpoint.addresses):
                self._check_cover(endpoint)

    def _check_cover(self, endpoint: model.Endpoint) -> None:
        parts = tuple(endpoint.key)
        is_covered = self.covers(endpoint)
        if is_covered is (parts not in self.uncovered):
            return
        if is_covered:
            del self.uncovered[parts]
        else:
            self.uncovered[parts] = None
        self.cover_changed.append(kinds.ENDPOINT.store_key(*parts))

    def covers(self, endpoint: model.Endpoint) -> bool:
        """Whether each address of an endpoint is claimed by it or, where nobody claims it, in a block of its node."""
        return self._covers(endpoint, endpoint.addresses)

    def _covers(self, endpoint: model.Endpoint, addresses: Iterable[Address]) -> bool:
        blocks = self.blocks.get(endpoint.network_key, {})
        for address in addresses:
            claim = self.address_pool(endpoint.network_key, address.family).holders.get(address.number)
            if claim is not None:
                if claim.value.holder != f"{kinds.ENDPOINT.name}:{endpoint.key}":
                    return False
                continue
            # A subnet with blocks has at least 1,024 addresses, so that each of its blocks is aligned.
            block = blocks.get(Address(address.family, address.number - address.number % BLOCK_SIZE))
            if block is None or block.value.owner != endpoint.host:
                return False
        return True

    def covered_endpoint(self, key: EndpointKey) -> model.Endpoint | None:
        """An endpoint whose addresses are its own; None for an absent and for an uncovered one."""
        stored = None if key in self.uncovered else self.get(kinds.ENDPOINT, *key)
        return stored.value if stored else None

    def covered_endpoints(self, network: NetworkKey) -> Iterator[model.Endpoint]:
        """The endpoints of a network whose addresses are their own, in no order."""
        return (endpoint for endpoint in self.endpoints(network) if endpoint.key not in self.uncovered)

    def _put_pool(self, group: model.Group) -> None:
        if group.ip_pool:
            pools = self.pools.setdefault(NetworkKey(group.tenant, group.network), {})
            pools[group.name] = parse_range(group.ip_pool, field="ipPool", family=4)

    def _drop_pool(self, gone: Stored[model.Value] | None) -> None:
        if gone and isinstance(gone.value, model.Group):
            self.pools.get(NetworkKey(gone.value.tenant, gone.value.network), {}).pop(gone.value.name, None)

    def _drop_endpoint(self, gone: model.Value) -> None:
        if not isinstance(gone, model.Endpoint):
            return
        self.uncovered.pop(tuple(gone.key), None)
        for address in gone.addresses:
            self.numbers_in_use(gone.network_key, address.family).discard(address.number)
        members = self.by_network.get(gone.network_key, {})
        members.pop(gone.endpoint_id, None)
        if not members:
            self.by_network.pop(gone.network_key, None)

    def address_pool(self, network: NetworkKey, family: int) -> NumberPool:
        """The addresses claimed individually in a network."""
        return self.addresses.setdefault((network, family), NumberPool())

    def numbers_in_use(self, network: NetworkKey, family: int) -> NumberSet:
        """The addresses of the endpoints of a network, from claims and from blocks."""
        return self.in_use.setdefault((network, family), NumberSet())

    def number_pool(self, name: str) -> NumberPool:
        """The tags or ids claimed in a pool."""
        return self.numbers.setdefault(name, NumberPool())

    def get(self, kind: Kind[T], *parts: str) -> Stored[T] | None:
        return self.tables[kind.prefix].get(parts)

    def all(self, kind: Kind[T], *lead: str) -> Iterator[T]:
        """The objects of a kind whose keys start with these parts, in key order."""
        table = self.tables[kind.prefix]
        size = len(lead)
        for parts in sorted(parts for parts in table if parts[:size] == lead):
            yield table[parts].value

    def endpoints(self, network: NetworkKey) -> Iterable[model.Endpoint]:
        """The endpoints of a network, in no order."""
        return (stored.value for stored in self.by_network.get(network, {}).values())

    def find_endpoints(self, text: str) -> Iterator[model.Endpoint]:
        """Endpoints by key, or by any part of their id, container id or container name, in key order (contiv 2.2)."""
        for endpoint in self.all(kinds.ENDPOINT):
            parts = (endpoint.endpoint_id, endpoint.container_id, endpoint.container_name)
            if text and (text == str(endpoint.key) or any(text in part for part in parts)):
                yield endpoint

    def group_members(self, group: model.Group) -> Iterator[model.Endpoint]:
        """The endpoints of a group."""
        network = NetworkKey(group.tenant, group.network)
        return (endpoint for endpoint in self.endpoints(network) if endpoint.group == group.name)

    def group(self, key: GroupKey) -> model.Group | None:
        stored = self.get(kinds.GROUP, *key)
        return stored.value if stored else None

    def networks(self, tenant: TenantName) -> Iterator[model.Network]:
        return self.all(kinds.NETWORK, tenant)

    def global_settings(self) -> model.Global:
        """The cluster's settings; the defaults before the first start has written them."""
        stored = self.get(kinds.GLOBAL, "global")
        return stored.value if stored else model.Global()

    def is_unreachable(self, node: NodeName) -> bool:
        """Whether the lease of a node's agent has expired."""
        return node not in self.alive["nodes"]


def _copied(table: Any) -> Any:
    """A copy of a dict, and of the dicts and pools in it. Values are immutable and shared."""
    if isinstance(table, dict):
        return {key: _copied(value) for key, value in table.items()}
    return table.copy() if isinstance(table, NumberPool | NumberSet) else table
