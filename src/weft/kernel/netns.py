"""Network namespaces: opened, entered for a moment, and pinned under a name so that they outlive us.

A thread of ours never stays in a foreign namespace. What takes time inside runs on a thread made for it, which ends
with it; a socket or a sysctl is a matter of microseconds, so the calling thread goes in and comes back, which spares
two switches between threads (milliseconds on a busy machine). Nothing in this package depends on where its caller is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
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
# For what takes the kernel a microsecond: other threads go on waiting, since to take turns with them takes longer.
_BRIEF = ctypes.PyDLL(None, use_errno=True)


class Identity(NamedTuple):
    """What tells one living namespace from all others; a later one may get the same inode again."""

    device: int
    inode: int


class Namespace:
    """An open network namespace: it lives at least until `close`."""

    def __init__(self, fd: int, *, name: str) -> None:
        """Take over a descriptor. The name is for messages only."""
        self.fd = fd
        self.name = name

    @classmethod
    def open(cls, path: Path) -> Self:
        """The namespace at a path, such as a runtime hands over; `NotFound` when there is nothing.

        A file that is no network namespace is `Invalid`.
        """
        with _system_errors(f"network namespace {path}"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFound(f"network namespace {path} does not exist") from error
        if not _is_network_namespace(fd):
            os.close(fd)
            raise Invalid(f"{path} is not a network namespace")
        return cls(fd, name=str(path))

    @classmethod
    def current(cls) -> Self:
        """The calling thread's own."""
        return cls.open(_OWN)

    @classmethod
    def new(cls) -> Namespace:
        """One that nobody else can reach, and that is gone with `close`."""

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
        """The function's result, or its exception, from a thread that is inside the namespace.

        Waits for the function, which therefore must end in bounded time.
        """

        def inside() -> T:
            self.enter()
            return function()

        return _on_own_thread(inside)

    def open_socket(self, family: int, kind: int, protocol: int = 0, *, home: Namespace | None = None) -> socket.socket:
        """A socket that belongs to the namespace, and may be used from any thread.

        `home` is the calling thread's own namespace, for a caller who has it open already.
        """
        with self._visit(home), _system_errors(f"socket in network namespace {self.name}"):
            return socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)

    def write_sysctls(self, settings: Mapping[str, str]) -> None:
        """Give sysctls their values, in order. They are named by path: `net/ipv4/conf/eth0/rp_filter`.

        What has its value already is not written, so a read-only `/proc/sys` with the right values will do.
        """
        with self._visit():
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
        """Move the calling thread into it, for good. For a thread or a program that ends there."""
        with _system_errors(f"network namespace {self.name}"):
            _check(_BRIEF.setns(self.fd, CLONE_NEWNET))

    @contextmanager
    def _visit(self, home: Namespace | None = None) -> Iterator[None]:
        with nullcontext(home) if home else Namespace.current() as back:
            self.enter()
            try:
                yield
            finally:
                back.enter()


class NamespaceDirectory:
    """Namespaces pinned by name, as mounts in a directory: they stand until deleted, also when no process is inside.

    Every operation names an end state, and "already so" is success. Names become file names, so `Invalid` is raised for
    one with a slash or a leading dot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the directory, and make what is mounted in it show in other mount namespaces too.

        Without this a namespace pinned from inside a container would go with the container, and one deleted here would
        live on in every mount namespace that was copied meanwhile.
        """
        with _system_errors(f"directory {self.path}"):
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            try:
                _mount(None, self.path, _MS_SHARED)
            except OSError as error:
                if error.errno != errno.EINVAL:  # it is not a mount point yet
                    raise
                _mount(self.path, self.path, _MS_BIND)
                _mount(None, self.path, _MS_SHARED)

    def remove(self) -> None:
        """Undo `prepare`; gone already is fine. `DatapathFault` while something is in it."""
        with _system_errors(f"directory {self.path}"):
            if not self.path.is_dir():
                return
            if any(self.path.iterdir()):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            try:
                while True:
                    _check(_LIBC.umount2(os.fsencode(self.path), _MNT_DETACH))
            except OSError as error:
                if error.errno != errno.EINVAL:  # it is no mount point any more
                    raise
            self.path.rmdir()

    def create(self, name: str) -> Namespace:
        """The namespace of that name, new and empty unless it stands already."""
        path = self._path_of(name)
        with _system_errors(f"network namespace {path}"):
            if not self._is_pinned(path):
                path.touch(mode=0o444)
                _on_own_thread(lambda: _pin_new(path))
        return Namespace.open(path)

    def open(self, name: str) -> Namespace:
        """The namespace of that name, or `NotFound`."""
        path = self._path_of(name)
        if not self._is_pinned(path):
            raise NotFound(f"network namespace {path} does not exist")
        return Namespace.open(path)

    def delete(self, name: str) -> None:
        """Unpin it. The kernel takes it away, devices included, once no process and no socket is left inside."""
        path = self._path_of(name)
        with _system_errors(f"network namespace {path}"):
            if self._is_pinned(path):
                _check(_LIBC.umount2(os.fsencode(path), _MNT_DETACH))
            path.unlink(missing_ok=True)

    def names(self) -> frozenset[str]:
        """The names of all that are pinned. What a crash left half made is not among them."""
        with _system_errors(f"directory {self.path}"):
            if not self.path.is_dir():
                return frozenset()
            return frozenset(path.name for path in self.path.iterdir() if self._is_pinned(path))

    def _path_of(self, name: str) -> Path:
        if not name or name.startswith(".") or "/" in name:
            raise Invalid(f"{name!r} is not a name for a network namespace")
        return self.path / name

    def _is_pinned(self, path: Path) -> bool:
        """Whether something is mounted there: it is then on another device than the directory."""
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
    """To be run on a thread that ends afterwards: it moves into the new namespace, and the mount holds that."""
    _check(_LIBC.unshare(CLONE_NEWNET))
    _mount(_OWN, path, _MS_BIND)


def _is_network_namespace(fd: int) -> bool:
    """What is no namespace at all does not answer such a question."""
    return bool(_BRIEF.ioctl(fd, _NS_GET_NSTYPE) == CLONE_NEWNET)


def _on_own_thread(function: Callable[[], T]) -> T:
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # carried to the caller, whatever it is
            failures.append(error)

    thread = threading.Thread(target=run, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
