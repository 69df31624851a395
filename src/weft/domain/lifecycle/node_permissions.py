"""What a node may write through the remote store: only what belongs to it, before the commit and after it.

- its document `nodes/<name>`, its leased key `alive/nodes/<name>`, all under `status/nodes/<name>/`;
- endpoints that run on it: an endpoint never moves to or from another node this way. Each address of an endpoint is
  one of its network. After the same commit, the endpoint holds the claim of it, or nobody does and it lies in a block
  of the node (H3);
- address claims held by its endpoints, or reserved ahead for an endpoint that is still to be created;
- blocks it owns; a block of a network that does not exist yet it may take for itself, or make shared.

Every document must be valid by the rules of REST, and of bounded size (H2, M3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from weft.domain import codec, kinds
from weft.domain.addresses import Address, address_hex
from weft.domain.errors import Denied, Invalid, Malformed, Unavailable
from weft.domain.ids import NodeName, StoreKey, store_key
from weft.domain.ipam import ipam
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.domain.ipam.ipam import RESERVED
from weft.domain.model import Block, Claim, Endpoint, Network
from weft.domain.store_documents import UNREADABLE_BLOCK, UNREADABLE_CLAIM, decode_stored
from weft.domain.store_keys import (
    AddressClaimKey,
    AliveKey,
    AppliedKey,
    BlockKey,
    ObjectKey,
    ParsedKey,
    parse_store_key,
)
from weft.domain.store_types import Delete, DeleteAll, Put, Write

# Bytes of a value that a node may write: all masters and agents keep it in memory, and its history too.
MAX_STATUS = 64 << 10
MAX_ALIVE = 1 << 10
MAX_DOCUMENT = 256 << 10

# The present values of keys; None for a key that does not exist.
Present = Mapping[StoreKey, bytes | None]

# The kind in holders such as `endpoint:default:blue:4f3a`.
_ENDPOINT_HOLDER = "endpoint"


def writable_keys(node: NodeName) -> tuple[StoreKey, ...]:
    """The keys that a node may ever write; one that ends with a slash stands for all keys below it.

    The most that a store can enforce by keys alone (ADR 14): those of endpoints, claims and blocks do not name a node.
    """
    return (
        kinds.NODE.store_key(node),
        kinds.alive_node(node),
        kinds.status_prefix(node),
        kinds.ENDPOINT.store_prefix(),
        kinds.all_address_claims(),
        StoreKey(f"{kinds.BLOCKS}/"),
    )


def missing_keys(writes: Sequence[Write], present: Present) -> frozenset[StoreKey]:
    """The keys whose present values `check_ownership` also needs. Call it again with them: claims lead to endpoints."""
    return frozenset(key for write in writes for key in _required_keys(write, present)) - present.keys()


def check_ownership(node: NodeName, writes: Sequence[Write], present: Present) -> None:
    """`Denied` unless the node owns everything that is written."""
    check = _OwnershipCheck(node, present, {write.key: write for write in writes if not isinstance(write, DeleteAll)})
    for write in writes:
        check.check(write)


def _required_keys(write: Write, present: Present) -> Iterator[StoreKey]:
    if isinstance(write, DeleteAll):
        return
    match parse_store_key(write.key):
        case BlockKey(network, _):
            yield write.key
            if isinstance(write, Put):
                yield kinds.NETWORK.store_key(*network)
        case ObjectKey(kinds.ENDPOINT, (tenant, name, _)):
            yield write.key
            if isinstance(write, Put) and write.key in present:
                for address in _new_addresses(write, present[write.key]):
                    yield kinds.NETWORK.store_key(tenant, name)
                    yield _claim_key(write.key, address)
                    yield _block_key(write.key, address)
        case AddressClaimKey():
            yield write.key
            for document in (present.get(write.key), write.value if isinstance(write, Put) else None):
                endpoint = None if document is None else _endpoint_of(_claim(document))
                if endpoint is not None:
                    yield endpoint


def _claim(document: bytes) -> Claim:
    """A stored claim. One that cannot be read is held by nobody, so that no node may take it."""
    try:
        return codec.decode(Claim, document)
    except (Invalid, Unavailable):
        return UNREADABLE_CLAIM


def _block(document: bytes) -> Block:
    try:
        return codec.decode(Block, document)
    except (Invalid, Unavailable):
        return UNREADABLE_BLOCK


def _endpoint(document: bytes | None) -> Endpoint | None:
    """A stored endpoint. One that cannot be read is absent: its node may write it again."""
    try:
        return None if document is None else codec.decode(Endpoint, document)
    except Invalid:
        return None


def _new_addresses(put: Put, before: bytes | None) -> list[Address]:
    """The addresses of a written endpoint that it does not have yet. Those it has were proved when it got them."""
    known = _endpoint(before)
    had = {known.ip_address, known.ipv6_address} if known else set()
    after = codec.decode(Endpoint, put.value)
    fresh = msgspec.structs.replace(
        after, **{name: "" for name in ("ip_address", "ipv6_address") if getattr(after, name) in had}
    )
    return list(fresh.addresses)


def _claim_key(endpoint: StoreKey, address: Address) -> StoreKey:
    _, tenant, network, _ = endpoint.split("/")
    return StoreKey(kinds.address_claims(tenant, network) + address_hex(address))


def _block_key(endpoint: StoreKey, address: Address) -> StoreKey:
    # A subnet with blocks has at least 1,024 addresses, so that its base, and each of its blocks, is aligned.
    _, tenant, network, _ = endpoint.split("/")
    first = Address(address.family, address.number - address.number % BLOCK_SIZE)
    return StoreKey(kinds.blocks_of(tenant, network) + address_hex(first))


def _endpoint_of(claim: Claim) -> StoreKey | None:
    """The key of the endpoint that holds the claim; None for another kind of holder."""
    match claim.holder.split(":"):
        case [kind, tenant, network, endpoint] if kind == _ENDPOINT_HOLDER:
            return kinds.ENDPOINT.store_key(tenant, network, endpoint)
    return None


def _check_document(parsed: ParsedKey, put: Put) -> None:
    """`Invalid` unless every reader of the store accepts the document."""
    size, most = len(put.value), MAX_DOCUMENT
    if isinstance(parsed, AliveKey):
        most = MAX_ALIVE
    elif put.key.startswith(f"{kinds.STATUS}/"):
        most = MAX_STATUS
    if size > most:
        raise Invalid(f"{put.key[:200]!r} has {size} bytes: a node may write {most} there", field="value")
    try:
        decode_stored(parsed, put.value)
    except ValueError as error:
        raise Malformed(f"{put.key[:200]!r} cannot be read: {error}", field="value") from error


class _OwnershipCheck:
    """Checks the writes of one commit, which may depend on one another."""

    def __init__(self, node: NodeName, present: Present, written: Mapping[StoreKey, Put | Delete]) -> None:
        self._node = node
        self._present = present
        self._written = written

    def check(self, write: Write) -> None:
        if isinstance(write, DeleteAll):
            # `status_prefix` ends with a slash: without it node n1 could delete the status of n10.
            if not write.prefix.startswith(kinds.status_prefix(self._node)):
                raise Denied(f"node {self._node} may delete by prefix only its own status, not {write.prefix!r}")
            return
        parsed = parse_store_key(write.key)
        if not self._is_own(parsed, write):
            raise Denied(f"node {self._node} may not write {write.key!r}: it belongs to another owner")
        if isinstance(write, Put):
            _check_document(parsed, write)
            if isinstance(parsed, ObjectKey) and parsed.kind is kinds.ENDPOINT:
                self._check_addresses(write)
        elif isinstance(parsed, AddressClaimKey):
            self._check_unused(write.key, parsed.address)

    def _check_addresses(self, put: Put) -> None:
        """`Denied` unless the endpoint may have its addresses: others route to them because of it."""
        for address in _new_addresses(put, self._present[put.key]):
            _, tenant, name, _ = put.key.split("/")
            network = self._network(tenant, name)
            if network is None or not ipam.is_assignable(network, address):
                raise Denied(
                    f"node {self._node} may not publish {put.key!r} with address {address}: it is not one of the "
                    "network's addresses for endpoints"
                )
            claim = self._after(_claim_key(put.key, address))
            if claim is not None:
                is_own = _endpoint_of(_claim(claim)) == put.key
            else:
                has_blocks = ipam.has_blocks(network, address.family)
                is_own = has_blocks and self._block_owner(_block_key(put.key, address)) == self._node
            if not is_own:
                raise Denied(
                    f"node {self._node} may not publish {put.key!r} with address {address}: the endpoint holds no "
                    "claim of it, and it is in no block of the node or claimed by another"
                )

    def _check_unused(self, claim: StoreKey, address: Address) -> None:
        """`Denied` if an endpoint keeps the address whose claim is deleted: somebody else could get it too."""
        document = self._present[claim]
        endpoint = None if document is None else _endpoint_of(_claim(document))
        after = None if endpoint is None else _endpoint(self._after(endpoint))
        if after is not None and address in after.addresses:
            raise Denied(f"node {self._node} may not release {address}: {endpoint!r} still has it")

    def _network(self, tenant: str, name: str) -> Network | None:
        """A stored network. One that cannot be read is absent: nobody knows which addresses it has."""
        document = self._present[kinds.NETWORK.store_key(tenant, name)]
        try:
            return None if document is None else codec.decode(Network, document)
        except (Invalid, Unavailable):
            return None

    def _block_owner(self, block: StoreKey) -> str:
        document = self._after(block)
        return "" if document is None else _block(document).owner

    def _after(self, key: StoreKey) -> bytes | None:
        """The value of a key after the commit."""
        written = self._written.get(key)
        if written is None:
            return self._present.get(key)
        return written.value if isinstance(written, Put) else None

    def _is_own(self, parsed: ParsedKey, write: Put | Delete) -> bool:
        match parsed:
            case AppliedKey(node):
                return node == self._node
            case AliveKey("nodes", name):
                return name == self._node
            case ObjectKey(kinds.NODE, (name,)):
                return name == self._node
            case ObjectKey(kinds.ENDPOINT):
                # Before and after: a node can neither take over nor hand over an endpoint.
                return self._ran_here(write.key) is not False and self._runs_here(write.key) is not False
            case AddressClaimKey(network, _):
                return self._may_claim(write, prefix=kinds.ENDPOINT.store_prefix(*network))
            case BlockKey(network, first) if isinstance(write, Put):
                return self._may_have_block(write, self._network(*network), first)
            case BlockKey():
                return self._may_return_block(write.key)
        return write.key.startswith(kinds.status_prefix(self._node))

    def _ran_here(self, endpoint: StoreKey) -> bool | None:
        """Whether the endpoint is on this node before the commit; None if it does not exist."""
        before = _endpoint(self._present[endpoint])
        return None if before is None else before.host == self._node

    def _runs_here(self, endpoint: StoreKey) -> bool | None:
        """Whether the endpoint is on this node after the commit, under its own key; None if it does not exist."""
        written = self._written.get(endpoint)
        if written is None:
            return self._ran_here(endpoint)
        if isinstance(written, Delete):
            return None
        value = codec.decode(Endpoint, written.value)
        # A document under a foreign key would let a node write any endpoint.
        return value.host == self._node and store_key(kinds.ENDPOINT.prefix, *value.key) == endpoint

    def _may_claim(self, write: Put | Delete, *, prefix: StoreKey) -> bool:
        document = self._present[write.key]
        before = None if document is None else _claim(document)
        if isinstance(write, Delete):
            return before is None or self._held_before(before)
        # A reservation may be taken over by any node: the endpoint it was made for may start anywhere.
        if before is not None and not before.holder.startswith(RESERVED) and not self._held_before(before):
            return False
        endpoint = _endpoint_of(codec.decode(Claim, write.value))
        return endpoint is not None and endpoint.startswith(prefix) and self._runs_here(endpoint) is True

    def _held_before(self, claim: Claim) -> bool:
        endpoint = _endpoint_of(claim)
        return endpoint is not None and self._ran_here(endpoint) is True

    def _may_return_block(self, key: StoreKey) -> bool:
        document = self._present[key]
        return document is None or _block(document).owner == self._node

    def _may_have_block(self, put: Put, network: Network | None, first: Address) -> bool:
        document = self._present[put.key]
        after = codec.decode(Block, put.value).owner
        # A shared block never changes.
        if document is not None:
            return _block(document).owner == after == self._node
        # New: take it, or make it shared for a claim. Others route to the blocks of a node.
        return not after or (after == self._node and network is not None and ipam.is_block_of(network, first))
