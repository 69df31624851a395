"""Detect that files, such as certificates, were replaced by another program."""

from __future__ import annotations

from pathlib import Path


class Rewritten:
    """Whether any of the files has changed since the last call."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._read()

    def __call__(self) -> bool:
        # The first call after a change returns True, once.
        before, self._seen = self._seen, self._read()
        return before != self._seen

    def _read(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int]:
    # The inode catches an atomic replacement within the resolution of the time stamp, the size a file that is being
    # written. One system call: clients look before each request.
    try:
        stat = file.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)
