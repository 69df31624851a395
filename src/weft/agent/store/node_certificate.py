"""This node's certificate at netmaster: asked for by the agent's token, kept on disk, renewed before it ends.

What was once given is used at every later start, so that a node goes on while netmaster or the API server are away.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from weft.cni.files import place_file
from weft.domain.errors import Denied, Invalid, Unavailable, WeftError
from weft.domain.ids import NodeName
from weft.drivers import RemoteStoreSettings
from weft.ports.orchestrator import Discovery, NetmasterEndpoint
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.ca import new_request, read_end, read_name
from weft.runtime.http_failover import Servers
from weft.runtime.join_wire import PATH, Joined
from weft.runtime.logs import Log

log = Log("membership")

# How often it is looked whether netmaster is somewhere else, or the certificate is to be renewed.
_LOOK_S = 30.0


class NodeCertificate:
    """The files: `node.pem` (key and certificate), `ca.pem`, and `notice.json`, which is written last."""

    def __init__(self, directory: Path, *, node: NodeName, meeting: Discovery, token: Path) -> None:
        self._node = node
        self._meeting = meeting
        self._token = token
        self._pair, self._ca, self._notice = (directory / name for name in ("node.pem", "ca.pem", "notice.json"))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def begin(self, stop: asyncio.Event) -> RemoteStoreSettings | None:
        """How the store is reached; at the very first start that waits for netmaster. None when told to stop first."""
        pause = 0.1
        while self._known() is None:
            try:
                notice = await self._meeting.read()
                if notice is None:
                    raise Unavailable("netmaster has not said where it is yet")
                await self.join(notice)
            except WeftError as error:
                log.warning("this node has not joined yet", reason=error.message)
                if await wait_event(stop, within=pause):
                    return None
                pause = min(2 * pause, 5.0)
        known = self._known()
        assert known is not None
        return RemoteStoreSettings(endpoints=(known.store,), node=self._node, ca=str(self._ca), cert=str(self._pair))

    async def keep(self) -> None:
        """Renew the certificate, for ever; return when netmaster is found to be another, or elsewhere.

        The files say so then already: who starts anew is where it should be.
        """
        while True:
            seconds = min(_LOOK_S, self._life().total_seconds() / 10)
            await Backoff(first=seconds, cap=seconds).pause()
            try:
                if await self.look():
                    return
            except WeftError as error:
                log.warning("the certificate of this node is not renewed", reason=error.message)

    async def look(self) -> bool:
        """Do what is due; whether netmaster is another, or elsewhere, than it was."""
        known = self._known()
        try:
            notice = await self._meeting.read() or known
        except (Unavailable, Denied):
            notice = known  # the orchestrator is away; netmaster may be there
        if notice is None:
            raise Unavailable("what is known of netmaster is gone")
        if notice != known:
            await self.join(notice)
            log.info("netmaster is elsewhere now", store=notice.store)
            return True
        ends = read_end(self._pair.read_bytes())
        if datetime.now(UTC) > ends - self._life() / 3:
            await self.join(notice)
            log.info("the certificate of this node is renewed", ends=read_end(self._pair.read_bytes()).isoformat())
        return False

    def _known(self) -> NetmasterEndpoint | None:
        """What was told last; None before this node has joined, also when it has under another name."""
        if not (self._notice.is_file() and self._pair.is_file() and self._ca.is_file()):
            return None
        if read_name(self._pair.read_bytes()) != self._node:
            return None
        try:
            return msgspec.json.decode(self._notice.read_bytes(), type=NetmasterEndpoint)
        except msgspec.MsgspecError as error:
            raise Invalid(f"{self._notice} is not readable: remove it, and the node joins anew: {error}") from error

    def _life(self) -> timedelta:
        """How long the certificate was to live when it came."""
        came = datetime.fromtimestamp(self._pair.stat().st_mtime, UTC)
        return max(read_end(self._pair.read_bytes()) - came, timedelta(seconds=1))

    async def join(self, notice: NetmasterEndpoint) -> None:
        """Have a new certificate, and keep it with the notice.

        `Denied` when netmaster refuses, or knows this node by another name: nothing changes.
        """
        try:
            token = self._token.read_text().strip()
        except OSError as error:
            raise Unavailable(f"the token {self._token} cannot be read: {error.strerror}") from error
        try:
            tls = ssl.create_default_context(cadata=notice.ca)
        except ssl.SSLError as error:
            raise Unavailable(f"netmaster's authority is not readable: {error}") from error
        request = new_request(self._node)
        async with Servers([notice.join], tls=tls) as servers:
            headers = {"Authorization": f"Bearer {token}"}
            joined = await servers.ask(PATH, request.text, headers=headers, judge=_judge, repeatable=True)
        named = read_name(joined.certificate.encode())
        if named != self._node:
            raise Denied(
                f"the agent's token is that of a pod on node {named!r}, but this agent is called {self._node!r}: "
                f"start it with --host={named}, its node's name in Kubernetes"
            )
        for file, content in (
            (self._pair, request.key + joined.certificate.encode()),
            (self._ca, notice.ca.encode()),
            (self._notice, msgspec.json.encode(notice)),
        ):
            place_file(file, content, mode=0o600)


class _Refusal(msgspec.Struct, frozen=True):
    message: str = ""


def _judge(status: int, body: bytes) -> Joined:
    try:
        if status == 200:
            return msgspec.json.decode(body, type=Joined)
        told = msgspec.json.decode(body, type=_Refusal).message
    except msgspec.MsgspecError as error:
        raise Unavailable(f"this is not how netmaster answers: {body[:200]!r}") from error
    if status == 403:
        raise Denied(f"netmaster does not let this node join: {told}")
    raise Unavailable(f"netmaster cannot let this node join now: {told}")
