"""The pool of pre-provisioned ports: endpoints on them work like others, and nothing of them is left."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support import inventory

from weft.adapters.ovs.datapath import OvsDatapath
from weft.adapters.ovs.ovsdb.bridge import BRIDGE, SwitchBridge, open_database
from weft.adapters.ovs.ovsdb.external_ids import endpoint_external_ids
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
# Three ports: an overlay device and the two netns ports.
BASE_STATE: frozenset[StateItem] = frozenset({TenantNetns(BLUE), Gateway(BLUE, GATEWAY), Overlay(BLUE, 7)})


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a node with few ports have a pool."""
    monkeypatch.setattr(pool, "PORTS_PER_POOL_PORT", 1)
    monkeypatch.setattr(pool, "MAX_POOL_SIZE", 2)


@pytest.fixture
def switch(isolated: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


def opened(switch: Switch, tmp_path: Path) -> OvsDatapath:
    return OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789)


@pytest.fixture
def datapath(switch: Switch, tmp_path: Path) -> Iterator[OvsDatapath]:
    with opened(switch, tmp_path) as datapath:
        datapath.converge(BASE_STATE)
        yield datapath


def config(directory: NamespaceDirectory, number: int = 1) -> EndpointConfig:
    """The configuration of an endpoint in a netns of its own."""
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


def with_ports(*configs: EndpointConfig) -> set[StateItem]:
    identities = {IpIdentity(BLUE, each.addresses[0].address, WORKLOAD | 1) for each in configs}
    return {*BASE_STATE, *identities, *(each.port for each in configs)}


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, check=True, timeout=20, text=True).stdout


def workload_devices() -> set[str]:
    """The devices of workload and pool ports, by primary name."""
    return {each["ifname"] for each in json.loads(ip("-j", "link")) if each["ifname"].startswith("wp")}


def pool_names(switch: Switch) -> set[str]:
    """The names of pool ports, read by ovs-vsctl."""
    found = switch.configure("--columns=name", "--bare", "find", "port", "external_ids:weft-pool!=no").split()
    return {*found} & {*switch.configure("list-ports", BRIDGE).split()}


async def until_ready(datapath: OvsDatapath, count: int) -> None:
    """Wait until at least so many pool ports can be assigned; for 0, until there are none."""

    def are_ready() -> bool:
        datapath.has_drifted()  # receives updates of OVSDB, as the agent does every 50 ms
        datapath.reap()
        ready = len(datapath._ports.pool.ready)  # not visible from outside
        return ready >= count if count else not ready

    await until(are_ready)


async def test_plug_assigns_a_pool_port(datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch) -> None:
    """OVS gets no new port. OVSDB and the kernel know it by the endpoint's interface name."""
    await until_ready(datapath, 2)
    before, ports = pool_names(switch), {*switch.configure("list-ports", BRIDGE).split()}
    assert len(before) == 2
    endpoint = config(directory)
    datapath.plug(endpoint)
    assert {*switch.configure("list-ports", BRIDGE).split()} == ports
    (taken,) = before - pool_names(switch)
    external_ids = switch.configure("get", "interface", taken, "external_ids")
    assert all(pair in external_ids for pair in ("endpoint-id=e1", "vm-uuid=c1", f"iface-id={endpoint.port.interface}"))
    assert "weft-pool" not in external_ids
    assert f" {taken}: " in ip("link", "show", endpoint.port.interface)
    assert datapath.check(endpoint) == []
    assert datapath.converge(with_ports(endpoint)).missing == frozenset()
    assert endpoint.port.interface in datapath.inspect()[0].ports


