"""netmaster's REST application: routes, bearer-token authentication, forwarding to the leader, request metrics."""

from __future__ import annotations

import asyncio
import difflib
import hmac
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from aiohttp import web

from weft.domain.errors import Denied, Malformed
from weft.master.api.leader_proxy import LeaderProxy
from weft.master.api.objects import API, STOPPING
from weft.master.api.openapi import openapi_document
from weft.master.metrics import Metrics
from weft.runtime.admission import Guard
from weft.runtime.http import MAX_BODY, Handler, error_response, errors_as_json, json_response, own_pages_only
from weft.runtime.routes import Route, register


def make_app(
    routes: tuple[Route, ...], *, token: str, leader_proxy: LeaderProxy, metrics: Metrics, guard: Guard
) -> web.Application:
    """The application with all routes and the OpenAPI document."""
    described: tuple[Route, ...] = ()

    async def openapi(_: web.Request) -> web.Response:
        return json_response(openapi_document(described))

    described = (
        *routes,
        Route(method="GET", path="/openapi.json", handler=openapi, about="OpenAPI document",
              answer=dict[str, Any], local=True),
    )  # fmt: skip
    by_path = {(route.method, route.path.rstrip("/")): route for route in described}

    def route_of(request: web.Request) -> Route | None:
        resource = request.match_info.route.resource
        return by_path.get((request.method, resource.canonical.rstrip("/"))) if resource else None

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = perf_counter()
        response = await handler(request)
        route = route_of(request)
        # The route, not the path: labels must not grow with the paths that clients make up.
        name = f"{route.method} {route.path}" if route else "none"
        metrics.requests.labels(name, str(response.status)).inc()
        metrics.seconds.labels(name).observe(perf_counter() - began)
        return response

    @web.middleware
    async def authenticated(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        if token and not (route and route.open):
            sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
            # Constant time: the duration must not reveal how many characters match.
            if not hmac.compare_digest(sent.encode(errors="surrogateescape"), token.encode()):
                response = error_response(Denied("send the token as Authorization: Bearer …"), status=401)
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        return await handler(request)

    @web.middleware
    async def known_query_only(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        # Only our own API: Contiv's plugin calls ignore the query, and probes of health paths may send anything.
        if route is not None and route.path.startswith(API):
            check_query([name for name, _ in request.query.items()], [query.name for query in route.query])
        return await handler(request)

    @web.middleware
    async def leader_only(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        response = None if route is None or route.local else await leader_proxy.forward(request)
        return await handler(request) if response is None else response

    # Outermost first. Limits come before authentication: guesses of the token count too. Authentication comes before
    # forwarding: a follower must not relay what it would reject.
    app = web.Application(
        middlewares=[
            counted,
            errors_as_json,
            guard.middleware(),
            own_pages_only,
            authenticated,
            known_query_only,
            leader_only,
        ],
        client_max_size=MAX_BODY,
    )
    app[STOPPING] = asyncio.Event()
    app.on_shutdown.append(_end_watches)
    register(app, described)
    return app


def check_query(names: Sequence[str], known: Sequence[str]) -> None:
    """`Malformed` for an unknown parameter, such as a misspelt `dry-run`, and for one that is given twice.

    A parameter that is ignored may be the one that was to keep a write from happening.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": known are {', '.join(known) or 'none'}"
            raise Malformed(f"unknown query parameter {name[:80]!r}{hint}", field=name[:80])
        if names.count(name) > 1:
            raise Malformed(f"query parameter {name[:80]!r} is given twice", field=name[:80])


async def _end_watches(app: web.Application) -> None:
    app[STOPPING].set()
