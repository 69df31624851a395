"""A machine for real CNI runtimes: a lab host with our plugin in the default directories."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.runtimes import make_root, mount_private_directories

from weft.cni import install
from weft.cni.chains import CONF_DIR
from weft.lab.hosts import Host
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import NetLab, open_lab
from weft.lab.waiting import until


@pytest.fixture
def isolated() -> Iterator[None]:
    """Run the test's thread in private namespaces, with empty state directories for runtimes."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with private_namespaces():
        mount_private_directories()
        yield


@pytest.fixture
async def lab(isolated: None, request: pytest.FixtureRequest) -> AsyncIterator[NetLab]:
    async with open_lab(datapath=getattr(request, "param", "linux")) as lab:
        try:
            yield lab
        finally:
            lab.print_logs()


class Machine:
    """The host, and checks for leftovers."""

    def __init__(self, lab: NetLab, host: Host) -> None:
        self._lab = lab
        self.host = host

    def write_list(self, name: str, *plugins: Mapping[str, object], version: str = "1.0.0") -> None:
        """Write a CNI network configuration list."""
        network = {"cniVersion": version, "name": name, "plugins": plugins}
        (CONF_DIR / f"{name}.conflist").write_text(json.dumps(network))

    async def used_addresses(self) -> set[str]:
        """The addresses in use, after kernel, rules, attachment log and store agree."""
        await inventory.wait_consistent(self._lab)
        return {used_addresses.address for used_addresses in inventory.stored(await self._lab.rest.state())}

    async def wait_until_clean(self) -> None:
        """Wait until no address is in use, no device is left, and no runtime has a cached attachment."""
        # A tenant netns is deleted after its last port, with all devices; it cannot be read meanwhile.
        await until(lambda: not inventory.tenant_netns(self.host))
        assert await self.used_addresses() == set()
        assert _cached_results() == []


def _link_default_paths(host: Host) -> None:
    """Link the agent's socket and the plugin at their default paths."""
    Path("/run/weft").symlink_to(host.home)
    assert install.main([]) == 0


def _cached_results() -> list[Path]:
    """The cached results of libcni."""
    return list(Path("/var/lib/cni/results").glob("*"))


@pytest.fixture
async def machine(lab: NetLab) -> Machine:
    """A host after `weft install-cni`."""
    # Runtimes like podman do not retry, and on a busy machine a node may miss heartbeats for seconds.
    host = await lab.host("one", "--node-ttl", "30")
    _link_default_paths(host)
    return Machine(lab, host)


@pytest.fixture
def root(isolated: None, tmp_path: Path) -> Path:
    """The root directory of containers."""
    return make_root(tmp_path / "root")
