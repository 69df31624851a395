"""CHECK compares each kernel object with the result of ADD; STATUS reports why the plugin is not ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK, ON_ALL
from tests.support.switch_inventory import BRIDGE

from weft.adapters.ovs.ovsdb.bridge import OFPORTS
from weft.cni.errors import CniError, Code
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import eventually, until

TRIES = 20

IN_POD = {
    "ip link set eth0 down": "eth0 is down",
    "ip addr flush dev eth0 scope global": "{address}",
    "ip route del default": "0.0.0.0/0",
    "ip link set eth0 address 02:00:00:00:00:77": "02:00:00:00:00:77",
    "ip neigh flush dev eth0 nud permanent": "neighbour",
    "ip link set eth0 name eth7": "eth0 is missing",
}
IN_TENANT_NETNS = {
    "ip link set {port} down": "{port} is down",
    "ip link del {port}": "{port} is missing",
    "ip route del {address} dev {port}": "{address}",
    "ip neigh del {address} dev {port}": "{address}",
    "nft flush set inet weft l3_spoofguard4": "{address}",
}
AT_SWITCH = {
    "ip link set {port} down": "{port} is down",
    "ip link del {port}": "{port} is missing",
    "ovs-vsctl --db={database} --no-wait del-port {port}": "{port} is not a port",
    "ovs-ofctl -O OpenFlow14 del-flows {bridge} ip,nw_src={address}": "ip_src={address}",
}


def host_side_netns(host: Host) -> Path:
    """The namespace of host-side interfaces: the tenant netns, or the node's own if they are OVS ports."""
    return host.tenants.path / "default" if host.switch is None else host.netns


def command_arguments(pod: Pod) -> Mapping[str, str]:
    """The arguments of the commands that break something."""
    switch = pod.host.switch
    own = {"address": str(pod.address()), "port": _port(pod)}
    return own if switch is None else own | {"database": switch.database, "bridge": switch.management(BRIDGE)}


@ALL_IN_SOAK
async def test_check_names_each_broken_object(lab: NetLab) -> None:
    host = await lab.host("one")
    await host.pod("other")
    for in_pod, breaks in ((True, IN_POD), (False, IN_TENANT_NETNS if host.switch is None else AT_SWITCH)):
        for command, expected in breaks.items():
            pod = await host.pod("a")
            await pod.check()
            words = command_arguments(pod)
            place = pod.netns if in_pod else host_side_netns(host)
            breaking = partial(inventory.run, place, command.format(**words))
            assert expected.format(**words) in str(await _check_error_after(pod, breaking))
            await pod.remove()
    pod = await host.pod("a")
    host.remove_netns("a")
    with pytest.raises(CniError, match="does not exist"):
        await pod.check()
    await pod.detach()
    with pytest.raises(CniError) as caught:
        await pod.check()
    assert caught.value.code == Code.UNKNOWN_CONTAINER


async def _check_error_after(pod: Pod, breaking: Callable[[], None]) -> CniError:
    """The error of CHECK after a break. The agent may repair it before CHECK runs; then it is broken again."""
    for _ in range(TRIES):
        breaking()
        try:
            await pod.check()
        except CniError as error:
            return error
    raise AssertionError(f"CHECK found nothing {TRIES} times")


def _port(pod: Pod) -> str:
    return pod.result.interfaces[0].name


@ALL_IN_SOAK
async def test_a_restart_repairs_drift(lab: NetLab) -> None:
    """R5: the agent restores the kernel state that the attachment log records."""
    await lab.network("net", subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    host = await lab.host("one")
    a, b = await host.pod("a", network="net"), await host.pod("b", network="net")
    if host.switch is None:
        for family in (4, 6):
            inventory.run(host_side_netns(host), f"ip -{family} route del {a.address(family)} dev {_port(a)}")
    else:
        host.switch.configure("del-port", BRIDGE, _port(a))
        host.switch.flows("del-flows", BRIDGE)
    inventory.run(host_side_netns(host), f"ip link set {_port(b)} down")
    inventory.run(host_side_netns(host), "nft flush ruleset")
    host.kill()
    await host.start()
    await a.check()
    await b.check()
    for family in (4, 6):
        assert await a.eventually_reaches(b, family=family)
    # An endpoint that was not published before the kill is published after the restart.
    await inventory.wait_consistent(lab)


@ALL_IN_SOAK
async def test_a_restart_does_not_touch_unchanged_state(lab: NetLab) -> None:
    """R5: no port is recreated."""
    host = await lab.host("one")
    pods = [await host.pod(name) for name in "abc"]
    await until(lambda: _indexes(host).keys() >= {_port(pod) for pod in pods})
    before = _indexes(host)
    for _ in range(2):
        host.kill()
        await host.start()
    assert _indexes(host) == before
    for pod in pods:
        await pod.check()


def _indexes(host: Host) -> dict[str, object]:
    """Ifindexes by device name and, on Open vSwitch, the ofport and row of each interface."""
    links = inventory.run_json(host_side_netns(host), "ip", "-j", "link")
    rows = _ofports(host.switch) if host.switch is not None else {}
    return {link["ifname"]: (link["ifindex"], rows.get(link["ifname"])) for link in links}


def _ofports(switch: Switch) -> dict[str, tuple[str, str]]:
    """The OVSDB row and the ofport of each interface."""
    listed = switch.configure("--format=csv", "--no-headings", "--columns=name,_uuid,ofport", "list", "interface")
    return {name: (row, number) for name, row, number in (line.split(",") for line in listed.split())}


@ON_ALL
async def test_used_ifindexes_and_ofports_are_skipped(lab: NetLab) -> None:
    """R6: the ifindexes, or ofports, that the agent would allocate next are in use already."""
    host = await lab.host("one")
    first = await host.pod("first")
    host.kill()
    await host.start()  # allocation starts after the highest ifindex in its tenant netns
    if host.switch is not None:
        _occupy_ofports(host.switch)
        assert await first.eventually_reaches(await host.pod("a"))
        return
    netns = host.make_netns("a")
    for number in range(1, 4):
        inventory.run(netns, f"ip link add x{number} index {(1 << 16) + 2 * number + 1} type veth peer name y{number}")
    pod = await host.pod("a")
    await pod.check()


def _occupy_ofports(switch: Switch) -> None:
    """Assign the next three ofports to foreign interfaces."""
    taken = {number for _, number in _ofports(switch).values()}
    for number in [each for each in OFPORTS if str(each) not in taken][:3]:
        name = f"x{number}"
        switch.configure(
            "add-port", BRIDGE, name, "--", "set", "interface", name, "type=internal", f"ofport_request={number}"
        )


@ALL_IN_SOAK
async def test_status_reports_why_it_is_not_ready(lab: NetLab) -> None:
    host = await lab.host("one", "--offline-limit", "1")
    await host.cni.status(host.network)
    await lab.partition(host)

    async def reason() -> str:
        try:
            await host.cni.status(host.network)
        except CniError as error:
            assert error.code in {Code.UNAVAILABLE, 51}
            return error.message
        return ""

    assert "store" in await eventually(reason, bool)
    lab.heal(host)
    await eventually(reason, lambda text: text == "")
    host.kill()
    assert "unreachable" in await reason()
