"""Waiting until what was written is in force on every node (ADR 8).

The waiter puts a wish into the store after its write; each node answers with a receipt when it has carried out all up
to the wish. Nothing is written while nobody waits.
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
from weft.domain.lifecycle.sync_status import is_behind, laggards, node_status
from weft.domain.store_types import NEVER, Put, Revision
from weft.master.api.objects import API
from weft.ports.store import Store
from weft.runtime.http import json_response
from weft.runtime.routes import Query, Route
from weft.runtime.store.mirror import Mirror

LONGEST_WAIT_S = 60.0
DEFAULT_WAIT_S = 10.0
WAIT_QUERY = (
    Query(
        name="wait",
        about="answer only when this is in force on every node, or after so many seconds with 504 and who is behind",
        schema={"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_WAIT_S},
    ),
    Query(name="skip-silent", about="with wait: not for nodes that are silent", schema={"type": "boolean"}),
)
_WRITING = frozenset({"POST", "PUT", "DELETE"})


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How long somebody waits, and for whom."""

    seconds: float
    skip_silent: bool = False


class Receipts:
    """Asks the nodes for receipts, and waits for them."""

    def __init__(self, store: Store, cluster: Cluster, mirror: Mirror) -> None:
        self._store = store
        self._cluster = cluster
        self._mirror = mirror

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="POST", path=f"{API}/settle", handler=self._settle, query=WAIT_QUERY,
                  about="Wait until all that was written so far is in force on every node", answer=dict[str, int]),
        )  # fmt: skip

    def awaited(self, routes: Iterable[Route]) -> tuple[Route, ...]:
        """The routes, of which those that write answer when it is in force everywhere, where the caller asks for it."""
        return tuple(self._awaited(route) if route.method in _WRITING else route for route in routes)

    def _awaited(self, route: Route) -> Route:
        async def write_and_wait(request: web.Request) -> web.StreamResponse:
            patience = read_patience(request.query)
            response = await route.handler(request)
            if patience is not None:
                await self.settle(patience)
            return response

        return replace(route, handler=write_and_wait, query=(*route.query, *WAIT_QUERY))

    async def settle(self, patience: WaitOptions) -> Revision:
        """Return when every node has carried out all that was written so far; the revision of the wish.

        `Behind` names those who have not by the deadline.
        """
        revision = NEVER
        try:
            async with asyncio.timeout(patience.seconds):
                revision = await self._store.commit([], [Put(kinds.RECEIPT_WISH_KEY, b"{}")])
                # Once the wish has come back to us, we know every node that was there before it.
                await self._mirror.wait_for(revision, within=patience.seconds)
                await self._all_receipts(revision, patience)
        except (TimeoutError, Unavailable) as late:
            raise self._behind(revision, patience) from late
        return revision

    async def _all_receipts(self, revision: Revision, patience: WaitOptions) -> None:
        """Wait for the last of those behind, then for the one before: each piece of news costs one look at one node."""
        while behind := list(laggards(self._cluster, revision, skip_silent=patience.skip_silent)):
            while behind:
                if is_behind(self._cluster, behind[-1], revision, skip_silent=patience.skip_silent):
                    await self._mirror.wait_for(self._mirror.revision + 1, within=patience.seconds)
                else:
                    behind.pop()

    def _behind(self, revision: Revision, patience: WaitOptions) -> Behind:
        if revision == NEVER:
            return Behind("written, and it stands; but the store did not take the question whether it is in force")
        names = laggards(self._cluster, revision, skip_silent=patience.skip_silent)
        shown = [{"node": name, **node_status(self._cluster, name)} for name in names]
        told = ", ".join(f"{each['node']} ({'; '.join([each['state'], *each['reasons']])})" for each in shown)
        return Behind(
            f"written, and it stands; but after {patience.seconds:g} s it was not known to be in force"
            + (f" on {told}" if told else ""),
            details={"revision": revision, "laggards": shown},
        )

    async def _settle(self, request: web.Request) -> web.Response:
        patience = read_patience({"wait": str(DEFAULT_WAIT_S), **request.query})
        assert patience is not None
        return json_response({"revision": await self.settle(patience)})


def read_patience(query: Mapping[str, str]) -> WaitOptions | None:
    """How long the caller wants to wait, or None; `Malformed` with the parameter at fault."""
    skip = query.get("skip-silent", "false").lower()
    if skip not in {"true", "false", "1", "0", ""}:
        raise Malformed("skip-silent must be true or false", field="skip-silent")
    text = query.get("wait")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_WAIT_S:
        raise Malformed(f"wait must be a number of seconds, more than 0 and up to {LONGEST_WAIT_S:g}", field="wait")
    return WaitOptions(seconds, skip_silent=skip in {"true", "1", ""})
