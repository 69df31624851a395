"""netmaster with TLS and a token: authentication, file permissions, and malformed requests."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from weft.lab.servers.certificates import Authority, Certificate
from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.masters import API, MasterProcess, client
from weft.lab.waiting import soon

TOKEN = "a-token-that-is-hard-to-guess"


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Authority(tmp_path / "ca").issue("master", subject="/CN=netmaster")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
async def master(tmp_path: Path, certificate: Certificate, token_file: Path) -> AsyncIterator[MasterProcess]:
    """The program with TLS and a token, at its most talkative."""
    flags = ("--token-file", str(token_file), "--log-level", "DEBUG")
    async with MasterProcess(tmp_path / "master", *flags, tls=certificate) as master:
        yield master


async def test_w2_only_the_token_grants_access(master: MasterProcess, certificate: Certificate) -> None:
    """W2: 401 without the token or with another, health for all; the token and its guesses are in no log."""
    guess = "a-token-that-somebody-guesses"
    async with (
        client(master.url, ca=certificate.ca) as anonymous,
        client(master.url, ca=certificate.ca, token=guess) as guesser,
        client(master.url, ca=certificate.ca, token=TOKEN) as friend,
    ):
        for rest in (anonymous, guesser):
            (await rest.put("tenants", tenantName="t1")).refused(401)
            for path in (f"{API}/tenants/", f"{API}/backup", "/metrics", "/info", "/version", "/openapi.json", "/none"):
                (await rest.send("GET", path)).refused(401)
            for path in ("/healthz", "/readyz"):
                (await rest.send("GET", path)).accepted()
        (await friend.put("tenants", tenantName="t2")).accepted()
        assert [each["key"] for each in (await friend.get("tenants")).accepted()] == ["default", "t2"]
    log = master.log.read_text()
    assert TOKEN not in log
    assert guess not in log


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
async def test_only_modern_tls_is_accepted(master: MasterProcess, certificate: Certificate) -> None:
    host, _, port = master.address.partition(":")
    for version, spoken in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        context = ssl.create_default_context(cafile=str(certificate.ca))
        context.set_ciphers("ALL:@SECLEVEL=0")  # what an old client would offer
        context.minimum_version = context.maximum_version = version
        try:
            _, writer = await soon(asyncio.open_connection(host, int(port), ssl=context))
        except (ssl.SSLError, ConnectionError):
            assert not spoken, version
        else:
            writer.close()
            assert spoken, version
    async with client(f"http://{master.address}", token=TOKEN) as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get("tenants")


async def test_files_are_readable_by_their_own_user_only(master: MasterProcess) -> None:
    def modes() -> Iterator[tuple[str, int]]:
        for path in sorted(master.data.iterdir()):
            yield path.name, stat.S_IMODE(path.stat().st_mode)

    assert stat.S_IMODE(master.data.stat().st_mode) == 0o700
    found = dict(modes())
    assert {"weft.db", "store.sock"} <= found.keys()
    assert found == dict.fromkeys(found, 0o600)


async def test_masters_forward_to_each_other_by_tls(tmp_path: Path, certificate: Certificate, token_file: Path) -> None:
    """The caller's token goes with the request; a master of another authority is not trusted."""
    other = Authority(tmp_path / "other")
    async with running_etcd(tmp_path / "etcd") as etcd, AsyncExitStack() as stack:
        flags = ("--etcd-endpoints", etcd.endpoints[0], "--token-file", str(token_file), "--leader-ttl", "60")
        leader = await stack.enter_async_context(MasterProcess(tmp_path / "leader", *flags, tls=certificate))
        follower = await stack.enter_async_context(MasterProcess(tmp_path / "follower", *flags, tls=certificate))
        async with client(follower.url, ca=certificate.ca, token=TOKEN) as rest:
            assert (await rest.send("GET", "/info")).accepted()["leader-ip"] == leader.address
            (await rest.put("tenants", tenantName="t1")).accepted()
        async with client(leader.url, ca=certificate.ca, token=TOKEN) as rest:
            (await rest.get("tenants", "t1")).accepted()
        async with client(follower.url, ca=certificate.ca) as rest:
            (await rest.get("tenants")).refused(401)
        distrustful = MasterProcess(tmp_path / "distrustful", *flags, "--tls-ca", str(other.ca), tls=certificate)
        await stack.enter_async_context(distrustful)
        async with client(distrustful.url, ca=certificate.ca, token=TOKEN) as rest:
            assert "certificate" in (await rest.get("tenants")).refused(503).lower()


_HEAD = b"POST /plugin/createEndpoint HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

ODD = {
    "no HTTP at all": b"\x16\x03\x01\x00\xff\x00\x00\r\n\r\n",
    "a chunk without a size": _HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
    "a chunk of negative size": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "a chunk of endless size": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
    "two lengths": _HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length and chunks": _HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length that is no number": _HEAD + b"Content-Length: two\r\n\r\n{}",
    "a huge header": b"GET /version HTTP/1.1\r\nHost: x\r\nX-Huge: " + b"a" * 300_000 + b"\r\n\r\n",
    "very many headers": b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 40_000 + b"\r\n",
    "a huge path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in a header": b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-secret\x00b\r\n\r\n",
    "NUL in the path": b"GET /api/v1/tenants/a\x00b/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in the path, escaped": b"GET /api/v1/tenants/a%00b/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "NUL in the body": _HEAD + b'Connection: close\r\nContent-Length: 22\r\n\r\n{"TenantName": "a\x00bc"}',
    "a path that is no UTF-8": b"GET /api/v1/tenants/%ff%fe/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a false escape": b"GET /api/v1/tenants/%zz/?limit=%f HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "a whole URL": b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a packed body that is not packed": _HEAD
    + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "deep nesting": _HEAD + b"Connection: close\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
}


BROKEN_OFF = (
    b"GET /version HTTP/1.1\r\nHost:",
    _HEAD + b"Content-Length: 1000\r\n\r\n{",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
)


async def test_malformed_requests_are_survived(tmp_path: Path) -> None:
    """Each is refused, in no trace and without its words in the log, and the next caller is served as ever."""
    async with MasterProcess(tmp_path) as master, client(master.url) as rest:
        before = await rest.state()
        host, _, port = master.address.partition(":")
        for name, request in ODD.items():
            reader, writer = await soon(asyncio.open_connection(host, int(port)))
            try:
                writer.write(request)
                answer = await soon(reader.read())
            except ConnectionResetError:
                answer = b""  # it hung up while there was still more to read
            finally:
                writer.transport.abort()
            assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), f"{name}: {answer[:400]!r}"
            (await rest.send("GET", "/readyz")).accepted()
        for request in BROKEN_OFF:
            _, writer = await soon(asyncio.open_connection(host, int(port)))
            writer.write(request)
            await soon(writer.drain())
            writer.close()
            await soon(writer.wait_closed())
            (await rest.send("GET", "/readyz")).accepted()
        assert await rest.state() == before
        log = master.log.read_text()
        assert "Traceback" not in log
        assert "a-secret" not in log
