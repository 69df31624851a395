"""The journal on disk: written before the kernel is touched, so that kill -9 at any line loses nothing.

An append-only file of lines, each with a checksum; a torn last line is what a kill leaves and is passed over. The first
line names the boot: what was attached in another boot has lost its kernel state. The page cache survives a kill, and a
reboot takes the attachments with it, so lines need not be forced to the disk.

A full disk refuses those who come and lets go those who leave: room for their last lines was set aside when they came.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain.errors import Malformed, Unavailable
from weft.domain.ids import EndpointKey
from weft.runtime.logs import Log

log = Log("ledger")

# Lines that no longer count before the file is written anew.
REWRITE_AFTER = 2000

# What all lines of an attachment that is made and taken off need at most.
FAREWELL_BYTES = 4096

_COMING = frozenset({Stage.HELD, Stage.WIRING})
_ROOM_STEP = 1 << 16
# For `fallocate`: the room is the file's, and its length stays.
_KEEP_SIZE = 1
_NOT_DONE_HERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class _Line(msgspec.Struct, frozen=True):
    key: EndpointKey
    note: Attachment | None = None


class AttachmentWal(AttachmentStore):
    """The journal of this node, for one agent at a time: a second one is `Unavailable`.

    So is a note for which the disk has no room; then nothing has changed.
    """

    def __init__(self, path: Path, *, boot: str) -> None:
        super().__init__()
        self._path = path
        self._boot = boot
        self._stale = 0
        self._fd = -1
        # Whether what was read belongs to an earlier boot: none of it is in the kernel any more.
        self.rebooted = False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise Unavailable(f"{path} is in use by another agent") from error
        self._size = self._read()
        try:
            self._rewrite()
        except OSError as error:
            if self.rebooted or self._size == 0:
                os.close(self._lock)
                raise Unavailable(f"{path} cannot be written: {error.strerror}") from error
            log.warning("ledger not written anew", reason=error.strerror)
            self._use()

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock)

    def _read(self) -> int:
        """How many bytes of the file count."""
        lines = list(_whole_lines(self._path.read_bytes())) if self._path.exists() else []
        boot = lines[0].decode() if lines else ""
        self.rebooted = bool(boot) and boot != self._boot
        for data in lines[1:]:
            line = _decode(data)
            if line.note is None:
                super().forget(line.key)
            else:
                super().put(line.note)
        return sum(len(_encode(line)) for line in lines)

    def _write(self, news: Sequence[tuple[EndpointKey, Attachment | None]]) -> None:
        if self._fd < 0:
            return  # what is being read need not be written
        if any(note is not None and note.stage in _COMING for _, note in news):
            self._set_aside(self._size + (len(self._notes) + 1) * FAREWELL_BYTES)
        lasting = [(key, note) for key, note in news if not _leaves_no_trace(note)]
        self._append(b"".join(_encode(msgspec.json.encode(_Line(key, note))) for key, note in lasting))
        self._stale += sum(2 if note is None else key in self._notes for key, note in lasting)
        if self._stale > REWRITE_AFTER:
            self._stale = 0
            try:
                self._rewrite()
            except OSError as error:
                log.warning("ledger not written anew", reason=error.strerror)

    def _append(self, lines: bytes) -> None:
        """All of it or nothing: what follows a torn line would not be believed."""
        if not lines:
            return
        try:
            written = os.write(self._fd, lines)
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror}") from error
        if written < len(lines):
            os.ftruncate(self._fd, self._size)
            self._room = self._size
            raise Unavailable(f"{self._path} cannot be written: {os.strerror(errno.ENOSPC)}")
        self._size += written

    def _set_aside(self, size: int) -> None:
        """The file has room for so many bytes, whoever fills the disk; `Unavailable` when there is none."""
        if size <= self._room:
            return
        size += _ROOM_STEP
        if _LIBC.fallocate(self._fd, _KEEP_SIZE, 0, size) != 0:
            number = ctypes.get_errno()
            if number not in _NOT_DONE_HERE:
                raise Unavailable(f"{self._path} cannot be written: {os.strerror(number)}")
        self._room = size

    def _rewrite(self) -> None:
        """Write only what counts, under another name, and put that in the file's place."""
        fresh = self._path.with_suffix(".new")
        body = [_encode(self._boot.encode())]
        body += [_encode(msgspec.json.encode(_Line(note.key, note))) for note in self]
        try:
            size = fresh.write_bytes(b"".join(body))
            fresh.chmod(0o600)
            fresh.replace(self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        self._size = size
        self._use()
        self._stale = 0

    def _use(self) -> None:
        """Append to the file from now on, after what counts in it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)
        self._room = 0
        try:
            self._set_aside(self._size + len(self._notes) * FAREWELL_BYTES)
        except Unavailable as error:
            log.warning("no room for those who leave", reason=error.message)


def read_boot_id() -> str:
    """What tells this boot from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _leaves_no_trace(note: Attachment | None) -> bool:
    """Whether neither the kernel nor the store has heard of it: then there is nothing to undo after a kill."""
    return note is not None and note.stage is Stage.HELD and not note.published


def _encode(data: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _whole_lines(data: bytes) -> Iterator[bytes]:
    """The lines whose checksum holds. A torn one can only be the last; what follows damage is not trusted."""
    for line in data.split(b"\n")[:-1]:
        checksum, _, body = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(body):
            return
        yield body


def _decode(data: bytes) -> _Line:
    try:
        return msgspec.json.decode(data, type=_Line)
    except msgspec.MsgspecError as error:
        raise Malformed(f"the ledger has a line that cannot be read: {error}") from error
