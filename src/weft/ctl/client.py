"""The REST client: where the netmaster is, who we are, and what its answers mean."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from weft.ctl.failures import Behind, CommandError, Failure, FileFault, Unreachable, Usage
from weft.ctl.files import CONFIG_FILE, read_token
from weft.ctl.http import NotHttp, Reply, decode_reply, encode_request, exchange

if TYPE_CHECKING:
    from ssl import SSLContext

# One object as the netmaster tells it.
Row = Mapping[str, object]

# Rows asked for at once: a long list comes in parts, each within its own deadline.
PAGE = 1000

# Seconds for which to wait until a write is in force, where none are named.
DEFAULT_WAIT = 10.0

_URL = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(/[!-~]*)?")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|\[::1\]")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:")
_FOREIGN_TEXT = 256


class Connection(NamedTuple):
    """How to reach the netmaster, as told by flags and environment."""

    url: str
    insecure: bool = False
    cacert: str = ""
    timeout: float = 30.0


class Wait(NamedTuple):
    """For how long, and for whom, to wait until a write is in force."""

    seconds: float
    skip_silent: bool = False

    @property
    def query(self) -> Mapping[str, str]:
        return {"wait": f"{self.seconds:g}"} | ({"skip-silent": "1"} if self.skip_silent else {})


class Client:
    """Talks to one netmaster. Every request has its own deadline and its own connection."""

    def __init__(self, connection: Connection, *, environment: Mapping[str, str]) -> None:
        match = _URL.fullmatch(connection.url)
        if not match or int(match[3] or 1) not in range(1, 65536):
            raise Usage(
                f"--netmaster {connection.url!r} is not an address: write http://HOST:PORT or https://HOST:PORT"
            )
        scheme, self._authority, port, base = match.groups()
        self._connection = connection
        self._secure = scheme == "https"
        self._port = int(port or (443 if self._secure else 80))
        self._base = (base or "").rstrip("/")
        # A token on a plain connection that leaves this machine could be read on the way.
        self._trusted = self._secure or bool(_LOOPBACK.fullmatch(self._authority))
        self._environment = environment

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        if_match: str = "",
        wait: Wait | None = None,
    ) -> Reply:
        """A successful answer (2xx); `CommandError` for any other, `Unreachable` when none came.

        With `wait` the netmaster answers when what was written is in force, and `Behind` says that it is not.
        """
        headers = {"Host": f"{self._authority}:{self._port}", "Accept": "application/json"}
        if body:
            headers["Content-Type"] = "application/json"
        if if_match:
            headers["If-Match"] = if_match
        if self._trusted and (token := read_token(self._environment)):
            headers["Authorization"] = f"Bearer {token}"
        target = self._base + path
        if asked := {**(query or {}), **(wait.query if wait else {})}:
            target += "?" + "&".join(f"{name}={quote(value)}" for name, value in asked.items())
        timeout = self._connection.timeout + (wait.seconds if wait else 0.0)
        reply = self._exchange(encode_request(method, target, headers=headers, body=body), timeout=timeout)
        if not 200 <= reply.status < 300:
            raise self._refusal(reply)
        return reply

    def rows(self, path: str, *, query: Mapping[str, str]) -> Iterator[Row]:
        """Every object of a list, page after page."""
        page: dict[str, str] = {**query, "limit": str(PAGE)}
        while True:
            reply = self.request("GET", path, query=page)
            yield from decode_rows(reply)
            if not (following := reply.headers.get("x-continue")):
                return
            page["continue"] = following

    def _exchange(self, request: bytes, *, timeout: float) -> Reply:
        host = self._authority.strip("[]")
        tls = self._tls() if self._secure else None
        try:
            return decode_reply(exchange(host, self._port, request=request, timeout=timeout, tls=tls))
        except TimeoutError as error:
            raise Unreachable(
                f"no answer from netmaster at {self._connection.url} within {timeout:g} s: "
                "is it overloaded or behind a firewall? give it more time with --timeout"
            ) from error
        except NotHttp as error:
            raise Unreachable(
                f"netmaster at {self._connection.url}: {error}; do scheme (http or https) and port fit?"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> Unreachable:
        if untrusted := getattr(error, "verify_message", ""):
            return Unreachable(
                f"the certificate of netmaster at {self._connection.url} is not trusted: {untrusted}; "
                "name its authority with --cacert FILE"
            )
        reason = "the host name is not known" if isinstance(error, socket.gaierror) else error.strerror or str(error)
        return Unreachable(
            f"cannot reach netmaster at {self._connection.url}: {reason}; is it running? set --netmaster or NETMASTER"
        )

    def _tls(self) -> SSLContext:
        import ssl  # noqa: PLC0415 - a quarter of the budget, and most commands talk to loopback without it

        if self._connection.insecure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self._connection.cacert or None)
        except OSError as error:
            raise FileFault(f"--cacert {self._connection.cacert}: {error.strerror or error}") from error

    def _refusal(self, reply: Reply) -> Failure:
        message, field, code = _reason(reply)
        if code == Behind.code:
            return Behind(message)
        if reply.status == 401:
            message += f"; give a token in NETCTL_TOKEN or in {CONFIG_FILE}"
            if not self._trusted:
                message += " (it is sent only over https or to this machine)"
        if reply.status == 412:
            message += "; someone else changed it meanwhile: run the command again"
        return CommandError(message, field=field)


def quote(text: str) -> str:
    """The text as one segment of a path, or one value of a query; the colon of keys stays as it is."""
    octets = text.encode(errors="surrogateescape")
    return "".join(chr(octet) if octet in _UNRESERVED else f"%{octet:02X}" for octet in octets)


def decode_json(reply: Reply) -> object:
    """The JSON value in an answer, or `CommandError` when it holds something else."""
    try:
        value: object = json.loads(reply.body)
    except ValueError as error:
        raise CommandError(f"the answer is not JSON: {_foreign(reply.body)!r}; is this a netmaster?") from error
    return value


def decode_row(reply: Reply) -> Row:
    """The JSON object in an answer, or `CommandError` when it holds something else."""
    value = decode_json(reply)
    if not isinstance(value, dict):
        raise CommandError(f"the answer is not a JSON object: {_foreign(reply.body)!r}; is this a netmaster?")
    return value


def decode_rows(reply: Reply) -> list[Row]:
    """The JSON list of objects in an answer, or `CommandError` when it holds something else."""
    value = decode_json(reply)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise CommandError(f"the answer is not a list of JSON objects: {_foreign(reply.body)!r}; is this a netmaster?")
    return value


def _reason(reply: Reply) -> tuple[str, str, str]:
    """The message, field and code of an error body, or the best that can be said of a foreign one."""
    try:
        fault = json.loads(reply.body)
        return str(fault["message"]), str(fault.get("field") or ""), str(fault.get("code") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        text = _foreign(reply.body)
        return f"the server answered {reply.status} {reply.reason}" + (f": {text}" if text else ""), "", ""


def _foreign(body: bytes) -> str:
    """Text that no netmaster of ours wrote: one short line, without control characters."""
    text = " ".join(body.decode(errors="replace").split())
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_FOREIGN_TEXT])
