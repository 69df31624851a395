"""Each test here has the kernel to itself: its thread is in network and mount namespaces made for it, and comes back.

Needs root. Names never collide with another run's, nothing reaches the machine's own network, and all is gone with the
test: pinned namespaces are held by mounts that nobody else sees.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.support.policy_testbed import PolicyTestbed, open_ward

from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NETFILTER, ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.namespaces import stepped_apart
from weft.lab.servers.processes import DEADLINE


class TenantNetns:
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

    def __call__(self, name: str) -> TenantNetns: ...


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """The test's thread in namespaces of its own, with loopback up."""
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    with stepped_apart():
        yield


@pytest.fixture
def directory(apart: None, tmp_path: Path) -> NamespaceDirectory:
    directory = NamespaceDirectory(tmp_path / "netns")
    directory.prepare()
    return directory


@pytest.fixture
def here(apart: None) -> Iterator[TenantNetns]:
    """Where the test itself is."""
    with ExitStack() as closing:
        yield TenantNetns(Namespace.current(), closing)


@pytest.fixture
def make_space(directory: NamespaceDirectory) -> Iterator[MakeSpace]:
    with ExitStack() as closing:
        yield lambda name: TenantNetns(directory.create(name), closing)


@pytest.fixture
def there(make_space: MakeSpace) -> TenantNetns:
    """Another namespace, such as a pod's."""
    return make_space("there")


@pytest.fixture
def fwdmode() -> str:
    """How networks are forwarded, where a test does not say otherwise by a parameter of this name."""
    return "routing"


@pytest.fixture
def ward(apart: None, tmp_path: Path, fwdmode: str) -> Iterator[PolicyTestbed]:
    """A tenant's space without pods."""
    with open_ward(tmp_path, fwdmode=fwdmode) as ward:
        yield ward
