"""Attachment records of this node: which endpoint each container has, its configuration, and how far it has got.

A record is written before the step that it announces, so that every step can be undone after a crash. `AttachmentStore`
keeps the records in memory; `AttachmentWal` adds a write-ahead log on disk, so that kill -9 at any line loses nothing.

The log is append-only. Each line has a checksum and a number; the first line names the format and the boot. A kill
leaves a torn last line, which is ignored. Another boot means that the kernel state of every attachment is gone. Lines
are not synced to the disk: the page cache survives a kill, and a reboot takes the attachments with it.

A damaged line, a missing one or an old one that stands there again costs that line and no other. But then nobody knows
what it said. So `is_damaged` stays true until the next boot, and what has no record is not removed meanwhile.

When the disk is full, ADD is refused and DEL still works: each ADD reserves the space that its later lines need.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from weft.agent.store.log_lines import LogLine, encode_line, read_lines
from weft.cni.request import AttachmentId
from weft.domain import model
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Invalid, Malformed, Unavailable
from weft.domain.ids import EndpointKey, NetworkKey
from weft.domain.ipam.allocator import NumberSet
from weft.ports.datapath import EndpointConfig
from weft.runtime.keyed_lock import KeyedLock
from weft.runtime.logs import Log

log = Log("attachment-log")

# The name of the log in the agent's data directory.
FILE_NAME = "attachments.log"

# Raised whenever a stored field is renamed or changes its meaning. Format 1 was `ledger`, whose first line was the
# bare boot id.
FORMAT = 2
FORMER_NAME = "ledger"

# How many obsolete lines the file may have before it is compacted.
COMPACT_AFTER = 2000

# The most that the later lines of one attachment need, DEL included; reserved at its ADD.
RESERVE_BYTES = 4096

# Space is reserved in steps of 64 KiB, so that not every ADD pays for a system call.
_RESERVE_STEP = 1 << 16
# linux/falloc.h: reserve blocks beyond the end of the file without changing its size.
FALLOC_FL_KEEP_SIZE = 1
# Some file systems (tmpfs before 3.5, NFS before 4.2) cannot reserve; then a full disk may also refuse DEL.
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

# `os.posix_fallocate` would write zeroes where the file system cannot reserve, and it changes the file's size.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Stage(StrEnum):
    """How far an attachment has got. The values are stored, and shown by metrics and REST."""

    # Addresses are reserved and nothing else is done. The ADD was not answered: a restart rolls it back.
    ALLOCATED = "allocated"
    # The datapath is being configured. The ADD was not answered: a restart rolls it back.
    CONFIGURING = "configuring"
    ATTACHED = "attached"
    # Being removed. The store may still have the endpoint, so its addresses are not free yet.
    DELETING = "deleting"


# The stages in which the endpoint has a port in the datapath, or is about to have one.
HAS_PORT = frozenset({Stage.CONFIGURING, Stage.ATTACHED})
# In these stages an ADD is under way: only ADD may be refused for lack of space.
_ADDING = frozenset({Stage.ALLOCATED, Stage.CONFIGURING})


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one container interface."""

    endpoint: model.Endpoint
    # Whether the store is known to have the endpoint.
    published: bool
    stage: Stage
    # None until the datapath is about to be configured, and again once it is deconfigured.
    config: EndpointConfig | None = None
    # The name of the CNI network configuration: CNI GC lists attachments by it.
    network_name: str = ""

    @property
    def key(self) -> EndpointKey:
        return self.endpoint.key

    @property
    def id(self) -> AttachmentId:
        return AttachmentId(self.endpoint.container_id, self.endpoint.interface)


