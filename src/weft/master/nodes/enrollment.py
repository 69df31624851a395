"""Node enrollment (docs/design/node-enrollment.md): an agent with a valid token gets a client certificate for its node.

netmaster has a CA of its own, stored beside the embedded store. It publishes its endpoint and CA certificate for agents
to discover.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from weft.cni.files import place_file
from weft.domain.errors import Conflict, Denied, Invalid, NotFound, Unavailable
from weft.domain.ids import MAX_LONG_NAME, check_name
from weft.ports.orchestrator import Discovery, NetmasterEndpoint
from weft.runtime.backoff import Backoff
from weft.runtime.ca import Authority, new_request
from weft.runtime.http import errors_as_json, json_response, server_tls, serving
from weft.runtime.join_wire import LARGEST, PATH, Joined
from weft.runtime.logs import Log
from weft.runtime.tasks import background

log = Log("enrollment")

# Interval at which the published endpoint is checked: somebody may have deleted or edited it.
_CHECK_S = 30.0


class NodeEnrollment:
    """The enrollment server. Its only call takes a CSR and an agent's token, and returns a certificate."""

    def __init__(self, authority: Authority, discovery: Discovery, *, life: timedelta) -> None:
        self._authority = authority
        self._discovery = discovery
        self._life = life

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=LARGEST)
        app.router.add_post(PATH, self._join)
        return app

    async def _join(self, request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Denied("no bearer token: a node joins with the token of its agent")
        # The name comes from the token alone; what the CSR asks for is ignored, or an agent could pose as another node.
        name = await self._discovery.review_token(token)
        try:
            node = check_name(name, field="node", limit=MAX_LONG_NAME)
        except Invalid as error:
            raise Denied(f"token not bound to a node: {error.message}") from error
        certificate = self._authority.sign(await request.read(), name=node, life=self._life, now=datetime.now(UTC))
        log.info("node certificate issued", node=node)
        return json_response(Joined(certificate=certificate.decode()))


@asynccontextmanager
async def serving_enrollment(
    discovery: Discovery, *, directory: Path, store: tuple[str, int], join: tuple[str, int], life: float
) -> AsyncIterator[ssl.SSLContext]:
    """Enroll nodes while the block runs. Yields the TLS context for the store, which requires node certificates.

    `store` and `join` are the addresses at which agents reach us; `life` is the certificates' lifetime in seconds.
    """
    authority = Authority.open(directory / "authority.pem")
    own = _ServingCertificate(authority, directory, addresses=(store[0], join[0]), life=timedelta(seconds=life))
    # An agent that enrolls has no certificate yet: its token authenticates it.
    store_tls, join_tls = own.tls(require_client_cert=True), own.tls(require_client_cert=False)
    endpoint = NetmasterEndpoint(store=_url(store), join=_url(join), ca=authority.ca.decode())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(discovery)
        app = NodeEnrollment(authority, discovery, life=timedelta(seconds=life)).app()
        await stack.enter_async_context(serving(app, (join,), tls=join_tls))
        await stack.enter_async_context(background(own.run_renewal(), name="certificate renewal"))
        await stack.enter_async_context(background(_keep_published(discovery, endpoint), name="endpoint publisher"))
        yield store_tls


class _ServingCertificate:
    """netmaster's server certificate, renewed at half its lifetime. New connections get the current one."""

    def __init__(self, authority: Authority, directory: Path, *, addresses: Sequence[str], life: timedelta) -> None:
        self._authority = authority
        self._ca = directory / "ca.pem"
        self._file = directory / "netmaster.pem"
        self._addresses = tuple(dict.fromkeys(addresses))
        self._life = life
        self._contexts: list[ssl.SSLContext] = []
        place_file(self._ca, authority.ca, mode=0o600)
        self._issue()

    def tls(self, *, require_client_cert: bool) -> ssl.SSLContext:
        context = server_tls(self._file, self._file, client_ca=self._ca if require_client_cert else None)
        self._contexts.append(context)
        return context

    async def run_renewal(self) -> None:
        # Long before expiry: the clocks of agents may be ahead of ours.
        seconds = self._life.total_seconds() / 2
        pace = Backoff(first=seconds, cap=seconds)
        while True:
            await pace.pause()
            self._issue()
            # In place: the listeners keep their contexts, and established connections are not affected.
            for context in self._contexts:
                context.load_cert_chain(self._file)

    def _issue(self) -> None:
        request = new_request("netmaster")
        certificate = self._authority.sign(
            request.text, name="netmaster", life=self._life, now=datetime.now(UTC), addresses=self._addresses
        )
        # Key and certificate in one file, which is replaced atomically: they can never mismatch.
        place_file(self._file, request.key + certificate, mode=0o600)


async def _keep_published(discovery: Discovery, endpoint: NetmasterEndpoint) -> None:
    """Keep our endpoint published. `Conflict` ends netmaster: the agents belong to another store."""
    pace = Backoff(first=_CHECK_S, cap=_CHECK_S)
    retry = Backoff(first=0.2, cap=5.0)
    while True:
        try:
            published = await discovery.read()
            # Another CA means another store. With our empty one, agents would delete all their endpoints.
            if published is not None and published.ca != endpoint.ca:
                raise Conflict(
                    f"this cluster has another store, last at {published.store}: start netmaster there, or copy "
                    "its data directory here; to start with an empty store, delete and apply ConfigMap weft-netmaster"
                )
            if published != endpoint:
                await discovery.publish(endpoint)
                log.info("published netmaster endpoint", store=endpoint.store)
        except (Denied, NotFound, Unavailable) as error:
            log.warning("failed to publish netmaster endpoint", reason=error.message)
            await retry.pause()
        else:
            retry.reset()
            await pace.pause()


def _url(address: tuple[str, int]) -> str:
    host, port = address
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
