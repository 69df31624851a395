"""What a node may write through the remote store: only what belongs to it, before the commit and after it.

- its document `nodes/<name>`, its leased key `alive/nodes/<name>`, all under `status/nodes/<name>/`;
- endpoints that run on it: an endpoint never moves to or from another node this way;
- address claims held by its endpoints, or reserved ahead for an endpoint that is still to be created;
- blocks it owns; a block without an owner it may take for itself, or make shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.domain import codec, kinds
from weft.domain.errors import Denied
from weft.domain.ids import NodeName, StoreKey, store_key
from weft.domain.ipam.ipam import RESERVED
from weft.domain.model import Block, Claim, Endpoint, Node, SyncStatus
from weft.domain.store_keys import AddressClaimKey, AliveKey, AppliedKey, BlockKey, ObjectKey, parse_store_key
from weft.domain.store_types import Delete, DeleteAll, Put, Write

# The present values of keys; None for a key that does not exist.
Present = Mapping[StoreKey, bytes | None]

# The kind in holders such as `endpoint:default:blue:4f3a`.
_ENDPOINT_HOLDER = "endpoint"


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
        case BlockKey() | ObjectKey(kinds.ENDPOINT):
            yield write.key
        case AddressClaimKey():
            yield write.key
            for document in (present.get(write.key), write.value if isinstance(write, Put) else None):
                endpoint = None if document is None else _endpoint_of(codec.decode(Claim, document))
                if endpoint is not None:
                    yield endpoint


def _endpoint_of(claim: Claim) -> StoreKey | None:
    """The key of the endpoint that holds the claim; None for another kind of holder."""
    match claim.holder.split(":"):
        case [kind, tenant, network, endpoint] if kind == _ENDPOINT_HOLDER:
            return kinds.ENDPOINT.store_key(tenant, network, endpoint)
    return None


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
        elif not self._is_own(write):
            raise Denied(f"node {self._node} may not write {write.key!r}: it belongs to another owner")

    def _is_own(self, write: Put | Delete) -> bool:
        match parse_store_key(write.key):
            case AppliedKey(node):
                return node == self._node and (isinstance(write, Delete) or self._is_sync_status(write))
            case AliveKey("nodes", name):
                return name == self._node
            case ObjectKey(kinds.NODE, (name,)):
                return name == self._node and (isinstance(write, Delete) or self._names_itself(write))
            case ObjectKey(kinds.ENDPOINT):
                # Before and after: a node can neither take over nor hand over an endpoint.
                return self._ran_here(write.key) is not False and self._runs_here(write.key) is not False
            case AddressClaimKey(network, _):
                return self._may_claim(write, prefix=kinds.ENDPOINT.store_prefix(*network))
            case BlockKey():
                return self._may_have_block(write)
        return write.key.startswith(kinds.status_prefix(self._node))

    def _is_sync_status(self, put: Put) -> bool:
        """`Malformed` when it cannot be decoded: masters read it."""
        return bool(codec.decode(SyncStatus, put.value))

    def _names_itself(self, put: Put) -> bool:
        return codec.decode(Node, put.value).name == self._node

    def _ran_here(self, endpoint: StoreKey) -> bool | None:
        """Whether the endpoint is on this node before the commit; None if it does not exist."""
        document = self._present[endpoint]
        return None if document is None else codec.decode(Endpoint, document).host == self._node

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
        before = None if document is None else codec.decode(Claim, document)
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

    def _may_have_block(self, write: Put | Delete) -> bool:
        document = self._present[write.key]
        before = None if document is None else codec.decode(Block, document).owner
        if isinstance(write, Delete):
            return before is None or before == self._node
        after = codec.decode(Block, write.value).owner
        # Without an owner before: take it, or make it shared for a claim. A shared block never changes.
        return after in {self._node, ""} if before is None else before == after == self._node
