"""Waiting for realization: a write returns when every node has applied it (ADR 8).

The waiter commits a sync request after its write. A node acknowledges with its applied revision once it has applied
everything up to the request. Without a waiter, nothing is written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Behind, Malformed, Unavailable
from weft.domain.lifecycle.sync_status import is_behind, node_status, pending_nodes
from weft.domain.store_types import NEVER, Put, Revision
from weft.master.api.objects import API
from weft.ports.store import Store
from weft.runtime.http import json_response
from weft.runtime.routes import Query, Route
from weft.runtime.store.mirror import Mirror

# A waiting request occupies a connection; proxies in between often close an idle one after a minute.
MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 10.0
WAIT_QUERY = (
    Query(
        name="wait",
        about="wait up to this many seconds until every node has applied the write, else 504 with the pending nodes",
        schema={"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WAIT_S},
    ),
    Query(name="ignore-unreachable", about="with wait: ignore unreachable nodes", schema={"type": "boolean"}),
)
_WRITE_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How long to wait, and for which nodes."""

    seconds: float
    ignore_unreachable: bool = False


class SyncWait:
    """Requests acknowledgements from the nodes, and waits for them."""

    def __init__(self, store: Store, cluster: Cluster, mirror: Mirror) -> None:
        self._store = store
        self._cluster = cluster
        self._mirror = mirror

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="POST", path=f"{API}/sync", handler=self._sync, query=WAIT_QUERY,
                  about="Wait until every node has applied everything written so far", answer=dict[str, int]),
        )  # fmt: skip

    def with_wait(self, routes: Iterable[Route]) -> tuple[Route, ...]:
        """The routes, with the query `wait` added to those that write."""
        return tuple(self._with_wait(route) if route.method in _WRITE_METHODS else route for route in routes)

    def _with_wait(self, route: Route) -> Route:
        async def write_and_wait(request: web.Request) -> web.StreamResponse:
            # Parsed first: a malformed `wait` must not leave a write behind.
            options = read_wait_options(request.query)
            response = await route.handler(request)
            if options is not None:
                await self.wait_for_sync(options)
            return response

        return replace(route, handler=write_and_wait, query=(*route.query, *WAIT_QUERY))

    async def wait_for_sync(self, options: WaitOptions) -> Revision:
        """Return the sync request's revision when every node has applied everything written before it.

        `Behind` at the deadline, with the pending nodes.
        """
        revision = NEVER
        try:
            async with asyncio.timeout(options.seconds):
                revision = await self._store.commit([], [Put(kinds.SYNC_REQUEST_KEY, b"{}")])
                # Once the mirror has the request, it also has every node that was registered before it.
                await self._mirror.wait_for(revision, within=options.seconds)
                await self._wait_for_acks(revision, options)
        except (TimeoutError, Unavailable) as late:
            raise self._behind(revision, options) from late
        return revision

    async def _wait_for_acks(self, revision: Revision, options: WaitOptions) -> None:
        # Check one pending node per store change instead of all of them: with n nodes this is n checks, not n². The
        # outer loop repeats it, because nodes may have joined or become reachable in the meantime.
        while pending := list(pending_nodes(self._cluster, revision, ignore_unreachable=options.ignore_unreachable)):
            while pending:
                if is_behind(self._cluster, pending[-1], revision, ignore_unreachable=options.ignore_unreachable):
                    await self._mirror.wait_for(self._mirror.revision + 1, within=options.seconds)
                else:
                    pending.pop()

    def _behind(self, revision: Revision, options: WaitOptions) -> Behind:
        if revision == NEVER:
            return Behind("the write is committed, but the store did not accept the sync request: nodes may be behind")
        names = pending_nodes(self._cluster, revision, ignore_unreachable=options.ignore_unreachable)
        statuses = [{"node": name, **node_status(self._cluster, name)} for name in names]
        listed = ", ".join(
            f"{status['node']} ({'; '.join([status['state'], *status['reasons']])})" for status in statuses
        )
        return Behind(
            f"the write is committed, but was not realized within {options.seconds:g} s"
            + (f" on {listed}" if listed else ""),
            details={"revision": revision, "pendingNodes": statuses},
        )

    async def _sync(self, request: web.Request) -> web.Response:
        options = read_wait_options({"wait": str(DEFAULT_WAIT_S), **request.query})
        assert options is not None
        return json_response({"revision": await self.wait_for_sync(options)})


def read_wait_options(query: Mapping[str, str]) -> WaitOptions | None:
    """The wait options of a query, None without `wait`; `Malformed` with the parameter at fault."""
    ignore = query.get("ignore-unreachable", "false").lower()
    if ignore not in {"true", "false", "1", "0", ""}:
        raise Malformed("ignore-unreachable must be true or false", field="ignore-unreachable")
    text = query.get("wait")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan  # fails the comparison below, as "nan" itself does
    if not 0 < seconds <= MAX_WAIT_S:
        raise Malformed(f"wait must be a number of seconds, more than 0 and up to {MAX_WAIT_S:g}", field="wait")
    return WaitOptions(seconds, ignore_unreachable=ignore in {"true", "1", ""})
