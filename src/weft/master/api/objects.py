"""REST routes of the objects: list, watch, read, write, delete and inspect, the same for all kinds (contiv 2.1).

Handlers decode, call the control plane and encode; they make no decisions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster, Stored
from weft.domain.errors import Invalid, Malformed, NotFound, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.lifecycle.sync_status import node_status
from weft.domain.links import Links, links_of
from weft.domain.oper import endpoint_oper, oper_of
from weft.domain.policy.engine.engine import Engine
from weft.domain.store_documents import decode_stored
from weft.domain.store_keys import parse_store_key
from weft.domain.transaction import ReadSet
from weft.master.api.guarded_writes import (
    GUARD_QUERY,
    GuardedWrites,
    PlannedWrite,
    WriteReport,
    read_write_options,
)
from weft.master.control.control import Condition, ControlPlane
from weft.ports.store import Store
from weft.runtime.http import Handler, json_response, read_json
from weft.runtime.routes import Query, Route

API = "/api/v1"
# Members added to responses and ignored in requests, so that a client may send back what it has read.
DECORATION = ("key", "links", "link-sets")
MAX_PAGE = 1000
# Interval of blank lines in an idle watch: clients and proxies detect a dead connection by their absence.
HEARTBEAT_S = 15.0
# Set when the server shuts down: watches end at once, so that shutdown does not wait for them.
STOPPING = web.AppKey("stopping", asyncio.Event)

_LIST_QUERY = (
    Query(
        name="limit", about="at most this many objects", schema={"type": "integer", "minimum": 1, "maximum": MAX_PAGE}
    ),
    Query(name="continue", about="X-Continue header of the previous page", schema={"type": "string"}),
    Query(name="watch", about="stream every change, one JSON object per line", schema={"type": "boolean"}),
    Query(name="since", about="with watch: only changes after this revision", schema={"type": "integer", "minimum": 1}),
)


class Objects:
    """The object routes of one netmaster."""

    def __init__(
        self, control: ControlPlane, store: Store, *, cluster_mode: str, engine: Callable[[], Awaitable[Engine]]
    ) -> None:
        self._control = control
        self._guarded = GuardedWrites(control, engine)
        self._store = store
        self._cluster_mode = cluster_mode

    def routes(self) -> tuple[Route, ...]:
        """The routes of every kind."""
        return tuple(itertools.chain.from_iterable(self._routes_of(kind) for kind in kinds.ALL))

    def _routes_of(self, kind: Kind[Any]) -> list[Route]:
        many, one = f"{API}/{kind.plural}/", f"{API}/{kind.plural}/{{key}}/"
        filters = tuple(
            Query(name=member, about=f"only objects with this {member}", schema={"type": "string"})
            for member in filterable(kind)
        )
        routes = [
            Route(method="GET", path=many, handler=self._bind(self.list, kind), about=f"List or watch {kind.plural}",
                  answer=list[kind.type], query=_LIST_QUERY + filters),  # type: ignore[name-defined]
            Route(method="GET", path=one, handler=self._bind(self.read, kind), about=f"Read one {kind.name}",
                  answer=kind.type),
            Route(method="GET", path=f"{API}/inspect/{kind.plural}/{{key}}/", handler=self._bind(self.inspect, kind),
                  about=f"One {kind.name} with its operational state", answer=dict[str, Any]),
        ]  # fmt: skip
        if kind in kinds.CONFIGURABLE:
            routes += [
                Route(method=method, path=one, handler=self._bind(self.write, kind), body=kind.type, answer=kind.type,
                      alternative=WriteReport, about=f"Create or replace one {kind.name}", query=GUARD_QUERY)
                for method in ("POST", "PUT")
            ]  # fmt: skip
            routes.append(
                Route(method="PATCH", path=one, handler=self._bind(self.patch, kind), body=dict[str, Any],
                      answer=WriteReport, about=f"Create one {kind.name}, or change the given members only (RFC 7396)",
                      query=GUARD_QUERY)
            )  # fmt: skip
            routes.append(
                Route(method="DELETE", path=one, handler=self._bind(self.delete, kind), about=f"Delete one {kind.name}",
                      answer=str, alternative=WriteReport, query=GUARD_QUERY)
            )  # fmt: skip
        return routes

    def _bind(self, handler: Callable[..., Any], kind: Kind[Any]) -> Handler:
        async def bound(request: web.Request) -> web.StreamResponse:
            response: web.StreamResponse = await handler(kind, request)
            return response

        return bound

    @property
    def _cluster(self) -> Cluster:
        return self._control.cluster

    async def list(self, kind: Kind[Any], request: web.Request) -> web.StreamResponse:
        query = read_list_query(kind, request.query)
        if query.watch:
            return await self._watch(kind, request, query)
        links = Links(self._cluster)
        page: list[dict[str, Any]] = []
        # Paged by key, not by position: objects that are created or deleted between pages shift nothing.
        after = tuple(query.after.split(":")) if query.after else ()
        headers: dict[str, str] = {"X-Revision": str(self._control.mirror.revision)}
        for parts, stored in sorted(self._cluster.tables[kind.prefix].items()):
            if parts <= after or not query.selects(stored.value):
                continue
            if len(page) == query.limit:
                headers["X-Continue"] = page[-1]["key"]
                break
            page.append(self._shown(kind, stored.value, links))
        return json_response(page, headers=headers)

    async def read(self, kind: Kind[Any], request: web.Request) -> web.Response:
        stored = self._find(kind, request.match_info["key"])
        return json_response(self._shown(kind, stored.value, Links(self._cluster)), headers=etag(stored))

    async def inspect(self, kind: Kind[Any], request: web.Request) -> web.Response:
        if kind is kinds.ENDPOINT:
            endpoint = self._find_endpoint(request.match_info["key"])
            return json_response({"Oper": endpoint_oper(self._cluster, endpoint)})
        stored = self._find(kind, request.match_info["key"])
        oper = oper_of(self._cluster, kind, stored.value)
        if kind is kinds.GLOBAL:
            oper["clusterMode"] = self._cluster_mode
        body = {"Config": shown(kind, stored.value, Links(self._cluster)), "Oper": oper}
        return json_response(body, headers=etag(stored))

    async def write(self, kind: Kind[Any], request: web.Request) -> web.Response:
        parts = kind.parse_key(request.match_info["key"])
        value = read_object(kind, await read_json(request), parts)
        options = read_write_options(request.query)
        if options.needs_effect:
            return json_response(await self._write_guarded(kind, parts, request, lambda _: value))
        stored = await self._control.put(kind, value, read_condition(request.headers))
        return json_response(shown(kind, stored.value, Links(self._cluster)), headers=etag(stored))

    async def patch(self, kind: Kind[Any], request: web.Request) -> web.Response:
        """Create an object, or change only the given members of the present one; null resets a member."""
        parts = kind.parse_key(request.match_info["key"])
        members = await read_json(request)
        check_members(kind, members)
        report = await self._write_guarded(
            kind, parts, request, lambda present: read_object(kind, merged(kind, parts, present, members), parts)
        )
        return json_response(report)

    async def _write_guarded(
        self,
        kind: Kind[Any],
        parts: tuple[str, ...],
        request: web.Request,
        wanted: Callable[[model.Value | None], model.Value],
    ) -> WriteReport:
        condition = read_condition(request.headers)

        def plan(reading: ReadSet) -> PlannedWrite:
            condition.check(self._cluster.get(kind, *parts))
            present = reading.get(kind, *parts)
            transaction = changes.plan_put(reading, kind, wanted(present))
            return PlannedWrite(kind=kind, key=parts, present=present, transaction=transaction)

        return await self._guarded.write(plan, read_write_options(request.query))

    async def _delete_guarded(self, kind: Kind[Any], parts: tuple[str, ...], request: web.Request) -> WriteReport:
        condition = read_condition(request.headers)

        def plan(reading: ReadSet) -> PlannedWrite:
            condition.check(self._cluster.get(kind, *parts))
            present = reading.get(kind, *parts)
            transaction = changes.plan_delete(reading, kind, *parts)
            return PlannedWrite(kind=kind, key=parts, present=present, transaction=transaction)

        return await self._guarded.write(plan, read_write_options(request.query))

    async def delete(self, kind: Kind[Any], request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if read_write_options(request.query).needs_effect:
            return json_response(await self._delete_guarded(kind, kind.parse_key(key), request))
        await self._control.delete(kind, kind.parse_key(key), read_condition(request.headers))
        return json_response(key)

    def _shown(self, kind: Kind[Any], value: model.Value, links: Links) -> dict[str, Any]:
        """An object as `shown`, and for a node its status."""
        members = shown(kind, value, links)
        if isinstance(value, model.Node):
            members["status"] = node_status(self._cluster, value.name)
        return members

    def _find(self, kind: Kind[Any], key: str) -> Stored[Any]:
        stored = self._cluster.get(kind, *kind.parse_key(key))
        if stored is None:
            raise NotFound(f"{kind.name} {key[:200]!r} does not exist")
        return stored

    def _find_endpoint(self, key: str) -> model.Endpoint:
        found = next(self._cluster.find_endpoints(key), None)
        if found is None:
            raise NotFound(f"no endpoint has {key[:200]!r} in its id, container id or container name")
        return found

    async def _watch(self, kind: Kind[Any], request: web.Request, query: ListQuery) -> web.StreamResponse:
        """Stream one JSON object per line: `put`, `delete`, `synced` after the listing; blank lines while idle."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        async with aclosing(self._watch_lines(kind, query)) as lines:
            # Before the response is prepared, an error still becomes an HTTP status.
            first = await anext(lines)
            await response.prepare(request)
            await response.write(first)
            # Kept over heartbeats: cancelling `anext` would end the generator and lose an event.
            pending = asyncio.ensure_future(anext(lines, b""))
            stopping = asyncio.ensure_future(request.app[STOPPING].wait())
            try:
                while True:
                    waited = {pending, stopping}
                    done, _ = await asyncio.wait(waited, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        await response.write(b"\n")
                        continue
                    if stopping in done or not pending.result():
                        return response
                    await response.write(pending.result())
                    pending = asyncio.ensure_future(anext(lines, b""))
            except ConnectionError:
                return response
            finally:
                pending.cancel()
                stopping.cancel()
                await asyncio.wait({pending, stopping})

    async def _watch_lines(self, kind: Kind[Any], query: ListQuery) -> AsyncGenerator[bytes, None]:
        """The lines of a watch. When the store fails, the last one is `error`, as it is too late for a status; after
        `compacted` the client must list again."""
        since = query.since
        prefix = kind.store_prefix()
        if since is None:
            listing = await self._store.list(prefix)
            since = listing.revision
            lines = [_line(kind, query, key=entry.key, data=entry.value, revision=entry.revision)
                     for entry in listing.entries if _matching(query, entry.key, entry.value)]  # fmt: skip
            yield b"".join(lines) + _json_line({"type": "synced", "revision": since})
        else:
            yield b"\n"
        try:
            async with aclosing(self._store.watch(prefix, since)) as changes:
                async for change in changes:
                    yield b"".join(
                        _line(kind, query, key=event.key, data=event.value, revision=change.revision)
                        for event in change.events
                    )
        except Unavailable as error:
            yield _json_line({"type": "error", "code": error.code, "message": error.message})


def _line(kind: Kind[Any], query: ListQuery, *, key: StoreKey, data: bytes | None, revision: int) -> bytes:
    """The watch line of one key: `put`, or `delete` when the object is gone or no longer matches the filter."""
    line: dict[str, Any] = {"type": "delete", "key": key.split("/", 1)[1].replace("/", ":"), "revision": revision}
    if value := _matching(query, key, data):
        line |= {"type": "put", "object": configuration(kind, value)}
    return _json_line(line)


def _matching(query: ListQuery, key: StoreKey, data: bytes | None) -> model.Value | None:
    """The object, if it can be decoded and matches the filter."""
    try:
        found = None if data is None else decode_stored(parse_store_key(key), data)
    except (WeftError, ValueError):  # shown by /readyz; it must not break the list of the others
        return None
    value: model.Value | None = found.value if found else None
    return value if value is not None and query.selects(value) else None


def _json_line(line: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list or watch."""

    limit: int
    after: str
    watch: bool
    since: int | None
    # Member to value; all must match.
    filters: dict[str, str]

    def selects(self, value: model.Value) -> bool:
        """Whether an object matches the filter; a list matches by any of its items."""
        if not self.filters:
            return True
        members = msgspec.structs.asdict(value)
        names = dict(zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True))
        return all(_has(members[names[name]], text) for name, text in self.filters.items())


def _has(member: object, text: str) -> bool:
    if isinstance(member, tuple):
        return text in member
    return text == (str(member).lower() if isinstance(member, bool) else str(member))


def filterable(kind: Kind[Any]) -> list[str]:
    """The members by which a list of the kind can be filtered."""
    return [member for member in kind.type.__struct_encode_fields__ if member not in kind.read_only_fields]


def read_list_query(kind: Kind[Any], query: Mapping[str, str]) -> ListQuery:
    """The query of a list, or `Malformed` with the parameter at fault."""
    rest = dict(query)
    limit = _read_number(rest.pop("limit", str(MAX_PAGE)), "limit", highest=MAX_PAGE)
    after = rest.pop("continue", "")
    watch = rest.pop("watch", "false").lower()
    if watch not in {"true", "false", "1", "0", ""}:
        raise Malformed("watch must be true or false", field="watch")
    since_text = rest.pop("since", None)
    since = None if since_text is None else _read_number(since_text, "since", highest=1 << 62)
    for name in rest:
        if name not in filterable(kind):
            raise Malformed(f"{kind.plural} cannot be filtered by {name[:80]!r}", field=name[:80])
    return ListQuery(limit=limit, after=after, watch=watch in {"true", "1", ""}, since=since, filters=rest)


def _read_number(text: str, field: str, *, highest: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:20]) <= highest:
        raise Malformed(f"{field} must be a number of 1 to {highest}", field=field)
    return int(text)


def read_object(kind: Kind[Any], members: dict[str, Any], parts: tuple[str, ...]) -> Any:
    """Decode the object of a request body; its key must be that of the path."""
    members = {name: member for name, member in members.items() if name not in DECORATION}
    for name in kind.read_only_fields:
        if name in members:
            raise Invalid(f"{name} is read-only, the control plane sets it: remove it", field=name)
    value = codec.convert_input(kind.type, members)
    kind.check_key(value, parts)
    return value


# What Contiv's netctl says of a new object without a flag, where REST requires the member.
_NEW_MEMBERS: Mapping[str, Mapping[str, Any]] = {kinds.NETWORK.name: {"encap": "vxlan"}}


def check_members(kind: Kind[Any], members: Mapping[str, Any]) -> None:
    """`Invalid` for a member that the kind does not have: null would otherwise remove it silently."""
    for name in members:
        if name not in kind.type.__struct_encode_fields__ and name not in DECORATION:
            raise Invalid(f"{name[:80]}: unknown member: remove it", field=name[:80])


def merged(
    kind: Kind[Any], parts: tuple[str, ...], present: model.Value | None, members: Mapping[str, Any]
) -> dict[str, Any]:
    """The present object's members with the given ones (RFC 7396): null resets a member to its default."""
    base = _NEW_MEMBERS.get(kind.name, {}) if present is None else configuration(kind, present)
    changed = {**dict(zip(kind.key_members(), parts, strict=True)), **base, **members}
    return {name: member for name, member in changed.items() if member is not None}


def configuration(kind: Kind[Any], value: model.Value) -> dict[str, Any]:
    """The members that users configure, and the key."""
    members = {name: member for name, member in codec.members(value).items() if name not in kind.read_only_fields}
    return {"key": kind.key_text(value), **members}


def shown(kind: Kind[Any], value: model.Value, links: Links) -> dict[str, Any]:
    """An object in a response: its members, key and links."""
    members = configuration(kind, value)
    if own := links_of(value):
        members["links"] = own
    if sets := links.sets_of(kind, members["key"]):
        members["link-sets"] = sets
    return members


def etag(stored: Stored[Any]) -> dict[str, str]:
    """The ETag header: the object's revision."""
    return {"ETag": f'"{stored.revision}"'}


def read_condition(headers: Mapping[str, str]) -> Condition:
    """If-Match and If-None-Match, or `Malformed`."""
    match, none_match = headers.get("If-Match"), headers.get("If-None-Match")
    if none_match is not None and none_match.strip() != "*":
        raise Malformed("If-None-Match: only * is understood here", field="If-None-Match")
    if match is None:
        return Condition(absent=none_match is not None)
    text = match.strip()
    if text == "*":
        return Condition(present=True)
    number = text.removeprefix("W/").strip('"')
    if not number.isascii() or not number.isdigit() or len(number) > 19:
        raise Malformed('If-Match must be an ETag of ours, such as "42"', field="If-Match")
    return Condition(revision=int(number))
