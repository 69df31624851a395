"""netmaster for tests, in this process with a memory store or as the real program, and a REST client.

Both listen on a free loopback port and are ready when the block begins. `running_master` creates no `default-net` by
default, so that a test's first network gets the first VNI.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from weft.domain import kinds
from weft.drivers import MemoryStoreSettings, open_store
from weft.lab.servers.certificates import Certificate
from weft.lab.servers.processes import Child, free_port
from weft.lab.waiting import DEADLINE, until
from weft.master.main import Netmaster
from weft.master.settings import format_host_port, read_master_settings
from weft.ports.store import Store
from weft.runtime.backoff import Backoff
from weft.runtime.tasks import background

API = "/api/v1"


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply of netmaster; `body` is the decoded JSON, or the text of another content type."""

    status: int
    body: Any
    headers: Mapping[str, str]

    def accepted(self) -> Any:
        """The body of a request that must have succeeded."""
        assert self.status == 200, f"{self.status}: {self.body}"
        return self.body

    def refused(self, status: int, *, field: str | None = None) -> str:
        """The message of an error, which must have this status, our four members and, if given, this field."""
        assert self.status == status, f"{self.status}: {self.body}"
        assert set(self.body) == {"code", "message", "field", "details"}
        assert field is None or self.body["field"] == field, self.body
        assert self.body["message"]
        assert "Traceback" not in self.body["message"]
        return str(self.body["message"])

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


