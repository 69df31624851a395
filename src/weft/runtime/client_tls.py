"""TLS of a client whose files are replaced while it runs: a renewed certificate, another CA."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from weft.domain.errors import Invalid
from weft.runtime.file_change import Rewritten
from weft.runtime.logs import Log

log = Log("tls")


class ClientTls:
    """The TLS context of a client, by its files.

    When they change, there is a new context: OpenSSL cannot remove a CA from one, so that servers of a former CA would
    be trusted until a restart. aiohttp keeps connections by context, so that requests after a change open new ones.
    """

    def __init__(self, load: Callable[[], ssl.SSLContext], *files: Path) -> None:
        """`load` reads the files, and raises `Invalid` if they cannot be used."""
        self._load = load
        # Before the files are read: a change in between is seen at the next call.
        self._changed = Rewritten(*files)
        self._context = load()

    def current(self) -> ssl.SSLContext:
        """The context for the next request. Files that cannot be used, or not yet, leave the former one."""
        # Not again without a further change: reading takes milliseconds, and this is called for each request.
        if self._changed():
            try:
                self._context = self._load()
                log.info("TLS files reloaded")
            except Invalid as error:
                # Certificate and key may be two files, of which only one is replaced yet.
                log.warning("TLS files not reloaded", reason=error.message)
        return self._context


def client_tls(*, ca: str, cert: str, key: str) -> ClientTls | None:
    """TLS of a client that verifies servers by `ca` and presents `cert`; None if neither is set.

    Without `key` the file `cert` contains the private key too.
    """
    files = [Path(file) for file in (ca, cert, key) if file]
    return ClientTls(lambda: _read(ca, cert, key), *files) if files else None


def _read(ca: str, cert: str, key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"cannot load CA {ca}: {error}") from error
    if cert or key:
        try:
            context.load_cert_chain(cert, key or None)
        except (OSError, ssl.SSLError) as error:
            raise Invalid(f"cannot load certificate {', '.join(filter(None, (cert, key)))}: {error}") from error
    return context
