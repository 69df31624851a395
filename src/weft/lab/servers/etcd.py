"""etcd on loopback: one member or several, with or without TLS, to be killed and restarted by tests."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from weft.lab.servers.certificates import Certificate
from weft.lab.servers.processes import Child, free_port
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

# A fifth of the default timeouts: a killed member recovers soon, and leases of one second are possible.
_FAST_ELECTION = ("--heartbeat-interval", "20", "--election-timeout", "200")


class Member:
    """An etcd process and its data directory, which outlives the process."""

    def __init__(self, name: str, directory: Path, *, tls: Certificate | None) -> None:
        self.name = name
        scheme = "http" if tls is None else "https"
        self.endpoint = f"{scheme}://127.0.0.1:{free_port()}"
        self.peer = f"{scheme}://127.0.0.1:{free_port()}"
        # Health checks without TLS and without a client certificate.
        self._metrics = f"http://127.0.0.1:{free_port()}"
        self._log = directory / f"{name}.log"
        self._process: Child | None = None
        self._command = [
            "etcd", "--name", name, "--data-dir", str(directory / name), *_FAST_ELECTION,
            "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer,
            "--listen-metrics-urls", self._metrics, "--log-level", "error",
        ]  # fmt: skip
        if tls is not None:
            files = {"cert-file": tls.cert, "key-file": tls.key, "trusted-ca-file": tls.ca}
            for option, file in files.items():
                self._command += [f"--{option}", str(file), f"--peer-{option}", str(file)]
            self._command += ["--client-cert-auth", "--peer-client-cert-auth"]

    def join(self, members: Sequence[Member], options: Sequence[str]) -> None:
        """Add it to a cluster, before its first start."""
        self._command += ["--initial-cluster", ",".join(f"{each.name}={each.peer}" for each in members), *options]

    def start(self) -> None:
        """Start it, again if it runs."""
        self.kill()
        self._process = Child(self._command, log=self._log)

    def kill(self) -> None:
        """Kill it with SIGKILL; idempotent."""
        if self._process is not None:
            with self._process:
                self._process = None

    async def ready(self) -> None:
        """Return when it is healthy, which includes that it knows a leader."""
        backoff = Backoff(first=0.01, cap=0.05, within=DEADLINE)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while not await self._healthy(session):
                await backoff.pause()

    async def _healthy(self, session: aiohttp.ClientSession) -> bool:
        if self._process is None or not self._process.running:
            raise AssertionError(f"etcd {self.name} has ended:\n{self._log.read_text()[-2000:]}")
        try:
            async with session.get(f"{self._metrics}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class Etcd:
    """A cluster of members."""

    def __init__(self, directory: Path, *, members: int, tls: Certificate | None, options: Sequence[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.members = [Member(f"m{number}", directory, tls=tls) for number in range(members)]
        for member in self.members:
            member.join(self.members, options)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    async def restart(self) -> None:
        """Kill and restart every member; return when all are healthy."""
        for member in self.members:
            member.start()
        await self.ready()

    async def ready(self) -> None:
        for member in self.members:
            await member.ready()


async def enable_authentication(endpoint: str, *, user: str, password: str, tls: ssl.SSLContext | None = None) -> None:
    """Enable authentication; the user gets the root role."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls or True)) as session:
        for path, request in (
            # etcd enables authentication only with a user root that has the role root.
            ("user/add", {"name": "root", "password": password}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": user, "password": password}),
            ("user/grant", {"user": user, "role": "root"}),
            ("enable", {}),
        ):
            async with session.post(f"{endpoint}/v3/auth/{path}", json=request) as answer:
                assert answer.status == 200, await answer.text()


@asynccontextmanager
async def running_etcd(
    directory: Path, *, members: int = 1, tls: Certificate | None = None, options: Sequence[str] = ()
) -> AsyncIterator[Etcd]:
    """Run an etcd cluster inside the block, with its data in the directory."""
    with ExitStack() as ending:
        cluster = Etcd(directory, members=members, tls=tls, options=options)
        # All before any is ready: a single member of a cluster has no quorum.
        for member in cluster.members:
            ending.callback(member.kill)
            member.start()
        await cluster.ready()
        yield cluster
