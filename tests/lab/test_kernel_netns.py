"""Network namespaces: pin, open, enter and leave."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.domain.errors import DatapathFault, Invalid, NotFound, WeftError
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.servers.processes import DEADLINE, Child

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def test_a_lab_test_is_isolated_from_the_machine(here: TenantNetns) -> None:
    assert [link["ifname"] for link in here.ask("ip", "-j", "link")] == ["lo"]


def test_a_pinned_namespace_exists_without_a_process_until_it_is_deleted(directory: NamespaceDirectory) -> None:
    with directory.create("blue") as made:
        identity = made.identity
    with directory.open("blue") as found:
        assert found.identity == identity
    directory.delete("blue")
    assert directory.names() == frozenset()
    with pytest.raises(NotFound):
        directory.open("blue")


def test_create_and_delete_are_idempotent(directory: NamespaceDirectory) -> None:
    with directory.create("blue") as first, directory.create("blue") as second:
        assert first.identity == second.identity
    directory.delete("blue")
    directory.delete("blue")
    directory.delete("never-there")


def test_namespaces_are_distinct(directory: NamespaceDirectory) -> None:
    with directory.create("blue") as blue, directory.create("red") as red, Namespace.current() as here:
        assert len({blue.identity, red.identity, here.identity}) == 3
    assert directory.names() == {"blue", "red"}


def test_an_unmounted_pin_after_a_crash_is_not_listed_and_can_be_created(directory: NamespaceDirectory) -> None:
    (directory.path / "half").touch()
    assert directory.names() == frozenset()
    with pytest.raises(NotFound):
        directory.open("half")
    directory.create("half").close()
    assert directory.names() == {"half"}


def test_an_unprepared_directory_is_empty(tmp_path: Path) -> None:
    assert NamespaceDirectory(tmp_path / "none").names() == frozenset()


def test_preparing_again_keeps_pinned_namespaces(directory: NamespaceDirectory) -> None:
    directory.create("blue").close()
    NamespaceDirectory(directory.path).prepare()
    assert directory.names() == {"blue"}


def test_deletion_propagates_to_other_mount_namespaces(directory: NamespaceDirectory) -> None:
    """A container started later must not keep a tenant netns alive."""
    directory.create("blue").close()
    pinned = str(directory.path / "blue")
    wait = "echo ready; exec sleep 600"
    with Child(["unshare", "--mount", "--propagation", "slave", "sh", "-c", wait]) as other:
        assert other.read_line() == "ready"
        mounts = Path(f"/proc/{other.pid}/mountinfo")
        assert pinned in mounts.read_text()
        directory.delete("blue")
        assert pinned not in mounts.read_text()


@pytest.mark.parametrize("name", ["", ".", "..", "../blue", "a/b", ".hidden"])
def test_a_name_cannot_escape_the_directory(directory: NamespaceDirectory, name: str) -> None:
    for act in (directory.create, directory.open, directory.delete):
        with pytest.raises(Invalid):
            act(name)


def test_only_network_namespaces_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path, Path("/proc/self/ns/mnt"), Path("/dev/null")):
        with pytest.raises(Invalid):
            Namespace.open(path)
    for path in (tmp_path / "nothing", tmp_path / "file" / "below"):
        with pytest.raises(NotFound):
            Namespace.open(path)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory", "loop", "file"])
def test_L2_only_a_namespace_is_opened_and_nothing_blocks(tmp_path: Path, kind: str) -> None:
    """CNI_NETNS is any path. A FIFO without a writer would block the thread that all datapath work waits for."""
    path = tmp_path / "netns"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case "device":
            path = Path("/dev/tty")
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "file":
            path.write_text("")
    with ThreadPoolExecutor(1) as thread, pytest.raises(WeftError):
        thread.submit(Namespace.open, path).result(timeout=DEADLINE)


def test_run_executes_on_another_thread_and_returns_the_result(there: TenantNetns) -> None:
    with Namespace.current() as here:
        before = here.identity

    def read() -> tuple[object, object]:
        with Namespace.current() as inside:
            return inside.identity, threading.get_ident()

    identity, thread = there.namespace.run(read)
    assert identity == there.namespace.identity != before
    assert thread != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        there.namespace.run(lambda: 1 // 0)
    with Namespace.current() as here:
        assert here.identity == before


def test_a_socket_is_opened_in_the_namespace_and_the_thread_returns(there: TenantNetns) -> None:
    with Namespace.current() as here:
        before = here.identity
    with (
        there.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as inside,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as outside,
    ):
        inside.bind(("0.0.0.0", 0))
        inside.listen()
        outside.bind(("0.0.0.0", inside.getsockname()[1]))  # the same port is free in our namespace
        outside.listen()
    with Namespace.current() as here:
        assert here.identity == before


def test_the_thread_returns_if_the_socket_cannot_be_opened(there: TenantNetns) -> None:
    with Namespace.current() as here:
        with pytest.raises(DatapathFault):
            there.namespace.open_socket(socket.AF_NETLINK, socket.SOCK_RAW, 99)
        with Namespace.current() as after:
            assert after.identity == here.identity


def test_sysctls_are_written_inside_only(there: TenantNetns) -> None:
    before = FORWARD.read_text()
    other = "0" if before.strip() == "1" else "1"
    there.namespace.write_sysctls({"net/ipv4/ip_forward": other, "net/ipv6/conf/lo/disable_ipv6": "1"})
    assert FORWARD.read_text() == before
    assert there.namespace.run(FORWARD.read_text).strip() == other


def test_an_unknown_sysctl_is_named(there: TenantNetns) -> None:
    with pytest.raises(DatapathFault, match="net/ipv4/conf/nowhere/rp_filter"):
        there.namespace.write_sysctls({"net/ipv4/conf/nowhere/rp_filter": "1"})


def test_an_unchanged_sysctl_is_not_written(there: TenantNetns) -> None:
    """In a container `/proc/sys` may be read-only; this value is read-only everywhere."""
    count = there.namespace.run(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text).strip()
    there.namespace.write_sysctls({"net/netfilter/nf_conntrack_count": count})
