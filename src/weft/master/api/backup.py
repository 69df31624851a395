"""Backup and restore of the whole state, each in one call.

A backup is what the store holds at one revision, less what living processes say of themselves (leader, presence,
receipts). A restore puts that state in place of the present one. It is checked as a whole before anything is written;
it then runs in commits of bounded size under a mark in the store, and while the mark is there nobody decides anything:
a restore that died half way is seen, and finished by restoring again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from weft import __version__
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.codec import NOT_JSON
from weft.domain.errors import Conflict, Invalid, Malformed
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, StoreKey
from weft.domain.store_types import Compare, Delete, Entry, Listing, Put, RevisionEquals, Write
from weft.domain.validation import check
from weft.master.api.objects import API
from weft.ports.store import Store
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route
from weft.runtime.store.mirror import Mirror

log = Log("backup")

FORMAT = 1
# Writes in one commit.
CHUNK = 100
MAX_DOCUMENT = 256 << 20
WITHIN_S = 60.0
_EVERYTHING = StoreKey("")
_PASSING = (kinds.LEADER_KEY, kinds.RESTORE_KEY)


class Backup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The document: every key with its JSON document as it stands in the store."""

    format: int
    weft: str
    revision: int
    entries: dict[StoreKey, msgspec.Raw]


def is_lasting(key: StoreKey) -> bool:
    """Whether a key belongs to the state, not to a living process."""
    return key not in _PASSING and key.split("/")[0] not in {kinds.ALIVE, kinds.STATUS, kinds.WISHES}


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
                  about="Put a backup in place of the state", body=Backup,
                  answer=dict[str, int], query=(force,)),
        )  # fmt: skip

    async def backup(self, _: web.Request) -> web.Response:
        listing = await self._store.list(_EVERYTHING)
        entries: dict[StoreKey, msgspec.Raw] = {}
        for entry in listing.entries:
            if is_lasting(entry.key):
                if _is_json(entry.value):
                    entries[entry.key] = msgspec.Raw(entry.value)
                else:  # /readyz names it too; the rest of the state must not be lost with it
                    log.warning("left out of the backup: not JSON", key=entry.key)
        document = Backup(format=FORMAT, weft=__version__, revision=listing.revision, entries=entries)
        return json_response(document, headers={"Content-Disposition": 'attachment; filename="weft-backup.json"'})

    async def restore(self, request: web.Request) -> web.Response:
        wanted = check_backup(await _read_limited(request))
        if request.query.get("force", "").lower() not in {"1", "true"}:
            self._refuse_unless_fresh()
        # Marked first and listed then: with the mark there, nobody else adds to what must go.
        mark = RevisionEquals(
            kinds.RESTORE_KEY, await self._store.commit([self._fence()], [Put(kinds.RESTORE_KEY, b"running")])
        )
        present = {entry.key for entry in (await self._store.list(_EVERYTHING)).entries if is_lasting(entry.key)}
        writes: list[Write] = [Put(key, bytes(value)) for key, value in wanted.items()]
        writes += [Delete(key) for key in sorted(present - wanted.keys())]
        for start in range(0, len(writes), CHUNK):
            await self._store.commit([self._fence(), mark], writes[start : start + CHUNK])
        revision = await self._store.commit([self._fence(), mark], [Delete(kinds.RESTORE_KEY)])
        await self._mirror.wait_for(revision, within=WITHIN_S)
        log.info("state restored", objects=len(wanted))
        return json_response({"restored": len(wanted)})

    def _refuse_unless_fresh(self) -> None:
        """Only the state of a first start is replaced without being told to."""
        own: dict[str, set[tuple[str, ...]]] = {
            kinds.TENANT.prefix: {(DEFAULT_TENANT,)},
            kinds.NETWORK.prefix: {(DEFAULT_TENANT, DEFAULT_NETWORK)},
            kinds.GLOBAL.prefix: set(self._cluster.tables[kinds.GLOBAL.prefix]),
        }
        count = sum(len(table.keys() - own.get(prefix, set())) for prefix, table in self._cluster.tables.items())
        if count and not self._cluster.restoring:
            raise Conflict(
                f"the state is not empty ({count} objects): say force to replace it", details={"objects": count}
            )


async def _read_limited(request: web.Request) -> bytes:
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_DOCUMENT:
            raise Malformed(f"the backup exceeds {MAX_DOCUMENT} bytes")
    return bytes(data)


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except NOT_JSON:
        return False
    return True


def check_backup(data: bytes) -> dict[StoreKey, msgspec.Raw]:
    """The entries of a backup, or `Malformed` when any of them could not be used."""
    try:
        document = msgspec.json.decode(data, type=Backup)
    except NOT_JSON as error:
        raise Malformed(f"this is not a backup: {error}") from error
    if document.format != FORMAT:
        raise Malformed(f"the backup has format {document.format}, this Weft reads {FORMAT}", field="format")
    entries = document.entries
    cluster = Cluster()
    cluster.replace(Listing(tuple(Entry(key, bytes(value), 1) for key, value in entries.items()), 1))
    for key in entries:
        if not is_lasting(key) or key.split("/")[0] not in {*kinds.BY_PREFIX, kinds.CLAIMS, kinds.BLOCKS}:
            raise Malformed(f"the backup has an entry {key[:200]!r} that is none of ours", field="entries")
    for key, fault in cluster.faults.items():
        raise Malformed(f"the backup's entry {key[:200]!r} cannot be read: {fault}", field="entries")
    for kind in kinds.ALL:
        for value in cluster.all(kind):
            try:
                check(value)
            except Invalid as error:
                raise Malformed(
                    f"the backup's {kind.name} {kind.key_text(value)!r} is not valid: {error.message}", field="entries"
                ) from error
    return entries
