"""`weft uninstall-node`: nothing of ours is left on the machine, and nobody is cut off by mistake."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK, ON_ALL
from tests.support.runtimes import Ran, run

from weft.lab.hosts import Host
from weft.lab.netlab import UPLINKS, NetLab

OTHERS = "99-others.conflist"


@pytest.fixture
async def host(lab: NetLab) -> Host:
    await lab.network("net", subnet="10.1.0.0/24", gateway="10.1.0.1")
    return await lab.host("one", "--node-ttl", "30")


async def uninstall(host: Host, *flags: str) -> Ran:
    """Run it on the host."""
    home = host.home
    places = {"bin-dir": home / "bin", "conf-dir": home / "net.d", "run-dir": home / "run", "data-dir": home / "data"}
    words = ("weft.cli", "uninstall-node", *(f"--{name}={path}" for name, path in places.items()), *flags)
    if host.switch is not None:
        words += ("--datapath=ovs", f"--ovs-dir={host.switch.directory}")
    machine = (str(host.machine), str(host.boot_id))
    return await run(sys.executable, "-m", "weft.lab.run_in_netns", *machine, *words)


def left(host: Host) -> list[object]:
    """What of ours can be found on a host."""
    tables = inventory.ask(host.machine, "nft", "-j", "list", "tables")["nftables"][1:]
    routes = inventory.ask(host.machine, "ip", "-j", "route", "show", "table", "all", "proto", "87")
    devices = inventory.devices(host.machine) - {"eth0", *UPLINKS}
    bridges = host.switch.configure("list-br", wait=False).split() if host.switch else []
    places = [host.home / "run", host.home / "data", host.program, host.home / "net.d" / "10-weft.conflist"]
    return [*tables, *routes, *devices, *bridges, *filter(Path.exists, places)]


@ON_ALL
async def test_a_machine_is_as_before(host: Host) -> None:
    """And what others have there stays. Doing it again is fine."""
    others = host.home / "net.d" / OTHERS
    others.write_text('{"cniVersion": "1.0.0", "name": "others", "plugins": [{"type": "bridge"}]}')
    pod = await host.pod("a", network="net")
    assert left(host)
    await pod.detach()
    host.kill()
    host.kill_names()
    for _ in range(2):
        done = await uninstall(host)
        assert done.exit_code == 0, done.output
        assert left(host) == []
    assert others.exists()


@ALL_IN_SOAK
async def test_an_agent_that_runs_is_not_pulled_the_rug_from(host: Host) -> None:
    before = left(host)
    done = await uninstall(host, "--force")
    assert done.exit_code == 2
    assert "an agent runs on this machine" in done.output
    assert left(host) == before


@ALL_IN_SOAK
async def test_workloads_are_cut_off_by_force_only(host: Host) -> None:
    pod = await host.pod("a", network="net")
    host.kill()
    host.kill_names()
    before = left(host)
    done = await uninstall(host)
    assert done.exit_code == 2
    assert "1 workloads are attached" in done.output
    assert left(host) == before
    done = await uninstall(host, "--force")
    assert done.exit_code == 0, done.output
    assert left(host) == []
    assert inventory.devices(pod.netns) == set()


async def test_the_store_of_weft_up_goes_when_it_is_asked_for(host: Host) -> None:
    """Unless netmaster serves it."""
    host.kill()
    host.kill_names()
    data = host.home / "data"
    for name in ("weft.db", "weft.db-wal", "weft.db.lock"):
        (data / name).touch()
    with (data / "weft.db.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = await uninstall(host, "--with-store")
        assert done.exit_code == 2
        assert "netmaster runs on this machine" in done.output
    assert (data / "ledger").exists()
    done = await uninstall(host, "--with-store")
    assert done.exit_code == 0, done.output
    assert left(host) == []
    assert "removed" not in (await uninstall(host, "--with-store")).output.replace(f"removed {host.home / 'run'}", "")
