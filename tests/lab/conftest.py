"""Each test here has the kernel to itself: its thread is in network and mount namespaces made for it, and comes back.

Needs root. Names never collide with another run's, nothing reaches the machine's own network, and all is gone with the
test: pinned namespaces are held by mounts that nobody else sees.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from weft.adapters.linux.links import LOOPBACK, alter_link
from weft.adapters.linux.netlink import NETFILTER, ROUTE, NetlinkSocket
from weft.adapters.linux.netns import Namespace, NamespaceDirectory
from weft.adapters.linux.wire import Request
from weft.testing.processes import DEADLINE

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x00000200, 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


class Space:
    """A namespace with our sockets into it, and what the usual tools say about it."""

    def __init__(self, namespace: Namespace, closing: ExitStack) -> None:
        self.namespace = closing.enter_context(namespace)
        self.route = closing.enter_context(NetlinkSocket(ROUTE, namespace=namespace))
        self.netfilter = closing.enter_context(NetlinkSocket(NETFILTER, namespace=namespace))

    def send(self, *requests: Request) -> None:
        self.route.send_batch(requests)

    def ask(self, *command: str) -> Any:
        """What a tool that speaks JSON prints when run inside; it must succeed."""
        output = self.namespace.run(
            lambda: subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE).stdout
        )
        return json.loads(output or "[]")


class MakeSpace(Protocol):
    """Makes and opens a pinned namespace."""

    def __call__(self, name: str) -> Space: ...


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _return_to(fd: int) -> None:
    # The kernel lets nobody change mounts who shares a working directory, and the test's threads may not be quite gone.
    _check(_LIBC.unshare(_CLONE_FS))
    _check(_LIBC.setns(fd, 0))


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """The test's thread in namespaces of its own, with loopback up."""
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    directory = Path.cwd()
    with ExitStack() as back:
        for kind in ("net", "mnt"):
            fd = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            back.callback(os.close, fd)
            back.callback(_return_to, fd)
        _check(_LIBC.unshare(_CLONE_NEWNET | _CLONE_NEWNS))
        _check(_LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
        with Namespace.current() as here, NetlinkSocket(ROUTE, namespace=here) as netlink:
            netlink.send_batch([alter_link(LOOPBACK, up=True)])
        yield
    os.chdir(directory)  # entering a mount namespace leads to its root


@pytest.fixture
def directory(apart: None, tmp_path: Path) -> NamespaceDirectory:
    directory = NamespaceDirectory(tmp_path / "netns")
    directory.prepare()
    return directory


@pytest.fixture
def here(apart: None) -> Iterator[Space]:
    """Where the test itself is."""
    with ExitStack() as closing:
        yield Space(Namespace.current(), closing)


@pytest.fixture
def make_space(directory: NamespaceDirectory) -> Iterator[MakeSpace]:
    with ExitStack() as closing:
        yield lambda name: Space(directory.create(name), closing)


@pytest.fixture
def there(make_space: MakeSpace) -> Space:
    """Another namespace, such as a pod's."""
    return make_space("there")
