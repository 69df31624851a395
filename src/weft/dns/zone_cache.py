"""What netdns was told, on disk: the frames of the hand-over, in order, as they were said.

A kill leaves at most a torn last frame, which is passed over. The page cache survives a kill, and a reboot takes the
tenants' spaces with it, so frames need not be forced to the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weft.domain.errors import Malformed
from weft.runtime.dns_control import LENGTH, FullSync, Message, decode_message, encode
from weft.runtime.logs import Log

log = Log("dns")

_SMALLEST_TAIL = 1 << 20


class Memory:
    """The file. `append` what was said; what `is_long` is better written anew from the present state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._base = self._tail = 0

    def read(self) -> Iterator[Message]:
        """All that was said and is still to be read."""
        data = self._path.read_bytes() if self._path.exists() else b""
        at = 0
        while at + LENGTH.size <= len(data):
            [length] = LENGTH.unpack_from(data, at)
            body = data[at + LENGTH.size : at + LENGTH.size + length]
            if len(body) < length:
                return
            try:
                yield decode_message(body)
            except Malformed as error:
                log.warning("what was remembered cannot be read", file=self._path, reason=error.message)
                return
            at += LENGTH.size + length

    @property
    def is_long(self) -> bool:
        """Whether more is in it than the present state needs."""
        return self._tail > max(self._base, _SMALLEST_TAIL)

    def append(self, message: Message) -> None:
        """Remember one more message."""
        frame = encode(message)
        os.write(self._fd, frame)
        self._tail += len(frame)

    def rewrite(self, state: FullSync) -> None:
        """Remember this and nothing else: the old file or the new one is there, never a part."""
        fresh = self._path.with_suffix(".new")
        frame = encode(state)
        fresh.write_bytes(frame)
        fresh.chmod(0o600)
        fresh.replace(self._path)
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._base, self._tail = len(frame), 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
