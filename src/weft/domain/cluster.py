"""The cluster's state in memory, decoded: what the store holds as of a revision, with the indexes decisions need.

It is fed by a mirror of the store and otherwise only read. Nothing here waits or talks to anyone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, Range, address_from_hex, parse_range
from weft.domain.errors import Malformed, WeftError
from weft.domain.ids import GroupKey, NetworkKey, NodeName, StoreKey, TenantName, store_key
from weft.domain.ipam.allocator import NumberSet
from weft.domain.kinds import Kind
from weft.domain.store_types import NEVER, Change, DeleteAll, Listing, Put, Revision, Write

T = TypeVar("T", bound=model.Value)


class Stored(NamedTuple, Generic[T]):
    """A value and the revision of its last put."""

    value: T
    revision: int


class NumberPool:
    """Numbers taken in one pool: who holds which, and which is the next free one."""

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
    """Everything the control plane knows. Keys of unknown kinds are kept out, so newer neighbours do no harm."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.tables: dict[str, dict[tuple[str, ...], Stored[model.Value]]] = {kind.prefix: {} for kind in kinds.ALL}
        self.by_network: dict[NetworkKey, dict[str, Stored[model.Endpoint]]] = {}
        self.in_use: dict[tuple[NetworkKey, int], NumberSet] = {}
        self.pools: dict[NetworkKey, dict[str, Range]] = {}
        self.numbers: dict[str, NumberPool] = {}
        self.addresses: dict[tuple[NetworkKey, int], NumberPool] = {}
        self.blocks: dict[NetworkKey, dict[Address, Stored[model.Block]]] = {}
        self.alive: dict[str, dict[str, bytes]] = {"nodes": {}, "masters": {}}
        self.receipts: dict[str, model.Receipt] = {}
        self.receipt_wish: Revision = NEVER
        self.leader: tuple[str, int] | None = None
        self.restoring = False
        self.faults: dict[StoreKey, str] = {}
        # Members of documents that only a newer Weft knows: kept for whoever writes the document again.
        self.unknown: dict[StoreKey, Mapping[str, object]] = {}

    def replace(self, listing: Listing) -> None:
        """Start anew from all there is."""
        self.reset()
        for entry in listing.entries:
            self.put(entry.key, entry.value, entry.revision)

    def apply(self, change: Change) -> None:
        """Take in what one revision changed."""
        for event in change.events:
            if event.value is None:
                self.drop(event.key)
            else:
                self.put(event.key, event.value, change.revision)

    def copy(self) -> Cluster:
        """A twin to try changes out on."""
        twin = Cluster()
        for name, table in vars(self).items():
            setattr(twin, name, _copied(table))
        return twin

    def carry_out(self, writes: Iterable[Write]) -> list[StoreKey]:
        """Do what a commit would do, on a twin; the keys that were touched."""
        touched: list[StoreKey] = []
        for write in writes:
            if isinstance(write, Put):
                self.put(write.key, write.value, 1)
                touched.append(write.key)
                continue
            gone = self._keys_under(write.prefix) if isinstance(write, DeleteAll) else [write.key]
            for key in gone:
                self.drop(key)
            touched += gone
        return touched

    def _keys_under(self, prefix: StoreKey) -> list[StoreKey]:
        """The keys of objects under a prefix; claims and blocks are not looked for."""
        folder, *lead = prefix.rstrip("/").split("/")
        table = self.tables.get(folder, {})
        return [store_key(folder, *parts) for parts in table if list(parts[: len(lead)]) == lead]

    def put(self, key: StoreKey, value: bytes, revision: int) -> None:
        """Take in one entry of the store. One that cannot be read is a fault, shown to operators, not an end."""
        try:
            self._put(key, value, revision)
            self.faults.pop(key, None)
        except (WeftError, ValueError) as error:
            self.drop(key)
            self.faults[key] = str(error)

    def _put(self, key: StoreKey, value: bytes, revision: int) -> None:
        folder, *parts = key.split("/")
        if kind := kinds.BY_PREFIX.get(folder):
            decoded = self._read(kind.type, key, value)
            own_parts = kind.key_parts(decoded)  # these are strings of the value: of many objects that counts
            if own_parts != tuple(parts):
                raise Malformed(f"stored {kind.name} is that of {kind.key_text(decoded)!r}")
            before = self.tables[folder].get(own_parts)
            stored: Stored[Any] = Stored(decoded, revision)
            self.tables[folder][own_parts] = stored
            if isinstance(decoded, model.Group):
                self._drop_pool(before)
                self._put_pool(decoded)
            elif isinstance(decoded, model.Endpoint):
                if before is not None:
                    self._drop_endpoint(before.value)
                self.by_network.setdefault(decoded.network_key, {})[decoded.endpoint_id] = stored
                for address in decoded.addresses:
                    self.numbers_in_use(decoded.network_key, address.family).add(address.number)
        elif folder == kinds.CLAIMS:
            pool, number = self._claim_of(parts)
            pool.put(number, Stored(self._read(model.Claim, key, value), revision))
        elif folder == kinds.BLOCKS:
            tenant, network, first = parts
            blocks = self.blocks.setdefault(_network_key(tenant, network), {})
            blocks[address_from_hex(first)] = Stored(self._read(model.Block, key, value), revision)
        else:
            self._put_sign(key, value, revision)

    def _read(self, kind: type[T], key: StoreKey, document: bytes) -> T:
        read = codec.read(kind, document)
        if read.unknown:
            self.unknown[key] = read.unknown
        else:
            self.unknown.pop(key, None)
        return read.value

    def _put_sign(self, key: StoreKey, value: bytes, revision: int) -> None:
        """What living processes say of themselves and to each other."""
        folder, *parts = key.split("/")
        if folder == kinds.ALIVE:
            group, name = parts
            self.alive.setdefault(group, {})[name] = value
        elif folder == kinds.STATUS:
            if node := _receipt_of(parts):
                self.receipts[node] = codec.decode(model.Receipt, value)
        elif key == kinds.RECEIPT_WISH_KEY:
            self.receipt_wish = revision
        elif key == kinds.LEADER_KEY:
            self.leader = (value.decode(), revision)
        elif key == kinds.RESTORE_KEY:
            self.restoring = True

    def drop(self, key: StoreKey) -> None:
        """Forget one entry; absent already is fine."""
        self.faults.pop(key, None)
        self.unknown.pop(key, None)
        with suppress(ValueError):  # a key that is none of ours was never taken in
            self._drop(key)

    def _drop(self, key: StoreKey) -> None:
        folder, *parts = key.split("/")
        if folder in kinds.BY_PREFIX:
            gone = self.tables[folder].pop(tuple(parts), None)
            self._drop_pool(gone)
            if gone is not None:
                self._drop_endpoint(gone.value)
        elif folder == kinds.CLAIMS:
            pool, number = self._claim_of(parts)
            pool.drop(number)
        elif folder == kinds.BLOCKS:
            tenant, network, first = parts
            self.blocks.get(_network_key(tenant, network), {}).pop(address_from_hex(first), None)
        else:
            self._drop_sign(key)

    def _drop_sign(self, key: StoreKey) -> None:
        folder, *parts = key.split("/")
        if folder == kinds.ALIVE:
            group, name = parts
            self.alive.get(group, {}).pop(name, None)
        elif folder == kinds.STATUS:
            self.receipts.pop(_receipt_of(parts), None)
        elif key == kinds.RECEIPT_WISH_KEY:
            self.receipt_wish = NEVER
        elif key == kinds.LEADER_KEY:
            self.leader = None
        elif key == kinds.RESTORE_KEY:
            self.restoring = False

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
        for address in gone.addresses:
            self.numbers_in_use(gone.network_key, address.family).discard(address.number)
        members = self.by_network.get(gone.network_key, {})
        members.pop(gone.endpoint_id, None)
        if not members:
            self.by_network.pop(gone.network_key, None)

    def _claim_of(self, parts: list[str]) -> tuple[NumberPool, int]:
        """The pool and the number that a claim's key names; ValueError when it is none."""
        if parts[:1] == ["addresses"]:
            _, tenant, network, text = parts
            address = address_from_hex(text)
            return self.address_pool(_network_key(tenant, network), address.family), address.number
        pool, text = parts
        if str(int(text)) != text:
            raise ValueError(f"{text!r} is not how a number is written")
        return self.number_pool(pool), int(text)

    def address_pool(self, network: NetworkKey, family: int) -> NumberPool:
        """The addresses claimed one by one in a network."""
        return self.addresses.setdefault((network, family), NumberPool())

    def numbers_in_use(self, network: NetworkKey, family: int) -> NumberSet:
        """The addresses that endpoints of a network have, however they got them."""
        return self.in_use.setdefault((network, family), NumberSet())

    def number_pool(self, name: str) -> NumberPool:
        """The tags or ids claimed in a pool."""
        return self.numbers.setdefault(name, NumberPool())

    def get(self, kind: Kind[T], *parts: str) -> Stored[T] | None:
        return self.tables[kind.prefix].get(parts)  # type: ignore[return-value]

    def all(self, kind: Kind[T], *lead: str) -> Iterator[T]:
        """The objects of a kind whose keys start with these parts, in key order."""
        table = self.tables[kind.prefix]
        size = len(lead)
        for parts in sorted(parts for parts in table if parts[:size] == lead):
            yield table[parts].value  # type: ignore[misc]

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

    def is_silent(self, node: NodeName) -> bool:
        """Whether a node's agent has not been heard of within its lease."""
        return node not in self.alive["nodes"]


def _copied(table: Any) -> Any:
    """A dict copied with the dicts and pools in it; values never change, so they are shared."""
    if isinstance(table, dict):
        return {key: _copied(value) for key, value in table.items()}
    return table.copy() if isinstance(table, NumberPool | NumberSet) else table


def _receipt_of(parts: list[str]) -> str:
    """The node whose receipt a key in the folder of all status is; empty for anything else."""
    match parts:
        case ["nodes", node, "receipt"]:
            return node
    return ""


def _network_key(tenant: str, network: str) -> NetworkKey:
    return NetworkKey(tenant, network)  # type: ignore[arg-type]
