"""Ports that are made in advance: who gets one is attached as everybody else, and nothing of them is left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support import inventory

from weft.adapters.ovs.datapath import OvsDatapath
from weft.adapters.ovs.ovsdb.bridge import NAME, SwitchBridge, open_database
from weft.adapters.ovs.ovsdb.external_ids import wiring_marks
from weft.adapters.ovs.ports import pool
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.desired.state import Gateway, Overlay, Port, StateItem, TenantNetns
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.domain.policy.policymap.policy_state import WORKLOAD, IpIdentity
from weft.kernel.netns import NamespaceDirectory
from weft.lab.servers.openvswitch import Switch, running_switch
from weft.lab.waiting import until
from weft.ports.datapath import EndpointConfig, InterfaceAddress, PlugRequest

BLUE = TenantName("blue")
VTEP = parse_address("192.0.2.1", field="vtep")
GATEWAY = Address(4, 0x0A01FFFE)
# Three ports of the switch: an overlay's device and two legs.
GROUND: frozenset[StateItem] = frozenset({TenantNetns(BLUE), Gateway(BLUE, GATEWAY), Overlay(BLUE, 7)})


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few ports are enough for some to spare."""
    monkeypatch.setattr(pool, "PORTS_FOR_ONE", 1)
    monkeypatch.setattr(pool, "MOST", 2)


@pytest.fixture
def switch(apart: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


def opened(switch: Switch, tmp_path: Path) -> OvsDatapath:
    return OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789)


@pytest.fixture
def datapath(switch: Switch, tmp_path: Path) -> Iterator[OvsDatapath]:
    with opened(switch, tmp_path) as datapath:
        datapath.converge(GROUND)
        yield datapath


def wiring(directory: NamespaceDirectory, number: int = 1) -> EndpointConfig:
    """That of a workload in a namespace of its own."""
    address = Address(4, 0x0A010000 + number)
    port = Port(BLUE, f"wp{number:011x}", mac_of(address), (address,))
    directory.create(f"pod{number}").close()
    return EndpointConfig(
        port=port,
        netns=str(directory.path / f"pod{number}"),
        interface="eth0",
        addresses=(InterfaceAddress(address, 16, GATEWAY),),
        mtu=1450,
        endpoint=f"e{number}",
        workload=f"c{number}",
    )


def with_ports(*wirings: EndpointConfig) -> set[StateItem]:
    members = {IpIdentity(BLUE, each.addresses[0].address, WORKLOAD | 1) for each in wirings}
    return {*GROUND, *members, *(each.port for each in wirings)}


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, check=True, timeout=20, text=True).stdout


def host_ends() -> set[str]:
    """The devices of workloads and of nobody, by their first names."""
    return {each["ifname"] for each in json.loads(ip("-j", "link")) if each["ifname"].startswith("wp")}


def spare_names(switch: Switch) -> set[str]:
    """By the tools of the switch."""
    found = switch.configure("--columns=name", "--bare", "find", "port", "external_ids:weft-spare!=no").split()
    return {*found} & {*switch.configure("list-ports", NAME).split()}


async def until_ready(datapath: OvsDatapath, count: int) -> None:
    """So many can be handed over at once, or more; or none at all."""

    def are_ready() -> bool:
        datapath.has_drifted()  # hears what the database tells, as the agent does all the time
        datapath.reap()
        ready = len(datapath._spares.ready)  # nobody else can tell
        return ready >= count if count else not ready

    await until(are_ready)


