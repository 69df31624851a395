"""Private network and mount namespaces for a process or a thread.

The kernel removes what was made in them when the last process in them ends, even after kill -9.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.domain.errors import DatapathFault
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, change_link
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import CLONE_NEWNET, Namespace
from weft.kernel.uapi.netlink import NETLINK_ROUTE

CLONE_FS, CLONE_NEWNS = 0x00000200, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_LIBC.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_MNT_DETACH = 2


def enter_private_namespaces() -> None:
    """Move the calling thread, and all that it starts from now on, into new network and mount namespaces."""
    unshare(CLONE_NEWNET | CLONE_NEWNS)
    # Private, or systemd's shared root would propagate our mounts to the rest of the machine.
    mount(None, Path("/"), flags=MS_REC | MS_PRIVATE)
    bring_up_loopback()


@contextmanager
def private_namespaces() -> Iterator[None]:
    """The same inside the block; the thread returns to its former namespaces afterwards."""
    directory = Path.cwd()
    with ExitStack() as back:
        for kind in ("net", "mnt"):
            fd = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            back.callback(os.close, fd)
            back.callback(_return_to, fd)
        enter_private_namespaces()
        yield
    os.chdir(directory)  # setns(2) to a mount namespace changes the working directory to its root


def _return_to(fd: int) -> None:
    unshare(CLONE_FS)  # setns(2) to a mount namespace fails with EINVAL while fs_struct is shared with another thread
    _check(_LIBC.setns(fd, 0), "return to the former namespace")


def bring_up_loopback() -> None:
    """Bring up the loopback device of the calling thread's network namespace."""
    with Namespace.current() as here, NetlinkSocket(NETLINK_ROUTE, namespace=here) as netlink:
        netlink.send_batch([change_link(LOOPBACK_IFINDEX, up=True)])


def unshare(flags: int) -> None:
    """Call unshare(2) with CLONE_* flags."""
    _check(_LIBC.unshare(flags), "unshare")


def enter(namespace: Path) -> None:
    """Move the calling thread into the network namespace at a path."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.setns(fd, CLONE_NEWNET), f"enter {namespace}")
    finally:
        os.close(fd)


def mount(source: Path | None, target: Path, *, flags: int = 0, kind: str | None = None) -> None:
    """Call mount(2) in the calling thread's mount namespace."""
    _check(
        _LIBC.mount(
            None if source is None else os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            flags,
            None,
        ),
        f"mount on {target}",
    )


def unmount(target: Path) -> None:
    """Detach a mount, even if it is busy."""
    _check(_LIBC.umount2(os.fsencode(target), _MNT_DETACH), f"unmount {target}")


def _check(result: int, doing: str) -> None:
    if result != 0:
        raise DatapathFault(f"{doing}: {os.strerror(ctypes.get_errno())}")
