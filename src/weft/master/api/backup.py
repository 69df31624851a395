"""Backup and restore of the whole state.

A backup is a snapshot of the store at one revision, without ephemeral keys (leader, liveness, sync status). A restore
replaces the current state. It validates the whole backup before it writes anything. It then runs in commits of bounded
size under a restore mark in the store. While the mark exists, no master or agent plans changes, so an interrupted
restore is noticed; restoring again completes it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from weft import __version__
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.codec import NOT_JSON
from weft.domain.errors import Conflict, Malformed, WeftError
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, StoreKey
from weft.domain.lifecycle.store_format import FORMAT
from weft.domain.store_documents import decode_stored
from weft.domain.store_keys import AddressClaimKey, BlockKey, NumberClaimKey, ObjectKey, is_transient, parse_store_key
from weft.domain.store_types import Compare, Delete, Put, RevisionEquals, Write
from weft.master.api.objects import API
from weft.ports.store import Store
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route, is_set
from weft.runtime.store.mirror import Mirror

log = Log("backup")

# Writes in one commit: etcd takes 128 operations.
CHUNK = 100
# The document is held in memory while it is validated.
MAX_DOCUMENT = 256 << 20
# Timeout for the mirror to catch up with the restored state.
WITHIN_S = 60.0
# Keys of each kind in the answer of a dry run.
MAX_KEYS = 1000
_EVERYTHING = StoreKey("")
_STATE_KEYS = (ObjectKey, AddressClaimKey, NumberClaimKey, BlockKey)


class Backup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The backup document: every key with its stored JSON document."""

    format: int
    weft: str
    revision: int
    entries: dict[StoreKey, msgspec.Raw]


