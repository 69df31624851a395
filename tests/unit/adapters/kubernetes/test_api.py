"""The API client: credentials that rotate, failover between servers, and errors by status."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.kube_script import Scripted

from weft.adapters.kubernetes.api import Api
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.cni.files import place_file
from weft.domain.errors import Compacted, Conflict, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.runtime import http_failover
from weft.runtime.http import serving
from weft.runtime.server_tls import server_tls


async def test_a_replaced_token_is_reloaded(server: Scripted, client_config: ClientConfig, tmp_path: Path) -> None:
    """Service account tokens live for an hour: an agent with an expired one would fail forever."""
    file = tmp_path / "token"
    file.write_text("first\n")
    server.objects["/x"] = {}
    async with Api(replace(client_config, token=file)) as api:
        await api.get("/x")
        file.write_text("second\n")
        await api.get("/x")
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_token_that_rotates_during_a_request_is_retried_once(
    server: Scripted, client_config: ClientConfig, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old")

    def accepts(token: str) -> bool:
        file.write_text("new")
        return token == "Bearer new"

    server.accepts = accepts
    server.objects["/x"] = {}
    async with Api(replace(client_config, token=file)) as api:
        await api.get("/x")
    assert server.tokens == ["Bearer old", "Bearer new"]


async def test_a_dead_server_causes_failover(server: Scripted, client_config: ClientConfig) -> None:
    server.objects["/x"] = {}
    dead = f"http://127.0.0.1:{free_port()}"
    async with Api(replace(client_config, servers=(dead, server.url))) as api:
        assert await api.get("/x") == b"{}"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(400, Invalid), (401, Denied), (403, Denied), (404, NotFound), (409, Conflict), (410, Compacted), (422, Invalid)],
)
async def test_statuses_map_to_errors(
    server: Scripted, client_config: ClientConfig, code: int, kind: type[WeftError]
) -> None:
    server.lists["/x"] = [code]
    async with Api(client_config) as api:
        with pytest.raises(kind, match=str(code)):
            await api.get("/x")


async def test_a_failing_server_is_retried_until_the_deadline(
    server: Scripted, client_config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 0.3)
    server.lists["/x"] = [500]
    async with Api(client_config) as api:
        with pytest.raises(Unavailable):
            await api.get("/x")
    assert len(server.requests) > 1


async def test_a_replaced_ca_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server gets a certificate of a new CA, and then the CA file is replaced."""
    monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 0.2)
    old, new = (Authority(tmp_path / name).issue("server", subject="/CN=kube") for name in ("old", "new"))
    ca = tmp_path / "ca.crt"
    place_file(ca, old.ca.read_bytes(), mode=0o600)
    address = ("127.0.0.1", free_port())
    app = web.Application()
    app.router.add_get("/", answer)
    async with Api(ClientConfig(servers=(f"https://127.0.0.1:{address[1]}",), ca=ca)) as api:
        async with serving(app, (address,), tls=server_tls(old.cert, old.key)):
            assert await api.get("/") == b"{}"
        async with serving(app, (address,), tls=server_tls(new.cert, new.key)):
            with pytest.raises(Unavailable):
                await api.get("/")
            place_file(ca, new.ca.read_bytes(), mode=0o600)
            assert await api.get("/") == b"{}"


async def answer(_: web.Request) -> web.Response:
    return web.json_response({})


async def test_a_missing_token_is_reported(client_config: ClientConfig, tmp_path: Path) -> None:
    async with Api(replace(client_config, token=tmp_path / "none")) as api:
        with pytest.raises(Unavailable, match="token"):
            await api.get("/x")


def test_a_client_certificate_is_not_ignored_over_plain_http(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("client", subject="/CN=weft")
    config = ClientConfig(servers=("http://127.0.0.1:8080",), cert=issued.cert, key=issued.key)
    with pytest.raises(Invalid, match="certificate would not be used"):
        Api(config)