class AttachmentStore:
    """The attachment records in memory, indexed by endpoint and by CNI attachment."""

    def __init__(self) -> None:
        self._attachments: dict[EndpointKey, Attachment] = {}
        self._by_id: dict[AttachmentId, EndpointKey] = {}
        self._in_use: defaultdict[tuple[NetworkKey, int], NumberSet] = defaultdict(NumberSet)
        # Whether records may be missing, or older than they should be.
        self.is_damaged = False
        # Serializes what ADD, DEL and the publisher do to one endpoint. Held over all steps of an ADD: the publisher
        # must not commit or withdraw an endpoint that is half attached.
        self.locks: KeyedLock[EndpointKey] = KeyedLock()

    def get(self, key: EndpointKey) -> Attachment | None:
        return self._attachments.get(key)

    def find(self, attachment: AttachmentId) -> Attachment | None:
        """The record of the attachment that a runtime names."""
        key = self._by_id.get(attachment)
        return self._attachments.get(key) if key else None

    def __iter__(self) -> Iterator[Attachment]:
        # A copy: callers await between two records, while others add and delete some.
        return iter(list(self._attachments.values()))

    def numbers_in_use(self, network: NetworkKey, family: int) -> NumberSet:
        """The addresses of a network that have a record, whatever its stage."""
        return self._in_use[network, family]

    def put(self, attachment: Attachment) -> None:
        """Write a record, new or changed."""
        # The log comes first: when it cannot be written, memory must not claim otherwise.
        self._write([(attachment.key, attachment)])
        self._index(attachment)

    def mark_published(self, keys: Iterable[EndpointKey]) -> None:
        """Record, in one write, that the store has these endpoints; deleted records stay deleted."""
        known = [self._attachments[key] for key in keys if key in self._attachments]
        published = [msgspec.structs.replace(attachment, published=True) for attachment in known]
        self._write([(attachment.key, attachment) for attachment in published])
        for attachment in published:
            self._index(attachment)

    def _index(self, attachment: Attachment) -> None:
        before = self._attachments.get(attachment.key)
        self._attachments[attachment.key] = attachment
        if before is None or before.endpoint is not attachment.endpoint:
            self._by_id[attachment.id] = attachment.key
            for address in attachment.endpoint.addresses:
                self._in_use[attachment.endpoint.network_key, address.family].add(address.number)

    def update(
        self,
        key: EndpointKey,
        *,
        stage: Stage | None = None,
        config: EndpointConfig | None = None,
        deconfigured: bool = False,
        network_name: str | None = None,
    ) -> None:
        """Change some fields of a record; a deleted record stays deleted."""
        attachment = self._attachments.get(key)
        if attachment is not None:
            self.put(
                Attachment(
                    endpoint=attachment.endpoint,
                    published=attachment.published,
                    stage=stage or attachment.stage,
                    config=None if deconfigured else config or attachment.config,
                    network_name=attachment.network_name if network_name is None else network_name,
                )
            )

    def delete(self, key: EndpointKey) -> None:
        """Delete a record and free its addresses; deleting twice is fine."""
        attachment = self._attachments.get(key)
        if attachment is not None:
            self._write([(key, None)])
            del self._attachments[key]
            for address in attachment.endpoint.addresses:
                self._in_use[attachment.endpoint.network_key, address.family].discard(address.number)
            # The same container interface may have a newer record, of an endpoint in another network.
            if self._by_id.get(attachment.id) == key:
                del self._by_id[attachment.id]

    def _write(self, records: Sequence[tuple[EndpointKey, Attachment | None]]) -> None:
        """Make changes durable, all of them or none. None stands for a deleted record. Overridden by the log."""


class _Header(msgspec.Struct, frozen=True):
    """The first line."""

    format: int
    boot: str
    # Whether records were lost in this boot.
    damaged: bool = False


class _Line(msgspec.Struct, frozen=True):
    """Every other line. Without an attachment the record is deleted."""

    key: EndpointKey
    attachment: Attachment | None = None
    # Counts from 1, so that a missing line and a repeated one are noticed; 0 in lines of earlier versions.
    number: int = 0