class Rest:
    """A client of one netmaster. Objects are identified by their REST plural and their colon-joined key."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def send(
        self, method: str, path: str, *, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send any request; the path is not encoded again."""
        body = None if data is None else BytesIO(data)
        # encoded=True: tests send malformed paths on purpose.
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=body, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            answer = msgspec.json.decode(raw) if is_json else raw.decode()
            return Answer(response.status, answer, response.headers.copy())

    async def put(self, plural: str, /, **members: object) -> Answer:
        """Create or change an object; its key follows from its members."""
        key = ":".join(str(members[name]) for name in kinds.BY_PLURAL[plural].key_members())
        return await self.put_at(plural, key, members)

    async def put_at(
        self, plural: str, key: str, members: Mapping[str, object], *, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Create or change the object with this key, whatever its members say."""
        path = f"{API}/{plural}/{key}/"
        return await self.send("PUT", path, data=msgspec.json.encode(members), headers=_json(headers))

    async def get(self, plural: str, key: str = "", *, query: str = "") -> Answer:
        """One object, or all of a kind."""
        return await self.send("GET", f"{API}/{plural}/{key}{'/' if key else ''}{'?' if query else ''}{query}")

    async def inspect(self, plural: str, key: str) -> Answer:
        return await self.send("GET", f"{API}/inspect/{plural}/{key}/")

    async def oper(self, plural: str, key: str) -> dict[str, Any]:
        """The operational state of an object that must exist."""
        oper: dict[str, Any] = (await self.inspect(plural, key)).accepted()["Oper"]
        return oper

    async def delete(self, plural: str, key: str, *, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.send("DELETE", f"{API}/{plural}/{key}/", headers=headers)

    async def post(self, path: str, body: object) -> Answer:
        """POST JSON, such as a plugin's call."""
        return await self.send("POST", path, data=msgspec.json.encode(body), headers=_json(None))

    async def create_endpoint(
        self, name: str, *, network: str, tenant: str = "default", group: str = "", address: str = "", host: str = ""
    ) -> Answer:
        """Attach an endpoint as a plugin does."""
        call = {"TenantName": tenant, "NetworkName": network, "EndpointID": name, "ServiceName": group}
        return await self.post("/plugin/createEndpoint", call | {"ConfigEP": {"IPAddress": address, "Host": host}})

    async def delete_endpoint(self, name: str, *, network: str, tenant: str = "default") -> Answer:
        """Detach an endpoint as a plugin does."""
        call = {"TenantName": tenant, "NetworkName": network, "EndpointID": name}
        return await self.post("/plugin/deleteEndpoint", call)

    async def state(self) -> dict[str, Any]:
        """All entries of the store by key: equal before and after a request that writes nothing."""
        entries: dict[str, Any] = (await self.send("GET", f"{API}/backup")).accepted()["entries"]
        return entries

    async def ready(self) -> None:
        """Return when requests are served; `TimeoutError` when that takes too long."""
        await self._until_well("/readyz")

    async def alive(self) -> None:
        """Return when it listens, whether or not it can serve requests yet."""
        await self._until_well("/healthz")

    async def _until_well(self, path: str) -> None:
        backoff = Backoff(first=0.002, cap=0.1, within=DEADLINE)
        while True:
            try:
                if (await self.send("GET", path)).status == 200:
                    return
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await backoff.pause()


async def retry_until_answered(send: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a request again until its reply is definite: neither 503 nor a lost connection."""
    backoff = Backoff(first=0.01, cap=0.2, within=2 * DEADLINE)
    while True:
        try:
            answer = await send()
            # 503 without our error members is a bug, not a reason to retry.
            if answer.status != 503:
                return answer
            answer.refused(503)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            pass  # netmaster was killed, before or during its reply
        await backoff.pause()


def _json(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {"Content-Type": "application/json", **(headers or {})}


@asynccontextmanager
async def client(url: str, *, ca: Path | None = None, token: str = "") -> AsyncIterator[Rest]:
    """A client with a deadline for each request, a bearer token if given, and the CA to trust with TLS."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    connector = aiohttp.TCPConnector(ssl=True if ca is None else ssl.create_default_context(cafile=str(ca)))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        yield Rest(url, session)


@asynccontextmanager
async def running_master(*flags: str, store: Store | None = None, ready: bool = True) -> AsyncIterator[Rest]:
    """Run netmaster in this process and event loop, by default with an empty memory store.

    The block begins when it is ready or, with `ready=False`, when it listens.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="netmaster-"))
        # A socket cannot be bound to port 0 here: the address must be known before the server listens.
        own = ("--external-address", f"127.0.0.1:{free_port()}", "--default-subnet", "none", "--data-dir", folder)
        settings = read_master_settings([*own, *flags], {})
        address = format_host_port(settings.external)
        if store is None:
            store = await stack.enter_async_context(open_store(MemoryStoreSettings()))
        rest = await stack.enter_async_context(client(f"http://{address}"))
        # In this process, so that a test can look into the store and a debugger into netmaster.
        netmaster = Netmaster(settings, store)
        await stack.enter_async_context(background(netmaster.run(asyncio.Event()), name=f"netmaster {address}"))
        await (rest.ready() if ready else rest.alive())
        yield rest


class MasterProcess:
    """netmaster as a child process, by default with the embedded store; killed at the end of the block.

    With a certificate it serves TLS.
    """

    def __init__(self, directory: Path, *flags: str, tls: Certificate | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.address = f"127.0.0.1:{free_port()}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"
        self.data = directory / "data"
        self.log = directory / "netmaster.log"
        self._ca = tls.ca if tls else None
        # The lab's masters all run here, on ports of loopback.
        own = ("--external-address", self.address, "--data-dir", str(self.data), "--single-machine")
        files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca)) if tls else ()
        self._flags = (*own, *files, *flags)
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self, *flags: str, alive: bool = False) -> None:
        """Start it with the state on disk, and return when it is ready. The flags are kept for later starts.

        With `alive` return when it listens: it is not ready while documents of its store cannot be read.
        """
        self.kill()
        self._flags = (*self._flags, *flags)
        self._child = Child.python("weft.master.main", *self._flags, log=self.log)
        async with client(self.url, ca=self._ca) as rest:
            await (rest.alive() if alive else rest.ready())

    def pause(self) -> None:
        """Stop its execution (SIGSTOP) until `resume`, as an overloaded machine would."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def end(self) -> int:
        """Terminate it (SIGTERM) as systemd does, and return its exit code."""
        child = self._child
        assert child is not None
        os.kill(child.pid, signal.SIGTERM)
        await until(lambda: not child.running)
        assert child.exit_code is not None
        return child.exit_code

    def kill(self) -> None:
        """Kill it with SIGKILL; idempotent."""
        if self._child is not None:
            with self._child:
                self._child = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
