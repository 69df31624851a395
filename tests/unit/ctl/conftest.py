"""An HTTP stub server with given replies that records its requests, and netctl pointed at it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from weft.ctl.netctl.main import run


class ReceivedRequest(NamedTuple):
    """A request that the stub received."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def line(self) -> str:
        return f"{self.method} {self.target}"

    def json(self) -> object:
        value: object = json.loads(self.body)
        return value


class Stub:
    """A server on a free loopback port. It replies 404 to unknown requests, as netmaster does."""

    def __init__(self) -> None:
        self.requests: list[ReceivedRequest] = []
        self._answers: dict[str, tuple[int, bytes, Mapping[str, str]]] = {}
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                request = ReceivedRequest(self.command, self.path, dict(self.headers), self.rfile.read(length))
                stub.requests.append(request)
                missing = json.dumps({"code": "not-found", "message": f"{request.target} does not exist"}).encode()
                status, body, headers = stub._answers.get(request.line, (404, missing, {}))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """The tests' output is not a log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answers(self, line: str, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Reply to this request (`GET /path?query`) with a JSON body, or with bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._answers[line] = (status, raw, headers or {})


class CommandResult(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[list[str]]:
        """The words of each line of output."""
        return [line.split() for line in self.out.splitlines()]


class Netctl(Protocol):
    """Runs netctl in this process, pointed at the stub, with a home directory of its own."""

    def __call__(self, *words: str, environment: Mapping[str, str] | None = None) -> CommandResult: ...


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    thread = threading.Thread(target=stub.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield stub
    stub.server.shutdown()
    thread.join()
    stub.server.server_close()


@pytest.fixture
def netctl(stub: Stub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Netctl:
    def call(*words: str, environment: Mapping[str, str] | None = None) -> CommandResult:
        given = {"NETMASTER": stub.url, "HOME": str(tmp_path), **(environment or {})}
        try:
            code = run(words, environment=given)
        except SystemExit as leaving:
            assert isinstance(leaving.code, int)
            code = leaving.code
        captured = capfd.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return call
