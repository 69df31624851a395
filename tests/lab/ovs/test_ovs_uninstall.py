"""`weft uninstall-node` and `weft doctor` on a machine that shares its Open vSwitch with others."""

from __future__ import annotations

import sys

from tests.support import inventory
from tests.support.runtimes import Ran, run
from tests.support.switch_inventory import BRIDGE

from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch

OTHER = "br-others"
TAP = "tap-others"


async def weft(host: Host, switch: Switch, *words: str) -> Ran:
    """Run a weft command on the host."""
    where = ("--datapath=ovs", f"--ovs-dir={switch.directory}")
    machine = (str(host.netns), str(host.boot_id))
    return await run(sys.executable, "-m", "weft.lab.run_in_netns", *machine, "weft.cli", *words, *where)


def add_foreign(host: Host, switch: Switch) -> None:
    """Add a foreign bridge with a port, and a foreign port and flow on our bridge."""
    inventory.run(host.netns, f"ip link add {TAP} type veth peer name {TAP}2")
    switch.configure("add-br", OTHER, "--", "set", "bridge", OTHER, "datapath_type=netdev")
    switch.configure("add-port", OTHER, TAP, "--", "add-port", BRIDGE, f"{TAP}2")
    switch.flows("add-flow", BRIDGE, "cookie=0x7,priority=9,udp,tp_dst=9,actions=drop")


async def test_uninstall_keeps_foreign_ports_and_bridges(lab: NetLab) -> None:
    host = await lab.host("one")
    switch = host.switch
    assert switch is not None
    pod = await host.pod("a")
    add_foreign(host, switch)
    await pod.detach()
    host.kill()
    host.kill_netdns()
    home = host.home
    paths = {"bin-dir": home / "bin", "conf-dir": home / "net.d", "run-dir": home / "run", "data-dir": home / "data"}
    for _ in range(2):
        done = await weft(host, switch, "uninstall-node", *(f"--{name}={path}" for name, path in paths.items()))
        assert done.exit_code == 0, done.output
    assert set(switch.configure("list-br").split()) == {OTHER, BRIDGE}
    assert switch.configure("list-ports", OTHER).split() == [TAP]
    assert switch.configure("list-ports", BRIDGE).split() == [f"{TAP}2"]
    assert "weft" not in switch.configure("get", "bridge", BRIDGE, "external_ids")
    (flow,) = switch.dump_flows(BRIDGE)
    assert "cookie=0x7" in flow
    assert not [name for name in inventory.devices(host.netns) if name.startswith(("wp", "wx", "wl"))]


async def test_doctor_reports_a_stopped_daemon(lab: NetLab) -> None:
    host = await lab.host("one")
    switch = host.switch
    assert switch is not None
    await host.pod("a")
    done = await weft(host, switch, "doctor", "--timeout=5")
    assert done.exit_code == 0, done.output
    assert f"bridge {BRIDGE}" in done.output
    switch.kill_daemon()
    done = await weft(host, switch, "doctor", "--timeout=5")
    assert done.exit_code == 1
    assert "start ovs-vswitchd" in done.output
