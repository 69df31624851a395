"""This node's client certificate for netmaster: enrolled by a service account token, kept on disk, renewed in time.

Later starts use the certificate on disk, so that a node restarts while netmaster or the API server is unreachable.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from weft.cni.files import place_file
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Denied, Invalid, Unavailable, WeftError
from weft.domain.ids import NodeName
from weft.drivers import RemoteStoreSettings
from weft.ports.orchestrator import Discovery, NetmasterEndpoint
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.ca import new_request, read_end, read_name
from weft.runtime.client_tls import ClientTls
from weft.runtime.http_failover import Servers
from weft.runtime.join_wire import PATH, Joined
from weft.runtime.logs import Log

log = Log("certificate")

# How often the endpoint of netmaster and the age of the certificate are checked.
_CHECK_EVERY_S = 30.0


class NodeCertificate:
    """The files `node.pem` (key and certificate), `ca.pem` and `netmaster.json`, its endpoint.

    The endpoint is written last: without it the other two do not count, so a kill in between does no harm.
    """

    def __init__(self, directory: Path, *, node: NodeName, discovery: Discovery, token: Path) -> None:
        self._node = node
        self._discovery = discovery
        self._token = token
        self._pair, self._ca, self._endpoint = (directory / name for name in ("node.pem", "ca.pem", "netmaster.json"))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def obtain(self, stop: asyncio.Event) -> RemoteStoreSettings | None:
        """The settings of the store connection; the first start waits for netmaster. None when `stop` is set first."""
        # Not a `Backoff`: the pause must end when the agent is stopped.
        pause = 0.1
        while self._enrolled() is None:
            try:
                endpoint = await self._discovery.read()
                if endpoint is None:
                    raise Unavailable("netmaster has not published its endpoint yet")
                await self.enroll(endpoint)
            except WeftError as error:
                log.warning("node not enrolled yet", reason=error.message)
                if await wait_event(stop, within=pause):
                    return None
                pause = min(2 * pause, 5.0)
        netmaster = self._enrolled()
        assert netmaster is not None
        return RemoteStoreSettings(
            endpoints=(netmaster.store,), node=self._node, ca=str(self._ca), cert=str(self._pair)
        )

    async def renew_forever(self) -> None:
        """Renew the certificate whenever it is due; return when the endpoint of netmaster has changed.

        The files have the new endpoint by then, so a restart of the agent connects to it.
        """
        while True:
            # Tests and short-lived certificates need a shorter interval.
            seconds = min(_CHECK_EVERY_S, self._lifetime().total_seconds() / 10)
            await Backoff(first=seconds, cap=seconds).pause()
            try:
                if await self.renew_if_due():
                    return
            except WeftError as error:
                log.warning("certificate renewal failed", reason=error.message)

    async def renew_if_due(self) -> bool:
        """Check once; whether the endpoint of netmaster has changed."""
        enrolled = self._enrolled()
        try:
            endpoint = await self._discovery.read() or enrolled
        except (Unavailable, Denied):
            endpoint = enrolled  # the API server is unreachable; netmaster may be there
        if endpoint is None:
            raise Unavailable(f"{self._endpoint} is gone")
        if endpoint != enrolled:
            await self.enroll(endpoint)
            log.info("netmaster endpoint changed", store=endpoint.store)
            return True
        ends = read_end(self._pair.read_bytes())
        # With a third of its lifetime left there is time for many failed attempts.
        if datetime.now(UTC) > ends - self._lifetime() / 3:
            await self.enroll(endpoint)
            log.info("certificate renewed", ends=read_end(self._pair.read_bytes()).isoformat())
        return False

    def _enrolled(self) -> NetmasterEndpoint | None:
        """The netmaster that has enrolled this node; None if none has, or only under another node name."""
        if not (self._endpoint.is_file() and self._pair.is_file() and self._ca.is_file()):
            return None
        if read_name(self._pair.read_bytes()) != self._node:
            return None
        try:
            return msgspec.json.decode(self._endpoint.read_bytes(), type=NetmasterEndpoint)
        except UNDECODABLE as error:
            raise Invalid(
                f"{self._endpoint} is not readable: remove it, and the node enrolls again: {error}"
            ) from error

    def _lifetime(self) -> timedelta:
        # The file is written when the certificate is issued.
        issued = datetime.fromtimestamp(self._pair.stat().st_mtime, UTC)
        return max(read_end(self._pair.read_bytes()) - issued, timedelta(seconds=1))

    async def enroll(self, endpoint: NetmasterEndpoint) -> None:
        """Request a new certificate, and write it with the endpoint.

        `Denied` when netmaster refuses, or issues it for another node name: nothing changes.
        """
        try:
            token = self._token.read_text().strip()
        except OSError as error:
            raise Unavailable(f"the token {self._token} cannot be read: {error.strerror}") from error
        try:
            tls = ssl.create_default_context(cadata=endpoint.ca)
        except (ssl.SSLError, TypeError, ValueError) as error:  # no certificate, no ASCII, no text at all
            raise Unavailable(f"netmaster's CA certificate is not readable: {error}") from error
        request = new_request(self._node)
        async with Servers([endpoint.join], tls=ClientTls(lambda: tls)) as servers:
            headers = {"Authorization": f"Bearer {token}"}
            joined = await servers.ask(PATH, request.text, headers=headers, parse=_read_answer, repeatable=True)
        certified = read_name(joined.certificate.encode())
        if certified != self._node:
            raise Denied(
                f"the agent's token is that of a pod on node {certified!r}, but this agent is called {self._node!r}: "
                f"start it with --host={certified}, its node's name in Kubernetes"
            )
        for file, content in (
            (self._pair, request.key + joined.certificate.encode()),
            (self._ca, endpoint.ca.encode()),
            (self._endpoint, msgspec.json.encode(endpoint)),
        ):
            place_file(file, content, mode=0o600)


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str = ""


def _read_answer(status: int, body: bytes) -> Joined:
    try:
        if status == 200:
            return msgspec.json.decode(body, type=Joined)
        message = msgspec.json.decode(body, type=_ErrorBody).message
    except UNDECODABLE as error:
        raise Unavailable(f"unexpected answer of netmaster: {body[:200]!r}") from error
    if status == 403:
        raise Denied(f"netmaster refuses to enroll this node: {message}")
    raise Unavailable(f"netmaster cannot enroll this node now: {message}")
