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
from weft.runtime.routes import Query, Route
from weft.runtime.store.mirror import Mirror

log = Log("backup")

# Writes in one commit: etcd takes 128 operations.
CHUNK = 100
# The document is held in memory while it is validated.
MAX_DOCUMENT = 256 << 20
# Timeout for the mirror to catch up with the restored state.
WITHIN_S = 60.0
_EVERYTHING = StoreKey("")
_STATE_KEYS = (ObjectKey, AddressClaimKey, NumberClaimKey, BlockKey)


class Backup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The backup document: every key with its stored JSON document."""

    format: int
    weft: str
    revision: int
    entries: dict[StoreKey, msgspec.Raw]


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
        return (
            Route(method="GET", path=f"{API}/backup", handler=self.backup, about="The whole state as one document",
                  answer=Backup),
            Route(method="POST", path=f"{API}/restore", handler=self.restore,
                  about="Replace the state with a backup", body=Backup,
                  answer=dict[str, int], query=(force,)),
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
        if request.query.get("force", "").lower() not in {"1", "true"}:
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

    def _refuse_unless_fresh(self) -> None:
        """`Conflict` unless the state is that of a bootstrap, or of an interrupted restore."""
        bootstrapped: dict[str, set[tuple[str, ...]]] = {
            kinds.TENANT.prefix: {(DEFAULT_TENANT,)},
            kinds.NETWORK.prefix: {(DEFAULT_TENANT, DEFAULT_NETWORK)},
            kinds.GLOBAL.prefix: set(self._cluster.tables[kinds.GLOBAL.prefix]),
        }
        count = sum(
            len(table.keys() - bootstrapped.get(prefix, set())) for prefix, table in self._cluster.tables.items()
        )
        if count and not self._cluster.restoring:
            raise Conflict(
                f"the state is not empty ({count} objects): add force to replace it", details={"objects": count}
            )


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
