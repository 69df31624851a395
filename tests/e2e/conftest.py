"""A machine for real callers of CNI plugins: a lab's host, with our plugin installed where all of them look for it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.runtimes import make_root, take_own_disk

from weft.cni import install
from weft.cni.chains import CONF_DIR
from weft.lab.hosts import Host
from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import NetLab, open_lab
from weft.lab.waiting import until


@pytest.fixture
def apart() -> Iterator[None]:
    """The test's thread in namespaces of its own, where runtimes find an empty disk."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with stepped_apart():
        take_own_disk()
        yield


@pytest.fixture
async def lab(apart: None, request: pytest.FixtureRequest) -> AsyncIterator[NetLab]:
    async with open_lab(datapath=getattr(request, "param", "linux")) as lab:
        try:
            yield lab
        finally:
            lab.tell_logs()


class Machine:
    """The host, and what is left on it."""

    def __init__(self, lab: NetLab, host: Host) -> None:
        self._lab = lab
        self.host = host

    def write_list(self, name: str, *plugins: Mapping[str, object], version: str = "1.0.0") -> None:
        """A network of the administrator's own."""
        network = {"cniVersion": version, "name": name, "plugins": plugins}
        (CONF_DIR / f"{name}.conflist").write_text(json.dumps(network))

    async def held(self) -> set[str]:
        """The addresses in use, on which kernel, rules, ledger and store agree."""
        await inventory.settled(self._lab)
        return {held.address for held in inventory.stored(await self._lab.rest.state())}

    async def nothing_left(self) -> None:
        """Return when no address is taken, no device is left, and no runtime remembers an attachment."""
        # A tenant's space goes after its last port, with all devices: nobody can look into it while it does.
        await until(lambda: not inventory.spaces(self.host))
        assert await self.held() == set()
        assert _remembered() == []


def _make_usual(host: Host) -> None:
    """The agent is found where it is by default, and so is the plugin."""
    Path("/run/weft").symlink_to(host.home)
    assert install.main([]) == 0


def _remembered() -> list[Path]:
    """The results that libcni keeps of attachments, whoever of the runtimes uses it."""
    return list(Path("/var/lib/cni/results").glob("*"))


@pytest.fixture
async def machine(lab: NetLab) -> Machine:
    """A host on which `weft install-cni` was run."""
    # Callers like podman do not try again, and on a busy machine a node may be silent for seconds.
    host = await lab.host("one", "--node-ttl", "30")
    _make_usual(host)
    return Machine(lab, host)


@pytest.fixture
def root(apart: None, tmp_path: Path) -> Path:
    """What containers see as `/`."""
    return make_root(tmp_path / "root")
