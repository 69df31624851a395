"""Attacks on a running lab: garbage in the store, hostile Kubernetes objects, idle connections, costly policies."""

from __future__ import annotations

import asyncio
import base64
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from ipaddress import ip_network
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import aiohttp
from tests.support.fuzz.mutations import Form, Mutator
from tests.support.fuzz.store_targets import stored_samples
from tests.support.kubernetes.kubeletless_cluster import POLICIES, SERVICES, SLICES

from weft.kernel.netns import Namespace
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE

_ROOT = b"/weft/"
# Keys that make no object of their own: garbage in them is the attack on the whole store, and is taken back.
_SINGLETONS = frozenset({"leader", "restore", "format"})
_HOSTILE_TEXTS = ("garbage", "", "999.1.1.1", "10.0.0.1/99", "::ffff:0:0:0:1", "\u202e", "x" * 300, "../..", "-1")


def garbage(rng: Random) -> Iterator[tuple[bytes, bytes]]:
    """Keys with values that nobody can use: of every class, valid keys with broken documents and broken keys."""
    samples = {key: value for key, value in stored_samples().items() if key not in _SINGLETONS}
    trees = [value for value in samples.values() if value[:1] == b"{"]
    documents = Mutator(trees, form=Form.JSON)
    while True:
        for key, value in samples.items():
            folder, *parts = key.split("/")
            # Names of our own: what the lab itself stores stays as it is.
            own = "/".join((folder, *(f"zz{rng.randrange(50)}-{part}" if part.isalnum() else part for part in parts)))
            data = value
            for name in parts:
                if f'"{name}"'.encode() in value and rng.random() < 0.8:
                    # The document under its own key: what is wrong with it is inside.
                    data = data.replace(f'"{name}"'.encode(), f'"{own.split("/")[1 + parts.index(name)]}"'.encode())
            choice = rng.randrange(5)
            if choice == 0:
                yield own.encode(), documents.input(rng)
            elif choice == 1:
                yield own.encode(), _with_hostile_text(rng, data)
            elif choice == 2:
                yield own.encode(), rng.randbytes(rng.randrange(200))
            elif choice == 3:
                yield own.encode() + rng.choice((b"/", b"/extra/parts", b"\xff\xfe", b"//", b" ", b"\0")), data
            else:
                yield Mutator([own.encode()]).input(rng)[:300] or b"x", data


def _with_hostile_text(rng: Random, document: bytes) -> bytes:
    """The document with another value in place of one of its texts."""
    texts = document.split(b'"')
    at = rng.randrange(1, max(2, len(texts) - 1)) | 1
    if at < len(texts):
        texts[at] = rng.choice(_HOSTILE_TEXTS).encode()
    return b'"'.join(texts)


class StoreVandal:
    """Writes garbage to the store of a lab behind the back of all its processes."""

    def __init__(self, lab: NetLab, *, seed: int) -> None:
        self._lab = lab
        self._garbage = garbage(Random(seed))
        self.writes = 0

    async def attack(self, count: int) -> None:
        """Write so many values. With the embedded store netmaster is restarted: only then it reads the file again."""
        entries = [next(self._garbage) for _ in range(count)]
        if self._lab.etcd is not None:
            await _write_etcd(self._lab.etcd.endpoints[0], entries)
        else:
            self._lab.master.kill()
            await asyncio.to_thread(_write_sqlite, self._lab.master.data, entries)
            await self._lab.master.start(alive=True)
        self.writes += count


