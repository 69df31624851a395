"""Zone cache: the control messages that netdns has received, on disk, as frames of the control protocol.

A kill leaves at most a torn last frame, which is skipped. The frames are not synced to disk: the page cache survives a
kill of the process, and a reboot removes the tenant netns anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weft.domain.errors import Malformed
from weft.runtime.dns_control import LENGTH, FullSync, Message, decode_message, encode
from weft.runtime.logs import Log

log = Log("dns")

# Below this size a rewrite is not worth it, however small the zones are.
_MIN_TAIL = 1 << 20


class ZoneCache:
    """The file. `append` adds a message; when it `is_long`, `rewrite` it from the present state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        # Bytes of the state that the file began with, and of the messages appended since.
        self._base = self._tail = 0

    def read(self) -> Iterator[Message]:
        """All messages up to the first that cannot be read."""
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
                log.warning("zone cache unreadable, ignoring the rest", file=self._path, reason=error.message)
                return
            at += LENGTH.size + length

    @property
    def is_long(self) -> bool:
        """Whether appended messages take more room than the state they change."""
        return self._tail > max(self._base, _MIN_TAIL)

    def append(self, message: Message) -> None:
        frame = encode(message)
        os.write(self._fd, frame)
        self._tail += len(frame)

    def rewrite(self, state: FullSync) -> None:
        """Replace the content by this state. Atomic: a reader finds the old file or the new one."""
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
