"""Fixtures that run each test in its own network and mount namespaces.

Needs root. Names cannot collide with another run's, nothing reaches the machine's own network, and everything is
removed with the test: namespaces are pinned by bind mounts in the private mount namespace.
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
from tests.support.policy_testbed import PolicyTestbed, open_testbed

from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.kernel.uapi.netlink import NETLINK_NETFILTER, NETLINK_ROUTE
from weft.lab.namespaces import private_namespaces
from weft.lab.servers.processes import DEADLINE


class TenantNetns:
    """A network namespace with our netlink sockets and the output of `ip`, `tc` and `nft` inside it."""

    def __init__(self, namespace: Namespace, closing: ExitStack) -> None:
        self.namespace = closing.enter_context(namespace)
        self.route = closing.enter_context(NetlinkSocket(NETLINK_ROUTE, namespace=namespace))
        self.netfilter = closing.enter_context(NetlinkSocket(NETLINK_NETFILTER, namespace=namespace))

    def send(self, *requests: Request) -> None:
        self.route.send_batch(requests)

    def ask(self, *command: str) -> Any:
        """Run a command inside and return its JSON output; the command must succeed."""
        output = self.namespace.run(
            lambda: subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE).stdout
        )
        return json.loads(output or "[]")


class MakeNetns(Protocol):
    """Creates and opens a pinned namespace."""

    def __call__(self, name: str) -> TenantNetns: ...


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Run the test's thread in private namespaces, with loopback up."""
    if os.geteuid() != 0:
        pytest.skip("creating namespaces needs root")
    with private_namespaces():
        yield


@pytest.fixture
def directory(isolated: None, tmp_path: Path) -> NamespaceDirectory:
    directory = NamespaceDirectory(tmp_path / "netns")
    directory.prepare()
    return directory


@pytest.fixture
def here(isolated: None) -> Iterator[TenantNetns]:
    """The test's own namespace."""
    with ExitStack() as closing:
        yield TenantNetns(Namespace.current(), closing)


@pytest.fixture
def make_netns(directory: NamespaceDirectory) -> Iterator[MakeNetns]:
    with ExitStack() as closing:
        yield lambda name: TenantNetns(directory.create(name), closing)


@pytest.fixture
def there(make_netns: MakeNetns) -> TenantNetns:
    """Another namespace, such as a pod's."""
    return make_netns("there")


@pytest.fixture
def fwdmode() -> str:
    """The forwarding mode of networks; a test can override it with a parameter of this name."""
    return "routing"


@pytest.fixture
def testbed(isolated: None, tmp_path: Path, fwdmode: str) -> Iterator[PolicyTestbed]:
    """A tenant netns without pods."""
    with open_testbed(tmp_path, fwdmode=fwdmode) as testbed:
        yield testbed
