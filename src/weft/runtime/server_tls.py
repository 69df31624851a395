"""TLS of a server whose files are replaced while it runs: a renewed certificate, another CA."""

from __future__ import annotations

import ssl
from pathlib import Path

from weft.runtime.file_change import Rewritten
from weft.runtime.logs import Log

log = Log("tls")


def server_tls(cert: Path, key: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS of a listener; with `client_ca` clients must present a certificate that it signed (mTLS)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # TLS 1.0 and 1.1 are deprecated (RFC 8996).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class ServerTls:
    """The TLS context of a server, by its files.

    When they change, new connections get a new context: OpenSSL cannot remove a CA from one, so that clients of a
    former CA would be accepted until a restart.
    """

    def __init__(self, cert: Path, key: Path, *, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        # Before the files are read: a change in between is seen at the next call.
        self._changed = Rewritten(*filter(None, (cert, key, client_ca)))
        self._context = server_tls(cert, key, client_ca=client_ca)
        self._ca = self._read_ca()
        self._is_due = False

    @property
    def requires_client_certificates(self) -> bool:
        return self._client_ca is not None

    def current(self) -> ssl.SSLContext:
        """The context for the next connection. Files that cannot be used, or not yet, leave the former one."""
        self._is_due = self._changed() or self._is_due
        if self._is_due:
            try:
                self._context = server_tls(self._cert, self._key, client_ca=self._client_ca)
                self._is_due = False
                log.info("TLS files reloaded", certificate=self._cert)
            except (OSError, ssl.SSLError) as error:
                # Certificate and key may be two files, of which only one is replaced yet: the next call retries.
                log.warning("TLS files not reloaded", certificate=self._cert, reason=str(error))
        return self._context

    def has_new_ca(self) -> bool:
        """Whether the CA of clients is another one since the last call: then they must authenticate again."""
        # After the context has it, else clients would reconnect by the former CA.
        if self._is_due:
            return False
        before, self._ca = self._ca, self._read_ca()
        return before != self._ca

    def _read_ca(self) -> bytes:
        try:
            return self._client_ca.read_bytes() if self._client_ca else b""
        except OSError:
            return self._ca  # being replaced
