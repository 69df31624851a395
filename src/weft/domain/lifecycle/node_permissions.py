"""What a node may write through the remote store: what is its own, before the commit and after it.

- its document `nodes/<name>`, its sign of life `alive/nodes/<name>`, all under `status/nodes/<name>/`;
- endpoints that run on it: an endpoint never moves to or from another node this way;
- address claims held by its endpoints, or reserved ahead for whichever endpoint comes;
- blocks it owns; a block that nobody has it may take for itself, or make shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.domain import codec, kinds
from weft.domain.errors import Denied
from weft.domain.ids import NodeName, StoreKey, store_key
from weft.domain.ipam.ipam import RESERVED
from weft.domain.model import Block, Claim, Endpoint, Node, Receipt
from weft.domain.store_types import Delete, DeleteAll, Put, Write

# The present values of keys; None where there is none.
Present = Mapping[StoreKey, bytes | None]

_ENDPOINT_HOLDER = "endpoint"
_ADDRESS_CLAIMS = f"{kinds.CLAIMS}/addresses/"
_JUDGED_BY_VALUE = (f"{kinds.ENDPOINT.prefix}/", f"{kinds.BLOCKS}/", _ADDRESS_CLAIMS)


def still_needed(writes: Sequence[Write], present: Present) -> frozenset[StoreKey]:
    """The keys whose present values `check_ownership` needs too. Ask again with them: claims lead on to endpoints."""
    return frozenset(key for write in writes for key in _needed(write, present)) - present.keys()


def check_ownership(node: NodeName, writes: Sequence[Write], present: Present) -> None:
    """`Denied` unless everything that is written is the node's own."""
    judge = _Judge(node, present, {write.key: write for write in writes if not isinstance(write, DeleteAll)})
    for write in writes:
        judge.check(write)


def _needed(write: Write, present: Present) -> Iterator[StoreKey]:
    if isinstance(write, DeleteAll):
        return
    if write.key.startswith(_JUDGED_BY_VALUE):
        yield write.key
    if write.key.startswith(_ADDRESS_CLAIMS):
        for document in (present.get(write.key), write.value if isinstance(write, Put) else None):
            endpoint = None if document is None else _endpoint_of(codec.decode(Claim, document))
            if endpoint is not None:
                yield endpoint


def _endpoint_of(claim: Claim) -> StoreKey | None:
    """The key of the endpoint that holds the claim, where an endpoint does."""
    match claim.holder.split(":"):
        case [kind, tenant, network, endpoint] if kind == _ENDPOINT_HOLDER:
            return kinds.ENDPOINT.store_key(tenant, network, endpoint)
    return None


class _Judge:
    """Decides about the writes of one commit, which may depend on one another."""

    def __init__(self, node: NodeName, present: Present, written: Mapping[StoreKey, Put | Delete]) -> None:
        self._node = node
        self._present = present
        self._written = written

    def check(self, write: Write) -> None:
        if isinstance(write, DeleteAll):
            if not write.prefix.startswith(kinds.status_prefix(self._node)):
                raise Denied(f"node {self._node} may delete by prefix only its own status, not {write.prefix!r}")
        elif not self._is_own(write):
            raise Denied(f"node {self._node} may not write {write.key!r}: it is not its own")

    def _is_own(self, write: Put | Delete) -> bool:
        if write.key == kinds.receipt_of(self._node):
            return isinstance(write, Delete) or self._is_receipt(write)
        if write.key.startswith(kinds.status_prefix(self._node)):
            return True
        match write.key.split("/"):
            case ["alive", "nodes", name]:
                return name == self._node
            case [kinds.NODE.prefix, name]:
                return name == self._node and (isinstance(write, Delete) or self._names_itself(write))
            case [kinds.ENDPOINT.prefix, _, _, _]:
                return self._ran_here(write.key) is not False and self._runs_here(write.key) is not False
            case [kinds.CLAIMS, "addresses", tenant, network, _]:
                return self._may_claim(write, folder=kinds.ENDPOINT.store_prefix(tenant, network))
            case [kinds.BLOCKS, _, _, _]:
                return self._may_have_block(write)
        return False

    def _is_receipt(self, put: Put) -> bool:
        """`Malformed` when it is none: masters read it."""
        return bool(codec.decode(Receipt, put.value))

    def _names_itself(self, put: Put) -> bool:
        return codec.decode(Node, put.value).name == self._node

    def _ran_here(self, endpoint: StoreKey) -> bool | None:
        """Whether the endpoint is on this node before the commit; None when there is none."""
        document = self._present[endpoint]
        return None if document is None else codec.decode(Endpoint, document).host == self._node

    def _runs_here(self, endpoint: StoreKey) -> bool | None:
        """Whether the endpoint is on this node after the commit, under its own key; None when there is none."""
        written = self._written.get(endpoint)
        if written is None:
            return self._ran_here(endpoint)
        if isinstance(written, Delete):
            return None
        value = codec.decode(Endpoint, written.value)
        return value.host == self._node and store_key(kinds.ENDPOINT.prefix, *value.key) == endpoint

    def _may_claim(self, write: Put | Delete, *, folder: StoreKey) -> bool:
        document = self._present[write.key]
        before = None if document is None else codec.decode(Claim, document)
        if isinstance(write, Delete):
            return before is None or self._held_before(before)
        if before is not None and not before.holder.startswith(RESERVED) and not self._held_before(before):
            return False
        endpoint = _endpoint_of(codec.decode(Claim, write.value))
        return endpoint is not None and endpoint.startswith(folder) and self._runs_here(endpoint) is True

    def _held_before(self, claim: Claim) -> bool:
        endpoint = _endpoint_of(claim)
        return endpoint is not None and self._ran_here(endpoint) is True

    def _may_have_block(self, write: Put | Delete) -> bool:
        document = self._present[write.key]
        before = None if document is None else codec.decode(Block, document).owner
        if isinstance(write, Delete):
            return before is None or before == self._node
        after = codec.decode(Block, write.value).owner
        return after in {self._node, ""} if before is None else before == after == self._node
