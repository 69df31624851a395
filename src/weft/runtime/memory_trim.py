"""Programs that take less: imports that cost less than they would by themselves, and memory that is given back."""

from __future__ import annotations

import ctypes
import importlib
import os

_LIBC = ctypes.CDLL(None)
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def import_aiohttp() -> None:
    """Import aiohttp without the system's certificates, which it reads for whoever names no context of its own.

    That takes an eighth of a second and 2 MB, and nobody here does so (`weft.runtime.http_failover`): who did would trust
    nobody. To be called before anything else imports it.
    """
    told = {name: os.environ.get(name) for name in _CERTIFICATES}
    os.environ.update(dict.fromkeys(_CERTIFICATES, os.devnull))
    try:
        importlib.import_module("aiohttp")
    finally:
        for name, value in told.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def give_back_memory() -> None:
    """Give the system back what was needed for a moment, where the C library would keep it (glibc; musl does not).

    Takes milliseconds, during which other threads run.
    """
    if trim := getattr(_LIBC, "malloc_trim", None):
        trim(0)
