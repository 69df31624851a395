"""The journal on disk: written before the kernel is touched, so that kill -9 at any line loses nothing.

An append-only file of lines, each with a checksum; a torn last line is what a kill leaves and is passed over. The first
line names the boot: what was attached in another boot has lost its kernel state. The page cache survives a kill, and a
reboot takes the attachments with it, so lines need not be forced to the disk.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from weft.agent.journal import Attachment, Journal
from weft.domain.errors import Malformed, Unavailable
from weft.domain.ids import EndpointKey

REWRITE_AFTER = 2000
"""Lines that no longer count before the file is written anew."""


class _Line(msgspec.Struct, frozen=True):
    key: EndpointKey
    note: Attachment | None = None


class Ledger(Journal):
    """The journal of this node, for one agent at a time: a second one is `Unavailable`."""

    def __init__(self, path: Path, *, boot: str) -> None:
        super().__init__()
        self._path = path
        self._boot = boot
        self._stale = 0
        self._fd = -1
        self.rebooted = False
        """Whether what was read belongs to an earlier boot: none of it is in the kernel any more."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise Unavailable(f"{path} is in use by another agent") from error
        self._read()
        self._rewrite()

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock)

    def _read(self) -> None:
        lines = _whole_lines(self._path.read_bytes()) if self._path.exists() else iter(())
        boot = next(lines, b"").decode()
        self.rebooted = bool(boot) and boot != self._boot
        for data in lines:
            line = _decode(data)
            if line.note is None:
                super().forget(line.key)
            else:
                super().put(line.note)

    def _write(self, key: EndpointKey, note: Attachment | None) -> None:
        if self._fd < 0:
            return  # what is being read need not be written
        os.write(self._fd, _encode(msgspec.json.encode(_Line(key, note))))
        self._stale += 2 if note is None else key in self._notes
        if self._stale > REWRITE_AFTER:
            self._rewrite()

    def _rewrite(self) -> None:
        """Write only what counts, under another name, and put that in the file's place."""
        fresh = self._path.with_suffix(".new")
        body = [_encode(self._boot.encode())]
        body += [_encode(msgspec.json.encode(_Line(note.key, note))) for note in self]
        fresh.write_bytes(b"".join(body))
        fresh.chmod(0o600)
        fresh.replace(self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._stale = 0


def read_boot_id() -> str:
    """What tells this boot from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
