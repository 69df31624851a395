"""Store on an etcd v3 cluster, through its JSON gateway.

Commits that arrive while others are in flight are merged into one transaction where that makes no visible difference.
When a merged transaction fails, its commits are executed one by one, so that only the conflicting ones fail.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Self

import msgspec

from weft.adapters.stores import etcd_wire as wire
from weft.adapters.stores.etcd_gateway import Credentials, Gateway
from weft.domain.errors import Compacted, Denied, Invalid, NotFound, Stale, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.ports.store import (
    Change,
    Compare,
    DeleteAll,
    Entry,
    Event,
    LeaseId,
    Listing,
    Put,
    Revision,
    RevisionEquals,
    StoreRoles,
    Write,
)
from weft.runtime.backoff import Backoff
from weft.runtime.client_tls import client_tls
from weft.runtime.http_failover import Servers
from weft.runtime.store.commit_merge import Commit, mergeable, merged
from weft.runtime.store.group_commit import GroupCommit, check_writes

DEFAULT_ROOT = "/weft/"
# etcd's default --max-txn-ops, for compares and for writes.
_MAX_OPERATIONS = 128
# Bytes of values in a merged transaction; etcd's default limit for a request is 1.5 MiB.
_MAX_MERGED_SIZE = 256 * 1024
# Keys of one range request: a response of a whole large store would exceed gRPC's message limit.
_PAGE = 1_000
# While one transaction is replicated, the next can be merged and sent.
_IN_FLIGHT = 2
# Consecutive denials after which a watch fails; before that, a new token may help.
_MAX_DENIALS = 3
# gRPC codes, as spelled in the cancel reason of a watch.
_DENIED_CODES = ("PermissionDenied", "Unauthenticated", "InvalidArgument")

_done = msgspec.json.Decoder(wire.Done, strict=False)
_ranged = msgspec.json.Decoder(wire.Ranged, strict=False)
_txn_done = msgspec.json.Decoder(wire.TxnDone, strict=False)
_granted = msgspec.json.Decoder(wire.Granted, strict=False)
_kept_alive = msgspec.json.Decoder(wire.KeepAliveAnswer, strict=False)


class EtcdStore:
    """See `ports.store`. All keys are below `root`, so that the cluster can be shared."""

    def __init__(self, gateway: Gateway, root: str) -> None:
        self._gateway = gateway
        self._root = root.encode()
        self._commits: GroupCommit[Commit, Revision] = GroupCommit(
            self._execute,
            choose=partial(mergeable, operations=_MAX_OPERATIONS, size=_MAX_MERGED_SIZE),
            in_flight=_IN_FLIGHT,
        )

    async def read(self, key: StoreKey) -> Entry | None:
        answer = await self._range(wire.Range(key=self._key(key)))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: StoreKey) -> Listing:
        begin = key = self._key(prefix)
        end = _after_prefix(begin)
        entries: deque[Entry] = deque()
        revision = 0
        while True:
            try:
                page = await self._range(wire.Range(key=key, range_end=end, limit=_PAGE, revision=revision))
            except Compacted:
                # etcd compacted the revision of the first page before the last one was read: start again.
                entries.clear()
                key, revision = begin, 0
                continue
            entries.extend(map(self._entry, page.kvs))
            revision = revision or page.header.revision
            if not page.more or not page.kvs:
                return Listing(tuple(entries), revision)
            # The smallest key after the last one.
            key = page.kvs[-1].key + b"\0"

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        check_writes(writes)
        if max(len(compares), len(writes)) > _MAX_OPERATIONS:
            raise Invalid(f"a commit can have at most {_MAX_OPERATIONS} compares and {_MAX_OPERATIONS} writes")
        return await self._commits.submit(Commit(compares, writes))

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        backoff = Backoff()
        denials = 0
        key = self._key(prefix)
        while True:
            # start_revision is inclusive.
            create = wire.WatchCreate(key=key, range_end=_after_prefix(key), start_revision=since + 1)
            try:
                async with aclosing(self._gateway.watch(wire.Watch(create_request=create))) as answers:
                    # Any response, also one without events, shows that the watch works.
                    async for answer in answers:
                        _check_watch(answer)
                        for change in self._changes(answer.events):
                            since = change.revision
                            yield change
                        backoff.reset()
                        denials = 0
            except Compacted:
                raise
            except Denied:
                denials += 1
                if denials == _MAX_DENIALS:
                    raise
                await self._gateway.renew_token()
            except Unavailable:
                await backoff.pause()

    async def grant(self, ttl: float) -> LeaseId:
        # Repeatable: a second grant leaves a lease that expires by itself.
        answer = await self._gateway.call("/v3/lease/grant", wire.Grant(TTL=math.ceil(ttl)), _granted, repeatable=True)
        return LeaseId(answer.ID)

    async def keep_alive(self, lease: LeaseId) -> None:
        answer = await self._gateway.call("/v3/lease/keepalive", wire.Lease(ID=lease), _kept_alive, repeatable=True)
        if answer.result is None:
            raise Unavailable(f"etcd did not renew lease {lease}: {answer.error}")
        if answer.result.TTL <= 0:
            raise NotFound(f"lease {lease} has expired")

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._gateway.call("/v3/lease/revoke", wire.Lease(ID=lease), _done, repeatable=True)
        except NotFound:
            return  # expired already

    @property
    def roles(self) -> StoreRoles:
        """Users and roles of this etcd, for the keys below `root`."""
        from weft.adapters.stores.etcd_roles import EtcdRoles  # noqa: PLC0415  no agent needs it

        return EtcdRoles(self._gateway, self._root)

    async def __aenter__(self) -> Self:
        await self._gateway.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._commits.close()
        await self._gateway.__aexit__(kind, error, trace)

    async def _range(self, request: wire.Range) -> wire.Ranged:
        return await self._gateway.call("/v3/kv/range", request, _ranged, repeatable=True)

    async def _execute(self, commits: Sequence[Commit]) -> Sequence[Revision | Exception]:
        if len(commits) == 1:
            return [await self._try_transact(commits[0])]
        try:
            return [await self._transact(merged(commits))] * len(commits)
        except (Stale, NotFound, Invalid, Denied):
            # Nothing was written: execute them one by one to find the conflicting ones.
            return await asyncio.gather(*map(self._try_transact, commits))

    async def _try_transact(self, commit: Commit) -> Revision | Exception:
        try:
            return await self._transact(commit)
        except WeftError as error:
            return error

    async def _transact(self, commit: Commit) -> Revision:
        request = wire.Txn(
            compare=[self._compare(compare) for compare in commit.compares],
            success=[self._operation(write) for write in commit.writes],
        )
        # A transaction with writes may have been executed although its response was lost: no retry.
        answer = await self._gateway.call("/v3/kv/txn", request, _txn_done, repeatable=not commit.writes)
        if not answer.succeeded:
            raise Stale(f"{', '.join(_target(compare) for compare in commit.compares)}: changed since it was read")
        return answer.header.revision

    def _compare(self, compare: Compare) -> wire.Compare:
        if isinstance(compare, RevisionEquals):
            return wire.Compare(key=self._key(compare.key), target="MOD", result="EQUAL", mod_revision=compare.revision)
        key = self._key(compare.prefix)
        return wire.Compare(
            key=key, range_end=_after_prefix(key), target="MOD", result="LESS", mod_revision=compare.since + 1
        )

    def _operation(self, write: Write) -> wire.Operation:
        if isinstance(write, Put):
            return wire.Operation(
                request_put=wire.Put(key=self._key(write.key), value=write.value, lease=write.lease or 0)
            )
        if isinstance(write, DeleteAll):
            key = self._key(write.prefix)
            return wire.Operation(request_delete_range=wire.DeleteRange(key=key, range_end=_after_prefix(key)))
        return wire.Operation(request_delete_range=wire.DeleteRange(key=self._key(write.key)))

    def _changes(self, events: Sequence[wire.WatchEvent]) -> Iterator[Change]:
        """Group events by revision: etcd sends all events of a revision together, but maybe several revisions."""
        for revision, group in groupby(events, key=lambda event: event.kv.mod_revision):
            yield Change(
                revision,
                tuple(
                    Event(self._name(each.kv.key), None if each.type == "DELETE" else each.kv.value) for each in group
                ),
            )

    def _entry(self, found: wire.KeyValue) -> Entry:
        return Entry(self._name(found.key), found.value, found.mod_revision)

    def _key(self, key: StoreKey) -> bytes:
        return self._root + key.encode()

    def _name(self, key: bytes) -> StoreKey:
        # A key that is not UTF-8 is not ours. It is passed on in an escaped form, which no key of ours has.
        return StoreKey(key[len(self._root) :].decode(errors="backslashreplace"))


def open_store(
    endpoints: Sequence[str],
    *,
    root: str = DEFAULT_ROOT,
    user: str = "",
    password: str = "",
    ca: str = "",
    cert: str = "",
    key: str = "",
) -> EtcdStore:
    """The store under `root` of the etcd cluster at these URLs, with user and TLS files if needed."""
    servers = Servers(endpoints, tls=client_tls(ca=ca, cert=cert, key=key))
    return EtcdStore(Gateway(servers, Credentials(user, password) if user else None), root)


def _after_prefix(prefix: bytes) -> bytes:
    """The first key after the prefix, etcd's range_end. The root keeps the prefix from being empty."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _check_watch(answer: wire.Watched) -> None:
    if answer.compact_revision:
        raise Compacted(f"revision {answer.compact_revision} compacted")
    if answer.canceled:
        denied = any(code in answer.cancel_reason for code in _DENIED_CODES)
        raise (Denied if denied else Unavailable)(f"etcd ended the watch: {answer.cancel_reason}")


def _target(compare: Compare) -> str:
    return compare.key if isinstance(compare, RevisionEquals) else f"{compare.prefix}*"
