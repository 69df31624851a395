"""What is attached on this node, on disk: written before the kernel is touched, so that no kill -9 loses any of it.

An append-only file of lines, each with a checksum; a torn last line is what a kill leaves and is passed over. The first
line names the boot: what was attached in another boot has lost its kernel state. The page cache survives a kill, and a
reboot takes the attachments with it, so lines need not be forced to the disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft.domain import model
from weft.domain.errors import Malformed
from weft.ports.datapath import Wiring

REWRITE_AFTER = 2000
"""Lines that no longer count before the file is written anew."""


class AttachmentKey(NamedTuple):
    """What identifies an attachment: never a pod's name."""

    container: str
    interface: str


class Stage(StrEnum):
    """How far an attachment has come."""

    WIRING = "wiring"
    """Its ADD was never answered: it is rolled back by the next ADD or DEL, or at the start."""
    ATTACHED = "attached"
    LEAVING = "leaving"
    """Its DEL has begun; the kernel's part is done or doubtful, the store may not know yet."""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's interface: who it is, what it has, how it is wired."""

    container: str
    network_name: str
    """The CNI network it belongs to, by which GC finds it."""
    endpoint: model.Endpoint
    wiring: Wiring
    published: bool
    """Whether the store is known to have the endpoint."""
    stage: Stage

    @property
    def key(self) -> AttachmentKey:
        return AttachmentKey(self.container, self.wiring.interface)


class _Line(msgspec.Struct, frozen=True):
    key: AttachmentKey
    attachment: Attachment | None = None


class Ledger:
    """The attachments of this node. Opened by one agent; its own lock file sees to that."""

    def __init__(self, path: Path, *, boot: str) -> None:
        self._path = path
        self._boot = boot
        self._attachments: dict[AttachmentKey, Attachment] = {}
        self._stale = 0
        self._fd = -1

    def open(self) -> list[Attachment]:
        """Read what is there; the attachments of an earlier boot, which are kept until they are dropped one by one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = _whole_lines(self._path.read_bytes()) if self._path.exists() else iter(())
        boot = next(lines, b"").decode()
        for data in lines:
            line = _decode(data)
            if line.attachment is None:
                self._attachments.pop(line.key, None)
            else:
                self._attachments[line.key] = line.attachment
        self._rewrite()
        return list(self._attachments.values()) if boot and boot != self._boot else []

    def close(self) -> None:
        os.close(self._fd)

    def get(self, key: AttachmentKey) -> Attachment | None:
        return self._attachments.get(key)

    def __iter__(self) -> Iterator[Attachment]:
        return iter(list(self._attachments.values()))

    def put(self, attachment: Attachment) -> None:
        """Write an attachment down, as it is now."""
        self._append(_Line(attachment.key, attachment))
        self._stale += attachment.key in self._attachments
        self._attachments[attachment.key] = attachment

    def drop(self, key: AttachmentKey) -> None:
        """Forget an attachment; forgotten already is fine."""
        if key in self._attachments:
            self._append(_Line(key))
            del self._attachments[key]
            self._stale += 2

    def _append(self, line: _Line) -> None:
        os.write(self._fd, _encode(msgspec.json.encode(line)))
        if self._stale > REWRITE_AFTER:
            self._rewrite()

    def _rewrite(self) -> None:
        """Write only what counts, under another name, and put that in the file's place."""
        fresh = self._path.with_suffix(".new")
        body = [_encode(self._boot.encode())]
        body += [_encode(msgspec.json.encode(_Line(each.key, each))) for each in self._attachments.values()]
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
    """The lines whose checksum holds. A torn one can only be the last; the rest of a damaged file is not trusted."""
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
