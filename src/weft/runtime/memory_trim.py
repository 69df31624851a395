"""Reduce memory: cheaper imports, and memory that the C library returns to the system."""

from __future__ import annotations

import ctypes
import importlib
import os

_LIBC = ctypes.CDLL(None)
# OpenSSL reads these variables for its default locations.
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def import_aiohttp() -> None:
    """Import aiohttp without the system's CA certificates, which it loads for its default TLS context.

    That takes 125 ms and 2 MB. Every client of ours has its own context (`weft.runtime.http_failover`); the default
    context then trusts no server. Call it before anything else imports aiohttp.
    """
    saved = {name: os.environ.get(name) for name in _CERTIFICATES}
    os.environ.update(dict.fromkeys(_CERTIFICATES, os.devnull))
    try:
        importlib.import_module("aiohttp")
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def trim_memory() -> None:
    """Return free memory to the system, where the C library would keep it (glibc; musl does not).

    Takes milliseconds; ctypes releases the GIL meanwhile.
    """
    # musl has no malloc_trim.
    if trim := getattr(_LIBC, "malloc_trim", None):
        trim(0)