class AttachmentWal(AttachmentStore):
    """The attachment records of this node, with their log on disk.

    One agent at a time has the log open: a second one gets `Unavailable`. So does a record for which the disk has no
    space; then nothing has changed. `Malformed` when the log has another format: nothing of it is read.
    """

    def __init__(self, path: Path, *, boot: str) -> None:
        super().__init__()
        self._path = path
        self._boot = boot
        self._obsolete = 0
        self._fd = -1
        # The number of the last line.
        self._number = 0
        # Stands before the next line: a line break, where the file could not be rewritten and its end is uncertain.
        self._separator = b""
        # How many damaged, missing and repeated lines were met when the log was opened.
        self.damaged_lines = 0
        # Whether the records are of an earlier boot: none of them is in the kernel any more.
        self.rebooted = False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The lock is a file of its own: compaction replaces the log, and a lock on it would go with the old inode.
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Unavailable(f"{self._path} is in use by another agent") from error
        self._size = self._read()
        if self.damaged_lines:
            self._report_damage()
        try:
            self._compact()
        except OSError as error:
            # A full disk must not leave running workloads without an agent. But a log of another boot, or none
            # at all, cannot be appended to: its header would be wrong.
            if self.rebooted or self._size == 0:
                raise Unavailable(f"{self._path} cannot be written: {error.strerror}") from error
            log.warning("attachment log compaction failed", reason=error.strerror)
            self._separator = b"\n"
            self._start_appending()

    def _report_damage(self) -> None:
        """Say what was lost, and keep the file as it was found, for whoever wants to know why."""
        kept = self._path.with_suffix(".damaged")
        log.warning(
            "attachment log damaged: lines skipped, nothing without a record is removed until the next boot",
            path=str(self._path),
            lines=self.damaged_lines,
            kept=str(kept),
        )
        try:
            kept.unlink(missing_ok=True)
            kept.hardlink_to(self._path)
        except OSError as error:
            log.warning("damaged attachment log not kept", reason=error.strerror)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock)

    def _read(self) -> int:
        """Read all records; returns how many bytes of the file are valid."""
        former = self._path.with_name(FORMER_NAME)
        if former.exists():
            raise _other_format(former)
        lines = [*read_lines(self._path.read_bytes())] if self._path.exists() else []
        if not lines:
            return 0
        header = _read_header(self._path, lines[0])
        if header is None:
            # Nobody knows of which boot it is. If it is of an earlier one, `recover` finds that all ports are gone.
            self.damaged_lines += 1
        else:
            self.rebooted = header.boot != self._boot
            self.is_damaged = header.damaged and not self.rebooted
        for line in self._whole_lines(lines if header is None else lines[1:]):
            self._number = line.number
            if line.attachment is None:
                super().delete(line.key)
            else:
                self._displace(line.attachment)
                super().put(line.attachment)
        self.is_damaged |= self.damaged_lines > 0 and not self.rebooted
        return lines[-1].end

    def _whole_lines(self, lines: Sequence[LogLine]) -> list[_Line]:
        """The lines that can be read, each once and in the order of their numbers; counts what is damaged."""
        decoded = [_decode(line.body) if line.body is not None else None for line in lines]
        found = [line for line in decoded if line is not None]
        # Lines of earlier versions have no number. They come first, in their order.
        unnumbered = [line for line in found if not line.number]
        numbered = {line.number: line for line in found if line.number}
        ordered = unnumbered + [numbered[number] for number in sorted(numbered)]
        repeated = len(found) - len(ordered)
        absent = max(numbered, default=0) - len(numbered)
        # A damaged line is absent too, unless it was the last one or is garbage that somebody has added.
        self.damaged_lines += max(len(decoded) - len(found), absent) + repeated
        return ordered

    def _displace(self, attachment: Attachment) -> None:
        """Delete the records that have an address of this one: the line that deleted them is lost."""
        if not self.damaged_lines or attachment.key in self._attachments:
            return
        network, addresses = attachment.endpoint.network_key, {*attachment.endpoint.addresses}
        for other in self:
            if other.endpoint.network_key == network and not addresses.isdisjoint(other.endpoint.addresses):
                super().delete(other.key)

    def _write(self, records: Sequence[tuple[EndpointKey, Attachment | None]]) -> None:
        if self._fd < 0:
            return  # called by `_read`: these lines are in the file already
        if any(attachment is not None and attachment.stage in _ADDING for _, attachment in records):
            self._reserve(self._size + (len(self._attachments) + 1) * RESERVE_BYTES)
        lasting = [(key, attachment) for key, attachment in records if not _is_volatile(attachment)]
        lines = [
            encode_line(msgspec.json.encode(_Line(key, attachment, self._number + count)))
            for count, (key, attachment) in enumerate(lasting, start=1)
        ]
        self._append(b"".join(lines))
        self._number += len(lines)
        # A deletion makes two lines obsolete: its own and the one before it.
        self._obsolete += sum(2 if attachment is None else key in self._attachments for key, attachment in lasting)
        if self._obsolete > COMPACT_AFTER:
            self._obsolete = 0  # also when it fails: the next try is as many lines away
            try:
                self._compact()
            except OSError as error:
                log.warning("attachment log compaction failed", reason=error.strerror)

    def _append(self, lines: bytes) -> None:
        """Append all of it or nothing: lines behind a torn one would be ignored at the next start."""
        if not lines:
            return
        lines = self._separator + lines
        try:
            written = os.write(self._fd, lines)
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error.strerror}") from error
        if written < len(lines):
            # Truncating also gives back the blocks that were reserved behind the end.
            os.ftruncate(self._fd, self._size)
            self._reserved = self._size
            raise Unavailable(f"{self._path} cannot be written: {os.strerror(errno.ENOSPC)}")
        self._size += written
        self._separator = b""

    def _reserve(self, size: int) -> None:
        """Reserve disk space up to this file size; `Unavailable` when there is none."""
        if size <= self._reserved:
            return
        size += _RESERVE_STEP
        if _LIBC.fallocate(self._fd, FALLOC_FL_KEEP_SIZE, 0, size) != 0:
            number = ctypes.get_errno()
            if number not in _CANNOT_RESERVE:
                raise Unavailable(f"{self._path} cannot be written: {os.strerror(number)}")
        self._reserved = size

    def _compact(self) -> None:
        """Write the current records to a new file, and replace the log by it in one step."""
        fresh = self._path.with_suffix(".new")
        body = [encode_line(msgspec.json.encode(_Header(FORMAT, self._boot, self.is_damaged)))]
        body += [
            encode_line(msgspec.json.encode(_Line(attachment.key, attachment, number)))
            for number, attachment in enumerate(self, start=1)
        ]
        try:
            size = fresh.write_bytes(b"".join(body))
            fresh.chmod(0o600)
            fresh.replace(self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        self._size = size
        self._number = len(self._attachments)
        self._separator = b""
        self._start_appending()
        self._obsolete = 0

    def _start_appending(self) -> None:
        """Append to the file from now on, behind its valid lines."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)
        self._reserved = 0
        try:
            self._reserve(self._size + len(self._attachments) * RESERVE_BYTES)
        except Unavailable as error:
            log.warning("reserve space in attachment log exhausted", reason=error.message)


def read_boot_id() -> str:
    """The kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_volatile(attachment: Attachment | None) -> bool:
    """Whether neither kernel nor store has anything of it: a kill leaves nothing to undo, so it needs no line."""
    return attachment is not None and attachment.stage is Stage.ALLOCATED and not attachment.published


def _read_header(path: Path, first: LogLine) -> _Header | None:
    """The header; None if it is damaged or missing.

    It is checked before any record is read: records of another format must not be read by halves.
    """
    if first.body is None or _decode(first.body) is not None:
        return None
    try:
        header = msgspec.json.decode(first.body, type=_Header)
    except UNDECODABLE as error:
        raise _other_format(path) from error
    if header.format != FORMAT:
        raise _other_format(path)
    return header


def _other_format(path: Path) -> Malformed:
    return Malformed(
        f"{path} was written by another version of Weft and cannot be read (this one reads format {FORMAT}): "
        f"drain the node or reboot it, so that no attachment is left, delete {path} and start netplugin again"
    )


def _decode(body: bytes) -> _Line | None:
    """The line; None if this version cannot read it."""
    try:
        line = msgspec.json.decode(body, type=_Line)
        if line.attachment is not None:
            _ = line.attachment.endpoint.addresses  # `Invalid` for an address that is none
    except (*UNDECODABLE, Invalid):
        return None
    return line
