"""Network namespaces: open, enter, and pin by name so that they outlive the process.

No thread stays in another namespace. Work that takes time runs on a thread of its own, which ends with it. Opening a
socket or writing a sysctl takes microseconds, so the calling thread enters and returns: two thread switches cost
milliseconds on a busy machine. Nothing in this package depends on the caller's namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from weft.domain.errors import DatapathFault, Invalid, NotFound

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_SHARED, _MNT_DETACH = 0x1000, 0x100000, 2
_NS_GET_NSTYPE = 0xB703
_OWN = Path("/proc/thread-self/ns/net")
_SYSCTLS = Path("/proc/sys")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_LIBC.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
# PyDLL keeps the GIL during the call: setns and ioctl take a microsecond, handing the GIL over takes longer.
_LIBC_WITH_GIL = ctypes.PyDLL(None, use_errno=True)


class Identity(NamedTuple):
    """Identifies a namespace among those that exist; the kernel may reuse the inode afterwards."""

    device: int
    inode: int


class Namespace:
    """An open network namespace: the descriptor keeps it alive until `close`."""

    def __init__(self, fd: int, *, name: str) -> None:
        """Take ownership of a descriptor. The name is for messages only."""
        self.fd = fd
        self.name = name

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the namespace at a path, such as CNI_NETNS; `NotFound` when it does not exist.

        `Invalid` when the file is not a network namespace.
        """
        with _system_errors(f"network namespace {path}"):
            try:
                # The path comes from a runtime. A namespace is a regular file: opening a FIFO would block this thread
                # until somebody writes to it, and opening a device may do anything.
                if not stat.S_ISREG(path.stat().st_mode):
                    raise Invalid(f"{path} is not a network namespace")
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFound(f"network namespace {path} does not exist") from error
        if not _is_network_namespace(fd):
            os.close(fd)
            raise Invalid(f"{path} is not a network namespace")
        return cls(fd, name=str(path))

    @classmethod
    def current(cls) -> Self:
        """Open the calling thread's namespace."""
        return cls.open(_OWN)

    @classmethod
    def new(cls) -> Namespace:
        """Create an anonymous namespace, which is deleted with `close`."""

        def make() -> Namespace:
            _check(_LIBC.unshare(CLONE_NEWNET))
            return cls.current()

        with _system_errors("a new network namespace"):
            return _on_own_thread(make)

    @property
    def identity(self) -> Identity:
        status = os.fstat(self.fd)
        return Identity(status.st_dev, status.st_ino)

    def run(self, function: Callable[[], T]) -> T:
        """Run a function on a thread inside the namespace; return its result or raise its exception.

        The caller waits, so the function must end in bounded time.
        """

        def inside() -> T:
            self.enter()
            return function()

        return _on_own_thread(inside)

    def open_socket(self, family: int, kind: int, protocol: int = 0, *, home: Namespace | None = None) -> socket.socket:
        """Open a socket in the namespace; any thread may use it.

        `home` is the calling thread's namespace, for a caller that has it open already.
        """
        with self._entered(home), _system_errors(f"socket in network namespace {self.name}"):
            return socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)

    def write_sysctls(self, settings: Mapping[str, str]) -> None:
        """Write sysctls in order. They are named by path: `net/ipv4/conf/eth0/rp_filter`.

        A sysctl that has its value already is not written, so a read-only `/proc/sys` with the right values works.
        """
        with self._entered():
            for name, value in settings.items():
                path = _SYSCTLS / name
                with _system_errors(f"sysctl {name} in network namespace {self.name}"):
                    if path.read_text().strip() != value:
                        path.write_text(value)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self) -> None:
        """Move the calling thread into the namespace for good; for a thread or a program that ends there."""
        with _system_errors(f"network namespace {self.name}"):
            _check(_LIBC_WITH_GIL.setns(self.fd, CLONE_NEWNET))

    @contextmanager
    def _entered(self, home: Namespace | None = None) -> Iterator[None]:
        with nullcontext(home) if home else Namespace.current() as back:
            self.enter()
            try:
                yield
            finally:
                back.enter()


