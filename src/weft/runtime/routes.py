"""REST routes as data: one table for the aiohttp router and for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from weft.domain.errors import Malformed
from weft.runtime.http import Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query parameter."""

    name: str
    about: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation. `body` and `answer` are types with a JSON schema in msgspec; without `answer` it is text.

    A `local` route is served by every netmaster; the others are forwarded to the leader. Agents have local routes only.
    """

    method: str
    path: str
    handler: Handler
    about: str
    body: Any = None
    answer: Any = None
    # A second type of answer, for which a query parameter asks.
    alternative: Any = None
    query: tuple[Query, ...] = ()
    local: bool = False
    # Served without credentials: shows only whether the process is alive.
    open: bool = False


def is_set(query: Mapping[str, str], name: str) -> bool:
    """Whether a boolean query parameter is given as true, or without a value; `Malformed` if it is no boolean."""
    text = query.get(name, "false").lower()
    # Refused, not ignored: a misspelt dry run would write.
    if text not in {"true", "false", "1", "0", ""}:
        raise Malformed(f"{name} must be true or false", field=name)
    return text in {"true", "1", ""}


def register(app: web.Application, routes: tuple[Route, ...]) -> None:
    """Serve the routes, each with and without a trailing slash (contiv 2.1)."""
    for route in routes:
        path = route.path.rstrip("/") or "/"
        app.router.add_route(route.method, path, route.handler)
        # Contiv's clients use both forms.
        if path != "/":
            app.router.add_route(route.method, f"{path}/", route.handler)
