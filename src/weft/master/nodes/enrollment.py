"""How nodes join (docs/design/joining.md): netmaster gives an agent, known by its token, a certificate for its node.

The authority is netmaster's own, kept beside the embedded store. Where netmaster is, and by which authority it is
known, is published where agents look.
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

log = Log("joining")

# How often it is seen to that agents are told the truth.
_LOOK_S = 30.0


class Joining:
    """The one call there is: a request for a certificate, by whoever has an agent's token."""

    def __init__(self, authority: Authority, meeting: Discovery, *, life: timedelta) -> None:
        self._authority = authority
        self._meeting = meeting
        self._life = life

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=LARGEST)
        app.router.add_post(PATH, self._join)
        return app

    async def _join(self, request: web.Request) -> web.Response:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Denied("a node joins with the token of its agent: none came")
        told = await self._meeting.node_of(token)
        try:
            node = check_name(told, field="node", limit=MAX_LONG_NAME)
        except Invalid as error:
            raise Denied(f"the token is of no node: {error.message}") from error
        certificate = self._authority.sign(await request.read(), name=node, life=self._life, now=datetime.now(UTC))
        log.info("node joined", node=node)
        return json_response(Joined(certificate=certificate.decode()))


@asynccontextmanager
async def joining(
    meeting: Discovery, *, directory: Path, store: tuple[str, int], join: tuple[str, int], life: float
) -> AsyncIterator[ssl.SSLContext]:
    """Let nodes join while the block runs. What it gets is TLS for the store: it demands certificates of nodes.

    `store` and `join` are addresses at which agents reach us; `life` is that of certificates, in seconds.
    """
    authority = Authority.open(directory / "authority.pem")
    own = _OwnCertificate(authority, directory, addresses=(store[0], join[0]), life=timedelta(seconds=life))
    for_store, for_joining = own.tls(demanding=True), own.tls(demanding=False)
    notice = NetmasterEndpoint(store=_url(store), join=_url(join), ca=authority.ca.decode())
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(meeting)
        app = Joining(authority, meeting, life=timedelta(seconds=life)).app()
        await stack.enter_async_context(serving(app, (join,), tls=for_joining))
        await stack.enter_async_context(background(own.renew_for_ever(), name="own certificate"))
        await stack.enter_async_context(background(_publish_for_ever(meeting, notice), name="notice"))
        yield for_store


class _OwnCertificate:
    """By which agents know us. New connections see the one of the moment."""

    def __init__(self, authority: Authority, directory: Path, *, addresses: Sequence[str], life: timedelta) -> None:
        self._authority = authority
        self._ca = directory / "ca.pem"
        self._file = directory / "netmaster.pem"
        self._addresses = tuple(dict.fromkeys(addresses))
        self._life = life
        self._shown: list[ssl.SSLContext] = []
        place_file(self._ca, authority.ca, mode=0o600)
        self._issue()

    def tls(self, *, demanding: bool) -> ssl.SSLContext:
        context = server_tls(self._file, self._file, client_ca=self._ca if demanding else None)
        self._shown.append(context)
        return context

    async def renew_for_ever(self) -> None:
        seconds = self._life.total_seconds() / 2
        pace = Backoff(first=seconds, cap=seconds)
        while True:
            await pace.pause()
            self._issue()
            for context in self._shown:
                context.load_cert_chain(self._file)

    def _issue(self) -> None:
        request = new_request("netmaster")
        certificate = self._authority.sign(
            request.text, name="netmaster", life=self._life, now=datetime.now(UTC), addresses=self._addresses
        )
        place_file(self._file, request.key + certificate, mode=0o600)


async def _publish_for_ever(meeting: Discovery, notice: NetmasterEndpoint) -> None:
    """Have the notice say where we are. `Conflict` ends us: agents belong to another store, and would lose theirs."""
    pace = Backoff(first=_LOOK_S, cap=_LOOK_S)
    trouble = Backoff(first=0.2, cap=5.0)
    while True:
        try:
            known = await meeting.read()
            if known is not None and known.ca != notice.ca:
                raise Conflict(
                    f"the store of this cluster is another than ours, it was last at {known.store}: start netmaster "
                    "there, or bring its directory here; to begin anew, delete ConfigMap weft-netmaster and apply it"
                )
            if known != notice:
                await meeting.publish(notice)
                log.info("agents are told where we are", store=notice.store)
        except (Denied, NotFound, Unavailable) as error:
            log.warning("agents cannot be told where we are", reason=error.message)
            await trouble.pause()
        else:
            trouble.reset()
            await pace.pause()


def _url(address: tuple[str, int]) -> str:
    host, port = address
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
