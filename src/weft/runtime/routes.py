"""REST routes as data: what aiohttp serves and what the OpenAPI document tells are made from the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from weft.runtime.http import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query parameter."""

    name: str
    about: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation. `body` and `answer` are types that msgspec can make a JSON schema from; no `answer` means text.

    A `local` route is answered by every master; the others are forwarded to the leader. An agent has only its own.
    """

    method: str
    path: str
    handler: Handler
    about: str
    body: Any = None
    answer: Any = None
    query: tuple[Query, ...] = ()
    local: bool = False
    # Answered without credentials: says nothing but whether we live.
    open: bool = False


def register(app: web.Application, routes: tuple[Route, ...]) -> None:
    """Serve the routes, each with and without a trailing slash (contiv 2.1)."""
    for route in routes:
        path = route.path.rstrip("/") or "/"
        app.router.add_route(route.method, path, route.handler)
        if path != "/":
            app.router.add_route(route.method, f"{path}/", route.handler)