async def _write_etcd(endpoint: str, entries: list[tuple[bytes, bytes]]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session:
        for key, value in entries:
            body = {"key": base64.b64encode(_ROOT + key).decode(), "value": base64.b64encode(value).decode()}
            async with session.post(f"{endpoint}/v3/kv/put", json=body) as answer:
                assert answer.status == 200, await answer.text()


def _write_sqlite(directory: Path, entries: list[tuple[bytes, bytes]]) -> None:
    """Into the file of a netmaster that does not run: text where bytes belong, too."""
    (file,) = [each for each in directory.glob("*") if each.read_bytes()[:6] == b"SQLite"]
    with closing(sqlite3.connect(file)) as sql, sql:
        (revision,) = sql.execute("SELECT max(revision) FROM log").fetchone()
        for number, (key, value) in enumerate(entries):
            stored: Any = (value, value.decode(errors="replace"), None if number % 7 else 5)[number % 3]
            row = (key.decode(errors="replace"), revision, None, value if stored is None else stored)
            sql.execute("INSERT OR REPLACE INTO entries (key, revision, lease, value) VALUES (?, ?, ?, ?)", row)


class IdleConnections:
    """Many connections that send nothing, to listeners in namespaces, while the block runs.

    A server may close them: that is a good defence. They are opened again by `refill`.
    """

    def __init__(self, listeners: list[tuple[Namespace, tuple[str, int] | Path]], *, count: int) -> None:
        self._listeners = listeners
        self._count = count
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        self.refill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._open:
            each.close()

    def refill(self) -> None:
        """Open connections until there are as many as wanted, or a listener takes no more."""
        for each in self._open:
            if _is_closed(each):
                each.close()
        self._open = [each for each in self._open if each.fileno() >= 0]
        share = max(1, self._count // len(self._listeners))
        for namespace, address in self._listeners:
            for _ in range(min(share, self._count - len(self._open))):
                family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
                idle = namespace.open_socket(family, socket.SOCK_STREAM, 0)
                idle.setblocking(False)
                # In progress, or refused: either is fine, and nobody waits for it.
                if idle.connect_ex(str(address) if isinstance(address, Path) else address) not in (0, 11, 115):
                    idle.close()
                    break
                self._open.append(idle)

    @property
    def count(self) -> int:
        return len(self._open)


def _is_closed(idle: socket.socket) -> bool:
    try:
        return idle.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def overlapping_rules(count: int) -> list[dict[str, Any]]:
    """Ingress rules of a NetworkPolicy whose blocks and port ranges overlap in all ways; no pod is in the blocks."""
    return [
        {
            "from": [{"ipBlock": {"cidr": str(ip_network(f"{20 + n % 3}.{n % 256}.0.0/{8 + n % 9}", strict=False))}}],
            "ports": [{"protocol": ("TCP", "UDP")[n % 2], "port": 1 + n, "endPort": 60_000 - 7 * n}],
        }
        for n in range(count)
    ]


def hostile_objects() -> list[tuple[str, dict[str, Any]]]:
    """Objects that the API server accepts and that were hard on somebody: path of the list, and document."""
    label, name = "x" * 63, ".".join(["y" * 60] * 4)

    def service(number: int, **spec: Any) -> tuple[str, dict[str, Any]]:
        return SERVICES, {"metadata": {"name": f"hostile-{number}"}, "spec": spec}

    def policy(number: int, **spec: Any) -> tuple[str, dict[str, Any]]:
        return POLICIES, {"metadata": {"name": f"hostile-{number}"}, "spec": spec}

    other = {"podSelector": {"matchLabels": {"app": "nobody"}}}
    return [
        service(1, ports=[{"name": "p" * 63, "port": 80}], clusterIP="None"),
        service(2, type="ExternalName", externalName=f"{label}.{label}.example.org"),
        service(3, type="ExternalName", externalName="hostile-3.lab.svc.cluster.local"),
        service(4, ports=[{"name": f"p{port}", "port": port} for port in range(1, 250)]),
        service(
            5,
            ports=[{"port": 80}],
            externalIPs=["192.0.2.254"],
            loadBalancerSourceRanges=["0.0.0.0/0"],
            type="LoadBalancer",
        ),
        (
            SERVICES,
            {
                "metadata": {"name": "hostile-6", "annotations": {"weft/shared": "true"}},
                "spec": {"ports": [{"port": 53, "protocol": "UDP"}]},
            },
        ),
        (POLICIES, {"metadata": {"name": name}, "spec": {**other, "policyTypes": ["Ingress"]}}),
        policy(
            7, **other, ingress=[{"from": [{"ipBlock": {"cidr": f"10.{n >> 8}.{n & 255}.0/24"}} for n in range(2_000)]}]
        ),
        policy(8, **other, egress=[{"ports": [{"port": "no-such-port"}]}, {}], policyTypes=["Egress"]),
        policy(
            9,
            podSelector={
                "matchExpressions": [{"key": f"k{n}", "operator": "NotIn", "values": ["v"]} for n in range(200)],
                "matchLabels": {"app": "nobody"},
            },
        ),
        (
            SLICES,
            {
                "metadata": {"name": "hostile-slice", "labels": {"kubernetes.io/service-name": "hostile-4"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}"]} for n in range(1, 900)],
                "ports": [{"name": "p1", "port": 1}],
            },
        ),
        (
            SLICES,
            {
                "metadata": {"name": "hostile-fqdn", "labels": {"kubernetes.io/service-name": "hostile-1"}},
                "addressType": "FQDN",
                "endpoints": [{"addresses": [f"{label}.example.org"]}],
                "ports": [],
            },
        ),
        (
            "/api/v1/namespaces",
            {
                "metadata": {
                    "name": "hostile",
                    "labels": {"io.contiv.tenant": "no-such-tenant", "io.contiv.network": "none"},
                }
            },
        ),
    ]
