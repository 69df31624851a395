"""`weft uninstall-node` removes everything of ours, and detaches workloads with `--force` only."""

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
    """Run `weft uninstall-node` on the host."""
    home = host.home
    places = {"bin-dir": home / "bin", "conf-dir": home / "net.d", "run-dir": home / "run", "data-dir": home / "data"}
    words = ("weft.cli", "uninstall-node", *(f"--{name}={path}" for name, path in places.items()), *flags)
    if host.switch is not None:
        words += ("--datapath=ovs", f"--ovs-dir={host.switch.directory}")
    machine = (str(host.netns), str(host.boot_id))
    return await run(sys.executable, "-m", "weft.lab.run_in_netns", *machine, *words)


def find_leftovers(host: Host) -> list[object]:
    """Tables, routes, devices, bridges and files of ours on a host."""
    tables = inventory.run_json(host.netns, "nft", "-j", "list", "tables")["nftables"][1:]
    routes = inventory.run_json(host.netns, "ip", "-j", "route", "show", "table", "all", "proto", "87")
    devices = inventory.devices(host.netns) - {"eth0", *UPLINKS}
    bridges = host.switch.configure("list-br", wait=False).split() if host.switch else []
    places = [host.home / "run", host.home / "data", host.program, host.home / "net.d" / "10-weft.conflist"]
    return [*tables, *routes, *devices, *bridges, *filter(Path.exists, places)]


@ON_ALL
async def test_nothing_of_ours_is_left(host: Host) -> None:
    """Files of other plugins are kept. A second run succeeds too."""
    others = host.home / "net.d" / OTHERS
    others.write_text('{"cniVersion": "1.0.0", "name": "others", "plugins": [{"type": "bridge"}]}')
    pod = await host.pod("a", network="net")
    assert find_leftovers(host)
    await pod.detach()
    host.kill()
    host.kill_netdns()
    for _ in range(2):
        done = await uninstall(host)
        assert done.exit_code == 0, done.output
        assert find_leftovers(host) == []
    assert others.exists()


@ALL_IN_SOAK
async def test_a_running_agent_blocks_the_uninstall(host: Host) -> None:
    before = find_leftovers(host)
    done = await uninstall(host, "--force")
    assert done.exit_code == 2
    assert "an agent runs on this machine" in done.output
    assert find_leftovers(host) == before


@ALL_IN_SOAK
async def test_workloads_are_detached_with_force_only(host: Host) -> None:
    pod = await host.pod("a", network="net")
    host.kill()
    host.kill_netdns()
    before = find_leftovers(host)
    done = await uninstall(host)
    assert done.exit_code == 2
    assert "1 workloads are attached" in done.output
    assert find_leftovers(host) == before
    done = await uninstall(host, "--force")
    assert done.exit_code == 0, done.output
    assert find_leftovers(host) == []
    assert inventory.devices(pod.netns) == set()


async def test_the_store_is_removed_with_store_option_only(host: Host) -> None:
    """It is kept while netmaster is running."""
    host.kill()
    host.kill_netdns()
    data = host.home / "data"
    for name in ("weft.db", "weft.db-wal", "weft.db.lock"):
        (data / name).touch()
    with (data / "weft.db.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = await uninstall(host, "--with-store")
        assert done.exit_code == 2
        assert "netmaster runs on this machine" in done.output
    assert (data / "attachments.log").exists()
    done = await uninstall(host, "--with-store")
    assert done.exit_code == 0, done.output
    assert find_leftovers(host) == []
    assert "removed" not in (await uninstall(host, "--with-store")).output.replace(f"removed {host.home / 'run'}", "")
