"""A real kube-apiserver with an etcd of its own: it can be killed and restarted, with users by certificate."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from tests.support.kubernetes.api import Api, open_api

from weft.lab.servers.certificates import Authority, Certificate
from weft.lab.servers.etcd import Etcd, running_etcd
from weft.lab.servers.processes import Child, free_port
from weft.runtime.backoff import Backoff

# Service CIDR; the first address is that of the server itself.
SERVICES = "10.96.0.0/16"

ADMIN = ("admin", "system:masters")

_READY_WITHIN = 90.0
_OWN_NAMES = ("IP:10.96.0.1", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc")


class ApiServer:
    """One kube-apiserver process. Its objects are in etcd and survive it."""

    def __init__(self, directory: Path, *, programs: Path, etcd: Etcd, address: str, controlled: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(directory / "pki")
        self.address = address
        self.etcd = etcd
        self.url = f"https://{address}:{free_port()}"
        self.log = directory / "kube-apiserver.log"
        self._directory = directory
        self._users: dict[tuple[str, ...], Certificate] = {}
        self._child: Child | None = None
        server = self.authority.issue("server", subject="/CN=kube-apiserver", names=(f"IP:{address}", *_OWN_NAMES))
        caller = self.user("kube-apiserver-kubelet-client", "system:masters")
        # The key that signs service account tokens.
        self.service_accounts = self.authority.issue("service-accounts", subject="/CN=service-accounts")
        flags = {
            "etcd-servers": ",".join(etcd.endpoints),
            "bind-address": address,
            "advertise-address": address,
            "secure-port": self.url.rpartition(":")[2],
            "tls-cert-file": server.cert,
            "tls-private-key-file": server.key,
            "client-ca-file": server.ca,
            "authorization-mode": "Node,RBAC",
            "service-cluster-ip-range": SERVICES,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": self.service_accounts.key,
            "service-account-key-file": self.service_accounts.cert,
            "allow-privileged": "true",
            "kubelet-client-certificate": caller.cert,
            "kubelet-client-key": caller.key,
            "kubelet-preferred-address-types": "InternalIP",
        }
        if not controlled:  # without a controller manager nothing creates the default service account that pods need
            flags["disable-admission-plugins"] = "ServiceAccount"
        self._command = [str(programs / "kube-apiserver"), *(f"--{name}={value}" for name, value in flags.items())]

    def user(self, name: str, *groups: str) -> Certificate:
        """A client certificate of a user."""
        key = (name, *groups)
        if key not in self._users:
            subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
            self._users[key] = self.authority.issue(_file_name(key), subject=subject)
        return self._users[key]

    def kubeconfig(self, name: str, *groups: str) -> Path:
        """A kubeconfig of a user."""
        user = self.user(name, *groups)
        path = self._directory / f"{_file_name((name, *groups))}.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority": str(user.ca)}}],
            "users": [{"name": "u", "user": {"client-certificate": str(user.cert), "client-key": str(user.key)}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config))
        return path

    async def start(self) -> None:
        """Start it with whatever etcd has, and return when it serves all of its API."""
        self.kill()
        self._child = Child(self._command, log=self.log)
        backoff = Backoff(first=0.1, cap=0.5, within=_READY_WITHIN)
        async with self.client() as api:
            while not await self._ready(api):
                await backoff.pause()

    def kill(self) -> None:
        """Kill it; a dead one is fine."""
        if self._child is not None:
            with self._child:
                self._child = None

    @asynccontextmanager
    async def client(self, *user: str) -> AsyncIterator[Api]:
        """A client of the server, which may do everything unless it is to be another user (name and groups)."""
        async with open_api(self.url, self.user(*(user or ADMIN))) as api:
            yield api

    async def _ready(self, api: Api) -> bool:
        if self._child is None or not self._child.running:
            raise AssertionError(f"kube-apiserver has ended:\n{self.log.read_text()[-3000:]}")
        try:
            return await api.is_ready()
        except (aiohttp.ClientError, TimeoutError):
            return False


def _file_name(words: tuple[str, ...]) -> str:
    return re.sub("[^a-z0-9]+", "-", "-".join(words).lower())


@asynccontextmanager
async def running_api_server(
    directory: Path, *, programs: Path, address: str = "127.0.0.1", controlled: bool = False
) -> AsyncIterator[ApiServer]:
    """A server that answers at an address of this machine, and is gone with all it kept at the end of the block.

    Unless it is `controlled`, by a controller-manager that the caller starts, pods need no service account.
    """
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(running_etcd(directory / "etcd"))
        server = ApiServer(directory, programs=programs, etcd=etcd, address=address, controlled=controlled)
        stack.callback(server.kill)
        await server.start()
        yield server
