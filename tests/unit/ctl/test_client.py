"""netctl's REST client: addresses, tokens, TLS, and error messages that say what to do."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.ctl.client import Client, Connection
from weft.ctl.failures import Usage

if TYPE_CHECKING:
    from tests.unit.ctl.conftest import Netctl, Stub

TENANTS = "GET /api/v1/tenants/?limit=1000"


@pytest.mark.parametrize("verb", ["rm", "inspect", "create"])
def test_an_unreachable_netmaster(netctl: Netctl, verb: str) -> None:
    """W13: the original panicked when a delete met a connection error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = netctl("--netmaster", f"http://127.0.0.1:{port}", "tenant", verb, "t1")
    assert result.code == 2
    assert result.err == (
        f"netctl: cannot reach netmaster at http://127.0.0.1:{port}: Connection refused; "
        "is it running? set --netmaster or NETMASTER\n"
    )


def test_an_unknown_host_name(netctl: Netctl) -> None:
    result = netctl("--netmaster", "http://no-such-host.invalid:9999", "tenant", "ls")
    assert result.code == 2
    assert "unknown host name" in result.err


def test_a_netmaster_that_does_not_reply(netctl: Netctl) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = netctl("--netmaster", url, "--timeout", "0.2", "tenant", "ls")
    assert result.code == 2
    assert "within 0.2 s" in result.err
    assert "--timeout" in result.err


@pytest.mark.parametrize(
    "url",
    ["", "netmaster:9999", "ftp://h", "http://", "http://h:99999", "http://h:0", "http://a b", "http://h/\r\nX: 1"],
)
def test_an_invalid_address_is_a_usage_error(url: str) -> None:
    with pytest.raises(Usage, match="--netmaster"):
        Client(Connection(url=url), environment={})


def test_an_address_may_have_a_path(netctl: Netctl, stub: Stub) -> None:
    stub.answers("GET /weft/api/v1/tenants/?limit=1000", [])
    assert netctl("--netmaster", f"{stub.url}/weft/", "tenant", "ls").code == 0


def test_an_error_is_printed_in_one_line(netctl: Netctl, stub: Stub) -> None:
    error = {"code": "conflict", "message": "tenant t1 has networks", "field": "", "details": {}}
    stub.answers("DELETE /api/v1/tenants/t1/?report=1", error, status=409)
    result = netctl("tenant", "rm", "t1")
    assert (result.code, result.out, result.err) == (3, "", "netctl: tenant t1 has networks\n")


def test_an_error_names_the_field_unless_its_message_does(netctl: Netctl, stub: Stub) -> None:
    line = "PATCH /api/v1/networks/default:blue/?report=1&refuse-opening=1"
    words = ("network", "create", "blue", "--subnet", "10.1.1.0/33")
    stub.answers(line, {"code": "invalid", "message": "33 is too long", "field": "subnet"}, status=422)
    assert netctl(*words).err == "netctl: 33 is too long (field subnet)\n"
    stub.answers(line, {"code": "invalid", "message": "subnet is too long", "field": "subnet"}, status=422)
    assert netctl(*words).err == "netctl: subnet is too long\n"


@pytest.mark.parametrize("body", [b"<html>\n<b>Bad\x1b[31m gateway</b>", b"[]", b'"x"', b"{}", b"null", b""])
def test_an_error_of_another_server_is_quoted(netctl: Netctl, stub: Stub, body: bytes) -> None:
    stub.answers(TENANTS, body, status=502)
    result = netctl("tenant", "ls")
    assert result.code == 3
    assert result.err.startswith("netctl: the server replied 502 Bad Gateway")
    assert "\x1b" not in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("body", [b"hello", b'{"a": 1}', b'["a"]', b"\xff"])
def test_a_reply_that_is_not_from_netmaster(netctl: Netctl, stub: Stub, body: bytes) -> None:
    stub.answers(TENANTS, body)
    result = netctl("tenant", "ls")
    assert result.code == 3
    assert "is it a netmaster?" in result.err or "is this a netmaster?" in result.err


