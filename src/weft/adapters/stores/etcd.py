"""The store on an etcd v3 cluster, through its JSON gateway.

Commits asked for while others are under way are merged into one transaction where nobody can tell; when a merged one
fails, its members are carried out singly, so that only the guilty fail.
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
    Write,
)
from weft.runtime.backoff import Backoff
from weft.runtime.http_failover import Servers, client_tls
from weft.runtime.store.commit_merge import Commit, mergeable, merged
from weft.runtime.store.group_commit import GroupCommit, check_writes

DEFAULT_ROOT = "/weft/"
# etcd's default limit for the compares, and for the writes, of one transaction.
_MAX_OPERATIONS = 128
# Bytes of values in a merged transaction; etcd's default limit for a request is 1.5 MiB.
_MAX_MERGED_SIZE = 256 * 1024
_PAGE = 1_000
_IN_FLIGHT = 2
# A watch that is refused so often in a row is refused for good; before that, a new token may help.
_REFUSALS = 3
# gRPC's codes, as they are spelled in the reason for which a watch was ended.
_REFUSED = ("PermissionDenied", "Unauthenticated", "InvalidArgument")

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
            self._carry_out,
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
                # The revision of the first page was compacted before the last one was read: start again.
                entries.clear()
                key, revision = begin, 0
                continue
            entries.extend(map(self._entry, page.kvs))
            revision = revision or page.header.revision
            if not page.more:
                return Listing(tuple(entries), revision)
            key = page.kvs[-1].key + b"\0"

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        check_writes(writes)
        if max(len(compares), len(writes)) > _MAX_OPERATIONS:
            raise Invalid(f"a commit may have {_MAX_OPERATIONS} compares and as many writes, not more")
        return await self._commits.ask(Commit(compares, writes))

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        backoff = Backoff()
        refusals = 0
        key = self._key(prefix)
        while True:
            create = wire.WatchCreate(key=key, range_end=_after_prefix(key), start_revision=since + 1)
            try:
                async with aclosing(self._gateway.watch(wire.Watch(create_request=create))) as answers:
                    async for answer in answers:
                        _check_watch(answer)
                        for change in self._changes(answer.events):
                            since = change.revision
                            yield change
                        backoff.reset()
                        refusals = 0
            except Compacted:
                raise
            except Denied:
                refusals += 1
                if refusals == _REFUSALS:
                    raise
                await self._gateway.renew_token()
            except Unavailable:
                await backoff.pause()

    async def grant(self, ttl: float) -> LeaseId:
        # Granting twice leaves a lease that ends by itself.
        answer = await self._gateway.call("/v3/lease/grant", wire.Grant(TTL=math.ceil(ttl)), _granted, repeatable=True)
        return LeaseId(answer.ID)

    async def keep_alive(self, lease: LeaseId) -> None:
        answer = await self._gateway.call("/v3/lease/keepalive", wire.Lease(ID=lease), _kept_alive, repeatable=True)
        if answer.result is None:
            raise Unavailable(f"etcd did not renew lease {lease}: {answer.error}")
        if answer.result.TTL <= 0:
            raise NotFound(f"lease {lease} has ended")

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._gateway.call("/v3/lease/revoke", wire.Lease(ID=lease), _done, repeatable=True)
        except NotFound:
            return  # ended already

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

    async def _carry_out(self, commits: Sequence[Commit]) -> Sequence[Revision | Exception]:
        if len(commits) == 1:
            return [await self._verdict(commits[0])]
        try:
            return [await self._transact(merged(commits))] * len(commits)
        except (Stale, NotFound, Invalid):
            # Nothing has happened: find out who is guilty.
            return await asyncio.gather(*map(self._verdict, commits))

    async def _verdict(self, commit: Commit) -> Revision | Exception:
        try:
            return await self._transact(commit)
        except WeftError as error:
            return error

    async def _transact(self, commit: Commit) -> Revision:
        request = wire.Txn(
            compare=[self._compare(each) for each in commit.compares],
            success=[self._operation(each) for each in commit.writes],
        )
        # A commit without writes changes nothing, so it may be asked for again.
        answer = await self._gateway.call("/v3/kv/txn", request, _txn_done, repeatable=not commit.writes)
        if not answer.succeeded:
            raise Stale(f"{', '.join(_named(each) for each in commit.compares)}: changed since it was read")
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
        """etcd sends all events of a revision in one answer, but maybe several revisions."""
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
        return StoreKey(key[len(self._root) :].decode())


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
    """The store below `root` on the cluster whose members have these URLs, with a user and TLS files where needed."""
    servers = Servers(endpoints, tls=client_tls(ca=ca, cert=cert, key=key))
    return EtcdStore(Gateway(servers, Credentials(user, password) if user else None), root)


def _after_prefix(prefix: bytes) -> bytes:
    """The first key after all that start with the prefix; the root keeps it from being empty."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _check_watch(answer: wire.Watched) -> None:
    if answer.compact_revision:
        raise Compacted(f"etcd has forgotten what was before revision {answer.compact_revision}")
    if answer.canceled:
        refused = any(code in answer.cancel_reason for code in _REFUSED)
        raise (Denied if refused else Unavailable)(f"etcd ended the watch: {answer.cancel_reason}")


def _named(compare: Compare) -> str:
    return compare.key if isinstance(compare, RevisionEquals) else f"{compare.prefix}*"