async def test_a_workload_is_given_a_port_that_was_there(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """The switch has no port more than before. It is known by the host end's name, to the kernel too."""
    await until_ready(datapath, 2)
    before, ports = spare_names(switch), {*switch.configure("list-ports", NAME).split()}
    assert len(before) == 2
    wired = wiring(directory)
    datapath.plug(wired)
    assert {*switch.configure("list-ports", NAME).split()} == ports
    (taken,) = before - spare_names(switch)
    marks = switch.configure("get", "interface", taken, "external_ids")
    assert all(mark in marks for mark in ("endpoint-id=e1", "vm-uuid=c1", f"iface-id={wired.port.interface}"))
    assert "weft-spare" not in marks
    assert f" {taken}: " in ip("link", "show", wired.port.interface)
    assert datapath.check(wired) == []
    assert datapath.converge(with_ports(wired)).missing == frozenset()
    assert wired.port.interface in datapath.survey()[0].ports


async def test_who_comes_when_none_is_left_has_one_made(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """Also together with those who were given one; and there are some to spare again soon."""
    await until_ready(datapath, 2)
    wirings = [wiring(directory, number) for number in range(1, 5)]
    assert [*datapath.plug_together([PlugRequest(each) for each in wirings])] == [None] * 4
    assert all(datapath.check(each) == [] for each in wirings)
    assert spare_names(switch) == set()
    await until_ready(datapath, 2)
    findings = datapath.converge(with_ports(*wirings))
    assert (findings.missing, [text for text in findings.repaired if "port" in text]) == (frozenset(), [])


async def test_one_with_no_memory_finds_them(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    await until_ready(datapath, 2)
    datapath.plug(wired := wiring(directory))
    await until_ready(datapath, 2)
    wanted = {*GROUND, wired.port}
    left = spare_names(switch)
    with opened(switch, tmp_path) as other:
        findings = other.converge(wanted)
        assert (findings.repaired, findings.missing) == ((), frozenset())
        assert other.check(wired) == []
        assert spare_names(switch) == left
        await until_ready(other, 1)
        other.unplug(wired)
        other.reap()
        assert other.converge(GROUND).repaired == ()
        assert other.withdraw()
    assert switch.configure("list-br").split() == []
    assert host_ends() == set()


async def test_a_workload_that_leaves_takes_its_port_along_and_may_come_again_at_once(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    await until_ready(datapath, 2)
    wired = wiring(directory)
    for _ in range(3):
        datapath.plug(wired)
        assert datapath.check(wired) == []
        datapath.unplug(wired)
    datapath.reap()
    await until_ready(datapath, 2)
    assert datapath.converge(GROUND).repaired == ()
    assert len(switch.configure("list-ports", NAME).split()) == 5


@pytest.mark.parametrize("what", ["port", "host end", "workload's end"])
async def test_a_port_that_is_lost_is_told_and_can_be_had_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, what: str
) -> None:
    await until_ready(datapath, 2)
    before = spare_names(switch)
    datapath.plug(wired := wiring(directory))
    (taken,) = before - spare_names(switch)
    if what == "port":
        switch.configure("del-port", NAME, taken)
    elif what == "host end":
        ip("link", "del", wired.port.interface)
    else:
        inventory.run(Path(wired.netns), "ip link del eth0")
    await until(lambda: datapath.converge({*GROUND, wired.port}).missing == {wired.port})
    datapath.plug(wired)
    assert datapath.check(wired) == []
    findings = datapath.converge({*GROUND, wired.port})
    assert (findings.repaired, findings.missing) == ((), frozenset())


async def test_a_port_that_is_lost_while_the_switch_is_away_comes_back_under_its_name(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """The device has outlived both; no other port is ever called like it."""
    await until_ready(datapath, 2)
    before = spare_names(switch)
    datapath.plug(wired := wiring(directory))
    (taken,) = before - spare_names(switch)
    switch.kill_daemon()
    switch.configure("del-port", NAME, taken, wait=False)
    switch.start_daemon()
    with opened(switch, tmp_path) as other:
        assert f"added port {wired.port.interface}" in other.converge({*GROUND, wired.port}).repaired
        assert taken in switch.configure("list-ports", NAME).split()
        assert other.check(wired) == []
        await until_ready(other, 2)
        assert taken not in spare_names(switch)


async def test_one_whose_handing_over_failed_is_given_to_nobody(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is lost at that very moment: its number may have flows of the first one."""
    await until_ready(datapath, 2)
    before = spare_names(switch)
    first, second = wiring(directory, 1), wiring(directory, 2)

    def fail(_: object) -> None:
        raise DatapathFault("the connection has ended")

    with monkeypatch.context() as patch, pytest.raises(DatapathFault):
        patch.setattr(datapath._bridge, "handing_over", fail)
        datapath.plug(first)
    datapath.reap()
    datapath.plug(second)
    datapath.unplug(first)
    assert datapath.check(second) == []
    datapath.reap()
    await until_ready(datapath, 2)
    assert len(before & {*switch.configure("list-ports", NAME).split()}) <= 1
    assert datapath.converge({*GROUND, second.port}).missing == frozenset()
    assert datapath.check(second) == []


async def test_those_of_another_mtu_are_given_to_nobody(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """What is below has changed while the agent was away."""
    await until_ready(datapath, 2)
    old = spare_names(switch)
    for name in old:
        switch.configure("set", "port", name, "external_ids:weft-spare=1400")
        switch.configure("set", "interface", name, "mtu_request=1400")
    await until_ready(datapath, 2)
    assert spare_names(switch).isdisjoint(old)
    datapath.plug(wired := wiring(directory))
    assert datapath.check(wired) == []


@pytest.mark.parametrize("what", ["port", "device"])
async def test_one_that_others_take_away_is_given_to_nobody(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, what: str
) -> None:
    await until_ready(datapath, 2)
    for name in spare_names(switch):
        if what == "port":
            switch.configure("del-port", NAME, name)
        else:
            ip("link", "del", name)
    wired = wiring(directory)

    def comes() -> bool:
        """As a runtime tries it; the loss may not have been heard of yet."""
        try:
            datapath.plug(wired)
        except DatapathFault:
            datapath.unplug(wired)
            return False
        return True

    await until(comes)
    assert datapath.check(wired) == []
    datapath.converge({*GROUND, wired.port})
    await until_ready(datapath, 2)


async def test_a_port_whose_owner_died_before_it_was_joined_is_taken_away(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """The agent was killed between the database's word and the kernel's."""
    await until_ready(datapath, 2)
    name, wired = min(spare_names(switch)), wiring(directory)
    with closing(open_database(switch.directory)) as database:
        bridge = SwitchBridge(database)
        bridge.prepare()
        with bridge.assign_pool_port({name: wiring_marks(wired)}):
            pass
    with opened(switch, tmp_path) as other:
        assert other.converge({*GROUND, wired.port}).missing == {wired.port}
        assert name not in switch.configure("list-ports", NAME).split()
        other.plug(wired)
        assert other.check(wired) == []
        other.unplug(wired)
        other.reap()
        assert other.converge(GROUND).repaired == ()


async def test_they_outlive_the_switch(datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch) -> None:
    """W28: and so does who was given one."""
    await until_ready(datapath, 2)
    datapath.plug(wired := wiring(directory))
    left = spare_names(switch)
    switch.kill_daemon()
    datapath.has_drifted()
    switch.start_daemon()
    findings = datapath.converge({*GROUND, wired.port})
    assert findings.missing == frozenset()
    assert spare_names(switch) == left
    await until_ready(datapath, 1)
    datapath.plug(second := wiring(directory, 2))
    assert datapath.check(wired) == datapath.check(second) == []


async def test_those_that_a_switch_makes_anew_are_raised_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """`exit --cleanup` takes their devices along; new ones are down, and would have addresses of the machine's."""
    await until_ready(datapath, 2)
    switch.command("exit", "--cleanup")
    await until(lambda: not host_ends())
    switch.kill_daemon()
    datapath.has_drifted()
    switch.start_daemon()
    datapath.converge(GROUND)
    await until_ready(datapath, 2)
    assert all(is_bare(name) for name in spare_names(switch))
    before = spare_names(switch)
    datapath.plug(wired := wiring(directory))
    (taken,) = before - spare_names(switch)
    assert is_bare(taken)
    assert datapath.check(wired) == []


def is_bare(device: str) -> bool:
    """Whether a device is up and the machine has no address on it."""
    (link,) = json.loads(ip("-j", "address", "show", "dev", device))
    return "UP" in link["flags"] and link["addr_info"] == []


async def test_who_comes_and_goes_has_nobody_make_ports(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has just ports enough for one to spare keeps it when it has one port less."""
    monkeypatch.setattr(pool, "PORTS_FOR_ONE", 4)
    await until_ready(datapath, 0)
    datapath.plug(wired := wiring(directory))
    await until_ready(datapath, 1)
    before = spare_names(switch)
    datapath.unplug(wired)
    datapath.reap()
    datapath.reap()
    assert spare_names(switch) == before != set()


async def test_a_node_with_few_ports_has_none(
    datapath: OvsDatapath, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs every packet a little."""
    await until_ready(datapath, 2)
    monkeypatch.setattr(pool, "PORTS_FOR_ONE", 16)
    await until_ready(datapath, 0)
    datapath.reap()
    assert spare_names(switch) == set()
    assert host_ends() == set()
    assert datapath.converge(GROUND).repaired == ()
