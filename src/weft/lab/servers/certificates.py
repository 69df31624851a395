"""A certificate authority for tests, made with `openssl`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """The files of one certificate and of its authority."""

    ca: Path
    cert: Path
    key: Path


class Authority:
    """Issues certificates for servers and clients, for 127.0.0.1, localhost and further names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.ca = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/O=weft test authority", "-keyout", str(self._key), "-out", str(self.ca),
        )  # fmt: skip

    def issue(self, file: str, *, subject: str, names: Sequence[str] = ()) -> Certificate:
        """Issue a certificate for a subject such as `/CN=node-1`.

        `names` are further subject alternative names in openssl's form, such as `IP:192.0.2.1`.
        """
        cert, key, request = (self._directory / f"{file}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = self._directory / "extensions"
        all_names = ",".join(("IP:127.0.0.1", "DNS:localhost", *names))
        # Go and OpenSSL ignore the common name of a server and need a subject alternative name.
        extensions.write_text(f"subjectAltName={all_names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", subject, "-keyout", str(key), "-out", str(request),
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key), "-CAcreateserial",
            "-days", "2", "-extfile", str(extensions), "-out", str(cert),
        )  # fmt: skip
        return Certificate(self.ca, cert, key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
