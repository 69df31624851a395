"""The REST client of netctl: finds netmaster, authenticates, and translates errors."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from weft.ctl.failures import Behind, CommandError, Failure, FileFault, Opens, Unreachable, Usage
from weft.ctl.files import CONFIG_FILE, read_token

if TYPE_CHECKING:
    from ssl import SSLContext

    from weft.ctl.http import Reply

# One object as REST returns it.
Row = Mapping[str, object]

# Objects per page: a long list comes in pages, each with its own deadline.
PAGE = 1000

# Seconds that --wait without a value waits.
DEFAULT_WAIT = 10.0

# A pattern instead of urllib.parse, which is slow to import. The path may not contain blanks or control characters: it
# becomes part of the request line.
_URL = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(/[!-~]*)?")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|\[::1\]")
# RFC 3986 unreserved characters, and the colon.
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~:")
# Longest quotation of a reply that is not from netmaster, such as a proxy's HTML page.
_MAX_QUOTED = 256


_TRUE = frozenset({"1", "t", "true", "y", "yes"})


def is_true(text: str) -> bool:
    """Whether the value of a flag or variable means yes."""
    return text.lower() in _TRUE


class Connection(NamedTuple):
    """How to reach netmaster, from flags and environment."""

    url: str
    insecure: bool = False
    cacert: str = ""
    timeout: float = 30.0


class Wait(NamedTuple):
    """How long to wait until nodes have applied a write, and whether unreachable nodes count."""

    seconds: float
    ignore_unreachable: bool = False

    @property
    def query(self) -> Mapping[str, str]:
        return {"wait": f"{self.seconds:g}"} | ({"ignore-unreachable": "1"} if self.ignore_unreachable else {})


class Client:
    """A client of one netmaster. Every request has its own deadline and its own connection."""

    def __init__(self, connection: Connection, *, environment: Mapping[str, str]) -> None:
        match = _URL.fullmatch(connection.url)
        # Port 0 is rejected here: connecting to it would fail with a misleading error.
        if not match or int(match[3] or 1) not in range(1, 65536):
            raise Usage(
                f"--netmaster {connection.url!r} is not an address: write http://HOST:PORT or https://HOST:PORT"
            )
        scheme, self._authority, port, base = match.groups()
        self._connection = connection
        self._secure = scheme == "https"
        self._port = int(port or (443 if self._secure else 80))
        self._base = (base or "").rstrip("/")
        # A token sent in clear text to another machine could be intercepted.
        self._may_send_token = self._secure or bool(_LOOPBACK.fullmatch(self._authority))
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
        """Send a request and return its 2xx reply; `CommandError` for another status, `Unreachable` without a reply.

        With `wait` netmaster replies when the nodes have applied the write; `Behind` if some have not in time.
        """
        headers = {"Accept": "application/json"}
        if body:
            headers["Content-Type"] = "application/json"
        if if_match:
            headers["If-Match"] = if_match
        if self._may_send_token and (token := read_token(self._environment)):
            headers["Authorization"] = f"Bearer {token}"
        target = self._base + path
        if parameters := {**(query or {}), **(wait.query if wait else {})}:
            target += "?" + "&".join(f"{name}={quote(value)}" for name, value in parameters.items())
        # netmaster uses up the wait before it replies, so it does not count against the request's own timeout.
        timeout = self._connection.timeout + (wait.seconds if wait else 0.0)
        reply = self._exchange(method, target, headers=headers, body=body, timeout=timeout)
        if not 200 <= reply.status < 300:
            raise self._error(reply)
        return reply

    def rows(self, path: str, *, query: Mapping[str, str]) -> Iterator[Row]:
        """All objects of a list, page by page."""
        page: dict[str, str] = {**query, "limit": str(PAGE)}
        while True:
            reply = self.request("GET", path, query=page)
            yield from decode_rows(reply)
            if not (token := reply.headers.get("x-continue")):
                return
            page["continue"] = token

    def _exchange(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout: float) -> Reply:
        # Imported here because http.client is slow to import, and --help or a usage error sends nothing.
        from weft.ctl.http import InvalidReply, exchange  # noqa: PLC0415

        host = self._authority.strip("[]")
        tls = self._tls() if self._secure else None
        try:
            return exchange(
                method, target, host=host, port=self._port, headers=headers, body=body, timeout=timeout, tls=tls
            )
        except TimeoutError as error:
            raise Unreachable(
                f"no reply from netmaster at {self._connection.url} within {timeout:g} s: "
                "is it overloaded or behind a firewall? give it more time with --timeout"
            ) from error
        except InvalidReply as error:
            raise Unreachable(
                f"netmaster at {self._connection.url}: {error}; are scheme (http or https) and port right?"
            ) from error
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> Unreachable:
        if untrusted := getattr(error, "verify_message", ""):
            return Unreachable(
                f"the certificate of netmaster at {self._connection.url} is not trusted: {untrusted}; "
                "give its CA with --cacert FILE"
            )
        reason = "unknown host name" if isinstance(error, socket.gaierror) else error.strerror or str(error)
        return Unreachable(
            f"cannot reach netmaster at {self._connection.url}: {reason}; is it running? set --netmaster or NETMASTER"
        )

    def _tls(self) -> SSLContext:
        import ssl  # noqa: PLC0415 - needed for the types of errors only with https

        # An explicit --insecure accepts any certificate, for labs with self-signed ones.
        if self._connection.insecure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self._connection.cacert or None)
        except OSError as error:
            raise FileFault(f"--cacert {self._connection.cacert}: {error.strerror or error}") from error

    def _error(self, reply: Reply) -> Failure:
        message, field, code = _parse_error(reply)
        # By code and not by status 504, which a proxy may send too.
        if code == Behind.code:
            return Behind(message)
        if code == Opens.code:
            return Opens(f"{message}: to do it all the same, add --force; to look first, add --preview")
        if reply.status == 401:
            message += f"; give a token in NETCTL_TOKEN or in {CONFIG_FILE}"
            if not self._may_send_token:
                message += " (it is sent only over https or to this machine)"
        if reply.status == 412:
            message += "; it was changed concurrently: run the command again"
        return CommandError(message, field=field)


def quote(text: str) -> str:
    """Percent-encode a path segment or a query value. The colon stays: it separates the members of keys."""
    octets = text.encode(errors="surrogateescape")
    return "".join(chr(octet) if octet in _UNRESERVED else f"%{octet:02X}" for octet in octets)


def decode_json(reply: Reply) -> object:
    """The JSON value of a reply; `CommandError` if it is not JSON."""
    try:
        value: object = json.loads(reply.body)
    except ValueError as error:
        raise CommandError(f"the reply is not JSON: {_quoted(reply.body)!r}; is this a netmaster?") from error
    return value


def decode_row(reply: Reply) -> Row:
    """The JSON object of a reply; `CommandError` if it is something else."""
    value = decode_json(reply)
    if not isinstance(value, dict):
        raise CommandError(f"the reply is not a JSON object: {_quoted(reply.body)!r}; is this a netmaster?")
    return value


def decode_rows(reply: Reply) -> list[Row]:
    """The JSON list of objects of a reply; `CommandError` if it is something else."""
    value = decode_json(reply)
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise CommandError(f"the reply is not a list of JSON objects: {_quoted(reply.body)!r}; is this a netmaster?")
    return value


def _parse_error(reply: Reply) -> tuple[str, str, str]:
    """The message, field and code of an error. A reply that is not netmaster's is quoted."""
    try:
        error = json.loads(reply.body)
        return str(error["message"]), str(error.get("field") or ""), str(error.get("code") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        text = _quoted(reply.body)
        return f"the server replied {reply.status} {reply.reason}" + (f": {text}" if text else ""), "", ""


def _quoted(body: bytes) -> str:
    """Untrusted text as one short line without control characters, which could alter the terminal."""
    text = " ".join(body.decode(errors="replace").split())
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_MAX_QUOTED])
