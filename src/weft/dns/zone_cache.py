"""Zone cache: the control messages that netdns has received, on disk, as frames of the control protocol.

A kill leaves at most a torn last frame, which is skipped. The frames are not synced to disk: the page cache survives a
kill of the process, and a reboot removes the tenant netns anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from weft.domain.errors import Malformed
from weft.runtime.dns_control import LENGTH, MAX_BODY, FullSync, Message, decode_message, encode
from weft.runtime.logs import Log

log = Log("dns")

# Below this size a rewrite is not worth it, however small the zones are.
_MIN_TAIL = 1 << 20
# A larger file is not ours: the frames of the state and of the changes since, each at most what the protocol allows.
_MAX_FILE = 2 * MAX_BODY


class ZoneCache:
    """The file. `append` adds a message; when it `is_long`, `rewrite` it from the present state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        # Bytes of the state that the file began with, and of the messages appended since.
        self._base = self._tail = 0
        # Whether the last append may have left a part of a frame: a full disk, or a file that is not open.
        self._torn = True

    def read(self) -> Iterator[Message]:
        """All messages up to the first that cannot be read; none when the file itself cannot."""
        data = self._read_file()
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

    def _read_file(self) -> bytes:
        try:
            # Not blocking: whatever stands in the file's place, netdns must start.
            with os.fdopen(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE:
                    return file.read(_MAX_FILE)
                log.warning("zone cache unreadable, ignoring it", file=self._path, bytes=status.st_size)
        except FileNotFoundError:
            pass  # the first start
        except OSError as error:
            log.warning("zone cache unreadable, ignoring it", file=self._path, reason=str(error))
        return b""

    @property
    def is_long(self) -> bool:
        """Whether appended messages take more room than the state they change, or one of them is torn."""
        return self._torn or self._tail > max(self._base, _MIN_TAIL)

    def append(self, message: Message) -> None:
        frame = encode(message)
        # Until it is known to be whole: what follows a torn frame could not be read.
        self._torn = True
        if os.write(self._fd, frame) < len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False
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
        self._base, self._tail, self._torn = len(frame), 0, False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