class RestorePlan(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """What a restore would do: numbers, and some of the keys."""

    counts: dict[str, int]
    created: list[StoreKey]
    changed: list[StoreKey]
    deleted: list[StoreKey]
    # Whether the state is not empty, so that the restore would be refused without `force`.
    needs_force: bool
    dry_run: bool = True


def is_persistent(key: StoreKey) -> bool:
    """Whether a key belongs to the state, not to a running process."""
    return not is_transient(key)


class Backups:
    """The routes for backup and restore of one netmaster."""

    def __init__(self, store: Store, cluster: Cluster, mirror: Mirror, *, fence: Callable[[], Compare]) -> None:
        self._store = store
        self._cluster = cluster
        self._mirror = mirror
        self._fence = fence

    def routes(self) -> tuple[Route, ...]:
        force = Query(name="force", about="replace a state that is not empty", schema={"type": "boolean"})
        dry_run = Query(
            name="dry-run", about="write nothing; answer what the restore would change", schema={"type": "boolean"}
        )
        return (
            Route(method="GET", path=f"{API}/backup", handler=self.backup, about="The whole state as one document",
                  answer=Backup),
            Route(method="POST", path=f"{API}/restore", handler=self.restore,
                  about="Replace the state with a backup", body=Backup,
                  answer=dict[str, int], alternative=RestorePlan, query=(force, dry_run)),
        )  # fmt: skip

    async def backup(self, _: web.Request) -> web.Response:
        listing = await self._store.list(_EVERYTHING)
        entries: dict[StoreKey, msgspec.Raw] = {}
        for entry in listing.entries:
            if is_persistent(entry.key):
                parsed = parse_store_key(entry.key)
                try:
                    if isinstance(parsed, _STATE_KEYS) and decode_stored(parsed, entry.value):
                        entries[entry.key] = msgspec.Raw(entry.value)
                except (WeftError, ValueError) as error:  # /readyz shows it; the rest must have its backup
                    log.warning("unreadable document omitted from backup", key=entry.key[:200], reason=str(error)[:300])
        document = Backup(format=FORMAT, weft=__version__, revision=listing.revision, entries=entries)
        return json_response(document, headers={"Content-Disposition": 'attachment; filename="weft-backup.json"'})

    async def restore(self, request: web.Request) -> web.Response:
        entries = check_backup(await _read_limited(request))
        if is_set(request.query, "dry-run"):
            return json_response(await self._plan(entries))
        if not is_set(request.query, "force"):
            self._refuse_unless_fresh()
        # The mark comes before the listing: from then on, nothing can be committed that would have to be deleted.
        mark = RevisionEquals(
            kinds.RESTORE_KEY, await self._store.commit([self._fence()], [Put(kinds.RESTORE_KEY, b"running")])
        )
        present = {entry.key for entry in (await self._store.list(_EVERYTHING)).entries if is_persistent(entry.key)}
        writes: list[Write] = [Put(key, bytes(value)) for key, value in entries.items()]
        writes += [Delete(key) for key in sorted(present - entries.keys())]
        for start in range(0, len(writes), CHUNK):
            await self._store.commit([self._fence(), mark], writes[start : start + CHUNK])
        revision = await self._store.commit([self._fence(), mark], [Delete(kinds.RESTORE_KEY)])
        await self._mirror.wait_for(revision, within=WITHIN_S)
        log.info("state restored", objects=len(entries))
        return json_response({"restored": len(entries)})

    async def _plan(self, entries: dict[StoreKey, msgspec.Raw]) -> RestorePlan:
        """What a restore of these entries would change, without a write."""
        listed = (await self._store.list(_EVERYTHING)).entries
        present = {entry.key: entry.value for entry in listed if is_persistent(entry.key)}
        created = sorted(entries.keys() - present.keys())
        deleted = sorted(present.keys() - entries.keys())
        common = entries.keys() & present.keys()
        changed = sorted(key for key in common if not _is_same(present[key], bytes(entries[key])))
        counts = {"created": len(created), "changed": len(changed), "deleted": len(deleted)}
        return RestorePlan(
            counts={**counts, "unchanged": len(common) - len(changed)},
            created=created[:MAX_KEYS],
            changed=changed[:MAX_KEYS],
            deleted=deleted[:MAX_KEYS],
            needs_force=bool(self._count_own()) and not self._cluster.restoring,
        )

    def _refuse_unless_fresh(self) -> None:
        """`Conflict` unless the state is that of a bootstrap, or of an interrupted restore."""
        count = self._count_own()
        if count and not self._cluster.restoring:
            raise Conflict(
                f"the state is not empty ({count} objects): add force to replace it", details={"objects": count}
            )

    def _count_own(self) -> int:
        """The number of objects that no bootstrap has made."""
        bootstrapped: dict[str, set[tuple[str, ...]]] = {
            kinds.TENANT.prefix: {(DEFAULT_TENANT,)},
            kinds.NETWORK.prefix: {(DEFAULT_TENANT, DEFAULT_NETWORK)},
            kinds.GLOBAL.prefix: set(self._cluster.tables[kinds.GLOBAL.prefix]),
        }
        return sum(
            len(table.keys() - bootstrapped.get(prefix, set())) for prefix, table in self._cluster.tables.items()
        )


def _is_same(stored: bytes, saved: bytes) -> bool:
    """Whether two documents are the same; a backup may have been formatted by other tools."""
    if stored == saved:
        return True
    try:
        return bool(msgspec.json.decode(stored) == msgspec.json.decode(saved))
    except NOT_JSON:
        return False  # what is stored cannot be read: it would be replaced


async def _read_limited(request: web.Request) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_DOCUMENT:
            raise Malformed(f"the backup exceeds {MAX_DOCUMENT} bytes")
    return bytes(data)


def check_backup(data: bytes) -> dict[StoreKey, msgspec.Raw]:
    """The entries of a backup; `Malformed` when any of them is invalid."""
    try:
        document = msgspec.json.decode(data, type=Backup)
    except NOT_JSON as error:
        raise Malformed(f"this is not a backup: {error}") from error
    if document.format != FORMAT:
        raise Malformed(f"the backup has format {document.format}, this Weft reads {FORMAT}", field="format")
    entries = document.entries
    for key, value in entries.items():
        parsed = parse_store_key(key)
        if not isinstance(parsed, _STATE_KEYS):
            raise Malformed(f"the backup has an entry {key[:200]!r} that Weft does not know", field="entries")
        # Decoded and validated exactly as a master would, so that a backup that passes can be served.
        try:
            decode_stored(parsed, bytes(value))
        except (WeftError, ValueError) as error:
            raise Malformed(f"the backup's entry {key[:200]!r} cannot be read: {error}", field="entries") from error
    return entries