async def test_plug_creates_ports_when_the_pool_is_empty(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """Also in one batch with assigned ones; the pool is refilled afterwards."""
    await until_ready(datapath, 2)
    configs = [config(directory, number) for number in range(1, 5)]
    assert [*datapath.plug_batch([PlugRequest(each) for each in configs])] == [None] * 4
    assert all(datapath.check(each) == [] for each in configs)
    assert pool_names(switch) == set()
    await until_ready(datapath, 2)
    report = datapath.converge(with_ports(*configs))
    assert (report.missing, [text for text in report.repaired if "port" in text]) == (frozenset(), [])


async def test_a_new_datapath_finds_the_pool(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    await until_ready(datapath, 2)
    datapath.plug(endpoint := config(directory))
    await until_ready(datapath, 2)
    wanted = {*BASE_STATE, endpoint.port}
    left = pool_names(switch)
    with opened(switch, tmp_path) as other:
        report = other.converge(wanted)
        assert (report.repaired, report.missing) == ((), frozenset())
        assert other.check(endpoint) == []
        assert pool_names(switch) == left
        await until_ready(other, 1)
        other.unplug(endpoint)
        other.reap()
        assert other.converge(BASE_STATE).repaired == ()
        assert other.uninstall()
    assert switch.configure("list-br").split() == []
    assert workload_devices() == set()


async def test_unplug_deletes_a_pool_port_and_plug_can_follow_at_once(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    await until_ready(datapath, 2)
    endpoint = config(directory)
    for _ in range(3):
        datapath.plug(endpoint)
        assert datapath.check(endpoint) == []
        datapath.unplug(endpoint)
    datapath.reap()
    await until_ready(datapath, 2)
    assert datapath.converge(BASE_STATE).repaired == ()
    assert len(switch.configure("list-ports", BRIDGE).split()) == 5


@pytest.mark.parametrize("what", ["port", "host device", "pod device"])
async def test_a_lost_pool_port_is_missing_and_can_be_plugged_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, what: str
) -> None:
    await until_ready(datapath, 2)
    before = pool_names(switch)
    datapath.plug(endpoint := config(directory))
    (taken,) = before - pool_names(switch)
    if what == "port":
        switch.configure("del-port", BRIDGE, taken)
    elif what == "host device":
        ip("link", "del", endpoint.port.interface)
    else:
        inventory.run(Path(endpoint.netns), "ip link del eth0")
    await until(lambda: datapath.converge({*BASE_STATE, endpoint.port}).missing == {endpoint.port})
    datapath.plug(endpoint)
    assert datapath.check(endpoint) == []
    report = datapath.converge({*BASE_STATE, endpoint.port})
    assert (report.repaired, report.missing) == ((), frozenset())


async def test_a_port_deleted_during_an_outage_is_restored_under_its_name(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """The device survives both, so no pool port may get its name."""
    await until_ready(datapath, 2)
    before = pool_names(switch)
    datapath.plug(endpoint := config(directory))
    (taken,) = before - pool_names(switch)
    switch.kill_daemon()
    switch.configure("del-port", BRIDGE, taken, wait=False)
    switch.start_daemon()
    with opened(switch, tmp_path) as other:
        assert f"added port {endpoint.port.interface}" in other.converge({*BASE_STATE, endpoint.port}).repaired
        assert taken in switch.configure("list-ports", BRIDGE).split()
        assert other.check(endpoint) == []
        await until_ready(other, 2)
        assert taken not in pool_names(switch)


async def test_a_pool_port_is_not_reused_after_a_failed_assignment(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OVSDB is lost at that moment: the port number may have flows of the first endpoint."""
    await until_ready(datapath, 2)
    before = pool_names(switch)
    first, second = config(directory, 1), config(directory, 2)

    def fail(_: object) -> None:
        raise DatapathFault("connection closed by peer")

    with monkeypatch.context() as patch, pytest.raises(DatapathFault):
        patch.setattr(datapath._bridge, "assign_pool_ports", fail)
        datapath.plug(first)
    datapath.reap()
    datapath.plug(second)
    datapath.unplug(first)
    assert datapath.check(second) == []
    datapath.reap()
    await until_ready(datapath, 2)
    assert len(before & {*switch.configure("list-ports", BRIDGE).split()}) <= 1
    assert datapath.converge({*BASE_STATE, second.port}).missing == frozenset()
    assert datapath.check(second) == []


async def test_pool_ports_with_another_mtu_are_replaced(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """The underlay MTU has changed while the agent was stopped."""
    await until_ready(datapath, 2)
    old = pool_names(switch)
    for name in old:
        switch.configure("set", "port", name, "external_ids:weft-pool=1400")
        switch.configure("set", "interface", name, "mtu_request=1400")
    await until_ready(datapath, 2)
    assert pool_names(switch).isdisjoint(old)
    datapath.plug(endpoint := config(directory))
    assert datapath.check(endpoint) == []


@pytest.mark.parametrize("what", ["port", "device"])
async def test_a_deleted_pool_port_is_not_assigned(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, what: str
) -> None:
    await until_ready(datapath, 2)
    for name in pool_names(switch):
        if what == "port":
            switch.configure("del-port", BRIDGE, name)
        else:
            ip("link", "del", name)
    endpoint = config(directory)

    def can_plug() -> bool:
        """Retry like a runtime: the loss may not have been noticed yet."""
        try:
            datapath.plug(endpoint)
        except DatapathFault:
            datapath.unplug(endpoint)
            return False
        return True

    await until(can_plug)
    assert datapath.check(endpoint) == []
    datapath.converge({*BASE_STATE, endpoint.port})
    await until_ready(datapath, 2)


async def test_a_port_assigned_by_a_killed_agent_is_removed(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """The agent was killed after the OVSDB transaction and before it created the pod's end."""
    await until_ready(datapath, 2)
    name, endpoint = min(pool_names(switch)), config(directory)
    with closing(open_database(switch.directory)) as database:
        bridge = SwitchBridge(database)
        bridge.prepare()
        with bridge.assign_pool_ports({name: endpoint_external_ids(endpoint)}):
            pass
    with opened(switch, tmp_path) as other:
        assert other.converge({*BASE_STATE, endpoint.port}).missing == {endpoint.port}
        assert name not in switch.configure("list-ports", BRIDGE).split()
        other.plug(endpoint)
        assert other.check(endpoint) == []
        other.unplug(endpoint)
        other.reap()
        assert other.converge(BASE_STATE).repaired == ()


async def test_pool_ports_survive_a_vswitchd_restart(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W28: and so does an assigned one."""
    await until_ready(datapath, 2)
    datapath.plug(endpoint := config(directory))
    left = pool_names(switch)
    switch.kill_daemon()
    datapath.has_drifted()
    switch.start_daemon()
    report = datapath.converge({*BASE_STATE, endpoint.port})
    assert report.missing == frozenset()
    assert pool_names(switch) == left
    await until_ready(datapath, 1)
    datapath.plug(second := config(directory, 2))
    assert datapath.check(endpoint) == datapath.check(second) == []


async def test_recreated_pool_ports_are_set_up_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """`exit --cleanup` deletes their devices; new ones are down, and would get link-local addresses."""
    await until_ready(datapath, 2)
    switch.command("exit", "--cleanup")
    await until(lambda: not workload_devices())
    switch.kill_daemon()
    datapath.has_drifted()
    switch.start_daemon()
    datapath.converge(BASE_STATE)
    await until_ready(datapath, 2)
    assert all(is_bare(name) for name in pool_names(switch))
    before = pool_names(switch)
    datapath.plug(endpoint := config(directory))
    (taken,) = before - pool_names(switch)
    assert is_bare(taken)
    assert datapath.check(endpoint) == []


def is_bare(device: str) -> bool:
    """Whether a device is up, without addresses."""
    (link,) = json.loads(ip("-j", "address", "show", "dev", device))
    return "UP" in link["flags"] and link["addr_info"] == []


async def test_the_pool_has_hysteresis(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with just enough ports for a pool of one keeps it when it has one port less."""
    monkeypatch.setattr(pool, "PORTS_PER_POOL_PORT", 4)
    await until_ready(datapath, 0)
    datapath.plug(endpoint := config(directory))
    await until_ready(datapath, 1)
    before = pool_names(switch)
    datapath.unplug(endpoint)
    datapath.reap()
    datapath.reap()
    assert pool_names(switch) == before != set()


async def test_a_node_with_few_ports_has_no_pool(
    datapath: OvsDatapath, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polling each port has a cost."""
    await until_ready(datapath, 2)
    monkeypatch.setattr(pool, "PORTS_PER_POOL_PORT", 16)
    await until_ready(datapath, 0)
    datapath.reap()
    assert pool_names(switch) == set()
    assert workload_devices() == set()
    assert datapath.converge(BASE_STATE).repaired == ()
