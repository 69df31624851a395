"""Atomic file replacement: write to a temporary name, fsync, rename."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def place_file(path: Path, content: bytes, *, mode: int) -> bool:
    """Make `path` a regular file with this content and mode; False when it is one already. Safe against kill -9."""
    if _is_equal(path, content, mode=mode):
        return False
    # In the same folder, because a rename is atomic only within a file system; with a suffix that no runtime reads.
    handle, name = tempfile.mkstemp(prefix=".weft-", suffix=".new", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return True


def place_link(path: Path, target: str) -> bool:
    """Make `path` a symbolic link to `target`; False when it is one already."""
    if path.is_symlink() and path.readlink() == Path(target):
        return False
    temporary = path.with_name(f".weft-{path.name}.new")
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by a process that was killed
    temporary.symlink_to(target)
    temporary.rename(path)
    _sync_folder(path.parent)
    return True


def remove_file(path: Path) -> None:
    """Remove a file or link; one that does not exist is fine."""
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _is_equal(path: Path, content: bytes, *, mode: int) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    return path.stat().st_mode & 0o7777 == mode and path.read_bytes() == content


def _sync_folder(folder: Path) -> None:
    # A rename is an entry of the folder: without this it may be lost with the power.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
