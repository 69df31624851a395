"""A double of the agent's socket and an installed shim, for tests between runtime and agent.

The double uses the wire protocol and parses requests as the agent does, but has no network behind it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from weft.cni import wire
from weft.cni.errors import CniError, Code
from weft.cni.install import PROGRAM, install
from weft.cni.request import Add, AttachmentId, Check, Del, Gc, Status, parse_request
from weft.cni.result import Address, Interface, Result, Route, encode_result
from weft.cni.versions import answer_version
from weft.lab.servers.processes import DEADLINE

# A short deadline.
SHORT_DEADLINE_MS = 1_000

CONFIG = {"cniVersion": "1.0.0", "name": "blue", "type": PROGRAM}

_LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z pid=\d+ command=(?P<command>\S+) container=(?P<container>\S+)"
    r" ifname=(?P<ifname>\S+) netns=(?P<netns>\S+) args=(?P<args>\S+) exit=(?P<exit>\d+) took_ms=\d+"
    r" answer=(?P<answer>.+)"
)


def double_result(netns: str) -> Result:
    """The result of every ADD of the double."""
    return Result(
        interfaces=(Interface(name="wh1"), Interface(name="eth0", sandbox=netns, mtu=1450)),
        addresses=(Address(address=ip_interface("10.1.0.5/24"), gateway=ip_address("10.1.0.1"), interface=1),),
        routes=(Route(target=ip_network("0.0.0.0/0")),),
    )


class CniErrorSeen(NamedTuple):
    """An error object, as a runtime reads it."""

    version: str
    code: int
    message: str
    details: str


def error_of(done: subprocess.CompletedProcess[bytes]) -> CniErrorSeen:
    """The error that a shim printed: exit code 1, and one complete error object on stdout (C-002, C-003)."""
    assert (done.returncode, done.stderr) == (1, b""), done
    members = json.loads(done.stdout)
    return CniErrorSeen(members["cniVersion"], members["code"], members["msg"], members.get("details", ""))


class AgentDouble:
    """Listens on the agent's socket while the block runs.

    `serve` handles a connection and may be replaced; by default it answers a request with `answer`, which may be
    replaced too. An error in either is raised at the end of the block.
    """

    def __init__(self, path: Path) -> None:
        self.calls: list[wire.Call] = []
        self.attached: dict[AttachmentId, str] = {}
        self.answer: Callable[[wire.Call], wire.Answer] = self.default_answer
        self.serve: Callable[[socket.socket], None] = self.serve_one
        self._errors: list[Exception] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        self._listener.close()
        if self._errors and error is None:
            raise ExceptionGroup("the agent's double failed", self._errors)

    def receive(self, connection: socket.socket) -> wire.Call:
        """Read the request of a shim."""
        size = wire.body_size(_read(connection, wire.HEADER_SIZE))
        call = wire.decode_call(_read(connection, size))
        self.calls.append(call)
        return call

    def serve_one(self, connection: socket.socket) -> None:
        """Read one frame, answer with one frame."""
        connection.sendall(wire.encode_answer(self.answer(self.receive(connection))))

    def default_answer(self, call: wire.Call) -> wire.Answer:
        """Serve a request as the agent would; attachments exist in memory only."""
        try:
            return wire.Answer(exit_code=0, stdout=self._serve_request(call))
        except CniError as error:
            return wire.Answer(exit_code=1, stdout=error.encode(version=answer_version(call.stdin)))

    def _serve_request(self, call: wire.Call) -> bytes:
        match parse_request(call.environment, call.stdin):
            case Add() as add:
                if add.attachment in self.attached:
                    raise CniError(Code.FAILED, f"{add.attachment.ifname} is already attached")
                self.attached[add.attachment] = add.netns
                return encode_result(double_result(add.netns), add.config.version)
            case Del() as delete:
                self.attached.pop(delete.attachment, None)
            case Check() as check:
                if self.attached.get(check.attachment) != check.prev_result.interfaces[1].sandbox:
                    raise CniError(Code.FAILED, "the attachment is gone")
            case Gc(valid=frozenset() as valid):
                for attachment in self.attached.keys() - valid:
                    del self.attached[attachment]
            case Status() if not self.attached:
                raise CniError(Code.UNAVAILABLE, "the double is not ready")
        return b""

    def _accept(self) -> None:
        with ThreadPoolExecutor(max_workers=32) as pool:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # the listener was shut down
                    return
                connection.settimeout(DEADLINE)
                pool.submit(self._serve_and_record_error, connection)

    def _serve_and_record_error(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.serve(connection)
            except Exception as error:  # raised again at the end of the block
                self._errors.append(error)


class InstalledShim:
    """A shim in its own folder with a socket and a log, called as a runtime calls it."""

    def __init__(self, program: bytes, folder: Path) -> None:
        self.folder = folder / "bin"
        self.socket = folder / "cni.sock"
        self.log = folder / "cni.log"
        self.program = self.folder / PROGRAM
        self.install(program)

    def install(self, program: bytes) -> None:
        """Replace the program."""
        install(bin_dir=self.folder, conf_dir=self.folder, program=program, config=None, force=False)

    def environment(self, verb: str, **changes: str) -> dict[str, str]:
        """The environment of a call. Changes are named without `CNI_`, in lower case."""
        named = {"containerid": "c1", "netns": "/run/netns/a", "ifname": "eth0", "path": str(self.folder)}
        variables = {f"CNI_{name.upper()}": value for name, value in ({"command": verb} | named | changes).items()}
        return variables | self.settings

    @property
    def settings(self) -> dict[str, str]:
        """The variables with the paths of socket and log."""
        return {"WEFT_CNI_SOCKET": str(self.socket), "WEFT_CNI_LOG": str(self.log)}

    def short_deadline(self, verb: str = "ADD") -> dict[str, str]:
        """The environment of a call with a short deadline."""
        return self.environment(verb) | {"WEFT_CNI_DEADLINE_MS": str(SHORT_DEADLINE_MS)}

    def call(self, verb: str, config: object = CONFIG, **changes: str) -> subprocess.CompletedProcess[bytes]:
        """One call with a configuration, given as bytes or to be written as JSON."""
        stdin = config if isinstance(config, bytes) else json.dumps(config).encode()
        return self.run(stdin, self.environment(verb, **changes))

    def run(self, stdin: bytes | int, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
        """One call with exactly this environment; stdin may be an open file."""
        if isinstance(stdin, int):
            return subprocess.run(
                [self.program], stdin=stdin, env=environment, capture_output=True, check=False, timeout=DEADLINE
            )
        return subprocess.run(
            [self.program], input=stdin, env=environment, capture_output=True, check=False, timeout=DEADLINE
        )

    def run_with_open_stdin(self, written: bytes, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
        """One call whose stdin never ends."""
        readable, writable = os.pipe()
        try:
            os.write(writable, written)
            return self.run(readable, environment)
        finally:
            os.close(readable)
            os.close(writable)

    def logged(self) -> list[dict[str, str]]:
        """The fields of each log line; no line may be truncated."""
        lines = [_LOG_LINE.fullmatch(line) for line in self.log.read_text().splitlines()]
        assert all(lines), self.log.read_text()
        return [line.groupdict() for line in lines if line is not None]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError("the shim closed the connection within a frame")
        data += chunk
    return data