class NamespaceDirectory:
    """Namespaces pinned as bind mounts in a directory, as `ip netns` does: they exist until deleted.

    All operations are idempotent. Names become file names: `Invalid` for one with a slash or a leading dot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Create the directory as a shared mount, so that mounts in it propagate to other mount namespaces.

        Otherwise a namespace pinned from a container would vanish with the container, and one deleted here would stay
        alive in every mount namespace that was cloned meanwhile.
        """
        with _system_errors(f"directory {self.path}"):
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            try:
                _mount(None, self.path, _MS_SHARED)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: not a mount point yet
                    raise
                _mount(self.path, self.path, _MS_BIND)
                _mount(None, self.path, _MS_SHARED)

    def remove(self) -> None:
        """Undo `prepare`; idempotent. `DatapathFault` while the directory is not empty."""
        with _system_errors(f"directory {self.path}"):
            if not self.path.is_dir():
                return
            if any(self.path.iterdir()):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            try:
                while True:
                    _check(_LIBC.umount2(os.fsencode(self.path), _MNT_DETACH))
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: no longer a mount point
                    raise
            self.path.rmdir()

    def create(self, name: str) -> Namespace:
        """Open the namespace of that name; create it when it does not exist."""
        path = self._path_of(name)
        with _system_errors(f"network namespace {path}"):
            if not self._is_pinned(path):
                path.touch(mode=0o444)
                _on_own_thread(lambda: _pin_new(path))
        return Namespace.open(path)

    def open(self, name: str) -> Namespace:
        """Open the namespace of that name, or raise `NotFound`."""
        path = self._path_of(name)
        if not self._is_pinned(path):
            raise NotFound(f"network namespace {path} does not exist")
        return Namespace.open(path)

    def delete(self, name: str) -> None:
        """Unpin a namespace. The kernel deletes it and its devices when its last process and socket are gone."""
        path = self._path_of(name)
        with _system_errors(f"network namespace {path}"):
            if self._is_pinned(path):
                _check(_LIBC.umount2(os.fsencode(path), _MNT_DETACH))
            path.unlink(missing_ok=True)

    def names(self) -> frozenset[str]:
        """Return the names of all pinned namespaces. A file that a crash left without a mount is not one."""
        with _system_errors(f"directory {self.path}"):
            if not self.path.is_dir():
                return frozenset()
            return frozenset(path.name for path in self.path.iterdir() if self._is_pinned(path))

    def _path_of(self, name: str) -> Path:
        if not name or name.startswith(".") or "/" in name:
            raise Invalid(f"{name!r} is not a name for a network namespace")
        return self.path / name

    def _is_pinned(self, path: Path) -> bool:
        """Whether the path is a mount point: its device then differs from that of the directory."""
        try:
            return path.stat().st_dev != self.path.stat().st_dev
        except FileNotFoundError:
            return False


@contextmanager
def _system_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DatapathFault(f"{subject}: {error.strerror}") from error


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: Path | None, target: Path, flags: int) -> None:
    _check(_LIBC.mount(None if source is None else os.fsencode(source), os.fsencode(target), None, flags, None))


def _pin_new(path: Path) -> None:
    """Create and pin a namespace; runs on a thread that ends afterwards, because unshare moves it for good."""
    _check(_LIBC.unshare(CLONE_NEWNET))
    _mount(_OWN, path, _MS_BIND)


def _is_network_namespace(fd: int) -> bool:
    """Whether a descriptor is a network namespace; the ioctl fails on any other file."""
    return bool(_LIBC_WITH_GIL.ioctl(fd, _NS_GET_NSTYPE) == CLONE_NEWNET)


def _on_own_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # re-raised in the calling thread
            failures.append(error)

    thread = threading.Thread(target=run, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
