"""Files that netctl reads and writes: the user's token, and the documents of backup and restore."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Mapping

from weft.ctl.failures import FileFault

CONFIG_FILE = "~/.netctl/config.json"

_TOKEN = re.compile(r"[!-~]+")


def read_token(environment: Mapping[str, str]) -> str:
    """Read the token from `NETCTL_TOKEN`, else from the user's file (`{"token": …}`); empty if there is none."""
    source = "NETCTL_TOKEN"
    token: object = environment.get(source, "")
    if not token:
        source = CONFIG_FILE
        token = _read_config(environment.get("HOME", "")).get("token", "")
    if token and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
        raise FileFault(f"the token in {source} must be one word of printable ASCII characters")
    return str(token)


def read_document(path: str) -> bytes:
    """Read a file; `-` is the standard input."""
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        with open(path, "rb") as file:  # noqa: PTH123 - importing pathlib costs 10 ms of CPU
            return file.read()
    except OSError as error:
        raise FileFault(f"cannot read {path}: {error.strerror}") from error


def write_document(path: str, document: bytes) -> None:
    """Write a file atomically, with mode 0600: a backup contains secrets."""
    partial = f"{path}.partial"
    try:
        # O_NOFOLLOW: in a shared directory another user could have planted a symbolic link.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - as in read_document
            # A leftover file of an earlier run keeps its old mode on open.
            os.fchmod(descriptor, 0o600)
            file.write(document)
            file.flush()
            # Before the rename, or a crash could leave an empty file under the final name.
            os.fsync(descriptor)
        os.replace(partial, path)  # noqa: PTH105 - as in read_document
    except OSError as error:
        raise FileFault(f"cannot write {path}: {error.strerror}") from error


def _read_config(home: str) -> Mapping[str, object]:
    if not home:
        return {}
    path = CONFIG_FILE.replace("~", home, 1)
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as in read_document
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FileFault(f"cannot read {CONFIG_FILE}: {error}") from error
    if mode & 0o077:
        raise FileFault(f"{CONFIG_FILE} contains a token and other users can read it: run chmod 600 {CONFIG_FILE}")
    if not isinstance(config, dict):
        raise FileFault(f'{CONFIG_FILE} must hold {{"token": "…"}}')
    return config
