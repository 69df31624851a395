"""Node enrollment (docs/design/node-enrollment.md): an agent with a valid token gets a client certificate for its node.

netmaster has a CA of its own, stored beside the embedded store. It publishes its endpoint and CA certificate for agents
to discover.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from weft.cni.files import place_file
from weft.domain.errors import Conflict, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.domain.ids import MAX_LONG_NAME, check_name
from weft.ports.orchestrator import Discovery, NetmasterEndpoint
from weft.runtime.admission import Guard, Limits
from weft.runtime.backoff import Backoff
from weft.runtime.ca import Authority, check_request, new_request
from weft.runtime.http import errors_as_json, json_response, serving
from weft.runtime.join_wire import LARGEST, PATH, Joined
from weft.runtime.logs import Log
from weft.runtime.server_tls import ServerTls
from weft.runtime.tasks import background

log = Log("enrollment")

# Interval at which the published endpoint is checked: somebody may have deleted or edited it.
_CHECK_S = 30.0
# A node joins once a week; one that cannot, every 5 s. Anybody on the network may try.
JOIN_LIMITS = Limits(connections=1024, per_source=16, per_local=256, rate=5.0, body_bytes=1 << 20)
# TokenReviews at once: the API server has other clients too.
_REVIEWS = 16
# Seconds for which a rejected token stays rejected without another TokenReview, and how many of them are remembered.
_REJECTED_S = 60.0
_MAX_REJECTED = 4096


class NodeEnrollment:
    """The enrollment server. Its only call takes a CSR and an agent's token, and returns a certificate."""

    def __init__(self, authority: Authority, discovery: Discovery, *, life: timedelta) -> None:
        self._authority = authority
        self._discovery = discovery
        self._life = life
        # Hashes of rejected tokens, with the time until which they stay so and the reason.
        self._rejected: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._reviews = 0

    def app(self, guard: Guard) -> web.Application:
        app = web.Application(middlewares=[errors_as_json, guard.middleware()], client_max_size=LARGEST)

        async def join(request: web.Request) -> web.Response:
            return await self._join(request, guard)

        app.router.add_post(PATH, join)
        return app

    async def _join(self, request: web.Request, guard: Guard) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Denied("no bearer token: a node joins with the token of its agent")
        # First what costs the API server nothing.
        signing_request = await request.read()
        check_request(signing_request)
        # The name comes from the token alone; what the CSR asks for is ignored, or an agent could pose as another node.
        name = await self._review(token, guard)
        try:
            node = check_name(name, field="node", limit=MAX_LONG_NAME)
        except Invalid as error:
            raise Denied(f"token not bound to a node: {error.message}") from error
        certificate = self._authority.sign(signing_request, name=node, life=self._life, now=datetime.now(UTC))
        log.info("node certificate issued", node=node)
        return json_response(Joined(certificate=certificate.decode()))

    async def _review(self, token: str, guard: Guard) -> str:
        """The node that a token is bound to. A rejected token costs one TokenReview a minute."""
        digest, now = sha256(token.encode(errors="surrogateescape")).digest(), asyncio.get_running_loop().time()
        until, reason = self._rejected.get(digest, (0.0, ""))
        if now < until:
            raise Denied(reason)
        if self._reviews >= _REVIEWS:
            raise guard.limited("token_reviews", f"{_REVIEWS} tokens are being reviewed, the limit")
        self._reviews += 1
        try:
            return await self._discovery.review_token(token)
        except Denied as error:
            self._rejected.pop(digest, None)
            self._rejected[digest] = (now + _REJECTED_S, error.message)
            if len(self._rejected) > _MAX_REJECTED:
                self._rejected.popitem(last=False)
            raise
        finally:
            self._reviews -= 1


@asynccontextmanager
async def serving_enrollment(
    discovery: Discovery,
    *,
    directory: Path,
    store: tuple[str, int],
    join: tuple[str, int],
    life: float,
    guard: Guard | None = None,
) -> AsyncIterator[ServerTls]:
    """Enroll nodes while the block runs. Yields the TLS of the store, which requires node certificates.

    `store` and `join` are the addresses at which agents reach us; `life` is the certificates' lifetime in seconds.
    """
    authority = Authority.open(directory / "authority.pem")
    own = _ServingCertificate(authority, directory, addresses=(store[0], join[0]), life=timedelta(seconds=life))
    # An agent that enrolls has no certificate yet: its token authenticates it.
    store_tls, join_tls = own.tls(require_client_cert=True), own.tls(require_client_cert=False)
    endpoint = NetmasterEndpoint(store=_url(store), join=_url(join), ca=authority.ca.decode())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(discovery)
        guard = guard or Guard("join", JOIN_LIMITS)
        app = NodeEnrollment(authority, discovery, life=timedelta(seconds=life)).app(guard)
        await stack.enter_async_context(serving(app, (join,), tls=join_tls, guard=guard))
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
        place_file(self._ca, authority.ca, mode=0o600)
        self._issue()

    def tls(self, *, require_client_cert: bool) -> ServerTls:
        # It sees when the file is replaced; established connections are not affected.
        return ServerTls(self._file, self._file, client_ca=self._ca if require_client_cert else None)

    async def run_renewal(self) -> None:
        # Long before expiry: the clocks of agents may be ahead of ours.
        seconds = self._life.total_seconds() / 2
        pace = Backoff(first=seconds, cap=seconds)
        # A full disk, for example: there is half a lifetime left to get better.
        retry = Backoff(first=min(1.0, seconds / 10), cap=min(60.0, seconds / 5))
        while True:
            await pace.pause()
            while not self._is_issued():
                await retry.pause()
            retry.reset()

    def _is_issued(self) -> bool:
        try:
            self._issue()
        except (OSError, WeftError) as error:
            log.error("certificate renewal failed, retrying", file=self._file, reason=str(error))
            return False
        return True

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