def test_a_token_is_sent_to_loopback(netctl: Netctl, stub: Stub) -> None:
    stub.answers(TENANTS, [])
    assert netctl("tenant", "ls", environment={"NETCTL_TOKEN": "secret"}).code == 0
    assert stub.requests[0].headers["Authorization"] == "Bearer secret"
    assert netctl("tenant", "ls").code == 0
    assert "Authorization" not in stub.requests[1].headers


def test_a_missing_token_is_explained(netctl: Netctl, stub: Stub) -> None:
    stub.answers(TENANTS, {"code": "denied", "message": "who are you?"}, status=401)
    result = netctl("tenant", "ls")
    assert result.code == 3
    assert "NETCTL_TOKEN" in result.err


def test_a_token_is_never_sent_in_clear_text_to_another_machine(
    netctl: Netctl, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to loopback still counts as another machine."""
    connect = socket.create_connection
    monkeypatch.setattr(
        "socket.create_connection",
        lambda address, timeout, *_: connect(("127.0.0.1", address[1]), timeout=timeout),
    )
    stub.answers(TENANTS, {"code": "denied", "message": "who are you?"}, status=401)
    url = stub.url.replace("127.0.0.1", "netmaster.example")
    result = netctl("--netmaster", url, "tenant", "ls", environment={"NETCTL_TOKEN": "secret"})
    assert "Authorization" not in stub.requests[0].headers
    assert "only over https" in result.err


@pytest.fixture
def secure(stub: Stub, tmp_path: Path) -> Iterator[str]:
    """The stub behind TLS, with a certificate of its own; yields its URL."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=netmaster", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    stub.server.socket = context.wrap_socket(stub.server.socket, server_side=True)
    stub.answers(TENANTS, [])
    yield stub.url.replace("http:", "https:")


def test_tls_with_a_given_ca(netctl: Netctl, stub: Stub, secure: str, tmp_path: Path) -> None:
    words = ("--netmaster", secure, "--cacert", str(tmp_path / "cert.pem"), "tenant", "ls")
    assert netctl(*words, environment={"NETCTL_TOKEN": "secret"}).code == 0
    assert stub.requests[0].headers["Authorization"] == "Bearer secret"


def test_tls_without_verification_needs_insecure(netctl: Netctl, stub: Stub, secure: str) -> None:
    result = netctl("--netmaster", secure, "tenant", "ls")
    assert result.code == 2
    assert "--cacert FILE" in result.err
    assert not stub.requests
    assert netctl("--netmaster", secure, "--insecure", "tenant", "ls").code == 0


def test_tls_with_a_missing_ca_file(netctl: Netctl, secure: str, tmp_path: Path) -> None:
    result = netctl("--netmaster", secure, "--cacert", str(tmp_path / "none"), "tenant", "ls")
    assert result.code == 4
    assert "--cacert" in result.err


def test_https_to_a_plain_port_is_reported(netctl: Netctl, stub: Stub) -> None:
    result = netctl("--netmaster", stub.url.replace("http:", "https:"), "tenant", "ls")
    assert result.code == 2
    assert "cannot reach netmaster" in result.err


def test_a_closed_output_is_an_io_error(stub: Stub) -> None:
    """Exit code 4, one line, and no second error of the interpreter."""
    stub.answers(TENANTS, [{"tenantName": "t1"}])
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "weft.ctl.netctl.main", "--netmaster", stub.url, "tenant", "ls"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.returncode == 4
    assert done.stderr == "netctl: cannot write the output: Broken pipe\n"


def test_nothing_slow_is_imported() -> None:
    """The budget of 100 ms of CPU is kept by leaving these out of the ordinary path."""
    heavy = {"http.client", "ssl", "asyncio", "aiohttp", "msgspec", "rich", "dataclasses", "pathlib", "shutil"}
    code = "import sys; before = {*sys.modules}; import weft.ctl.netctl.main; print(*({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    imported = done.stdout.split()
    assert "weft.ctl.netctl.main" in imported
    assert not heavy.intersection(imported)
