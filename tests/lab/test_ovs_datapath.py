"""OvsDatapath against a real switch: convergence, drift detection, restarts, and errors."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from ipaddress import ip_address
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support import inventory, switch_inventory

from weft.adapters.ovs.datapath import OvsDatapath
from weft.adapters.ovs.ovsdb import client
from weft.adapters.ovs.ovsdb.bridge import BRIDGE, OFPORTS, SwitchBridge, open_database
from weft.adapters.ovs.pipeline.tables import Table
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.segments import RemoteMac, Segment
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    Port,
    Prefix,
    QosProfile,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VxlanPeer,
)
from weft.domain.errors import DatapathFault, NotFound
from weft.domain.ids import TenantName
from weft.domain.policy.policymap.policy_state import WORKLOAD, IpIdentity
from weft.kernel.netns import NamespaceDirectory
from weft.lab.servers.openvswitch import Switch, running_switch
from weft.lab.traffic import UDP, NetnsAddress
from weft.lab.waiting import soon, until
from weft.ports.datapath import NO_CHANGE, EndpointConfig, InterfaceAddress, PlugRequest

BLUE = TenantName("blue")
VTEP = parse_address("192.0.2.1", field="vtep")
A = Address(4, 0x0A010001)
GATEWAY = Address(4, 0x0A01FFFE)
# Long enough that ADD and a packet would be done in the meantime, if ADD did not wait for the switch.
_PAUSE_S = 0.5
# ovs-vswitchd takes some milliseconds to walk so many ports.
_OTHERS = 100
PORT = Port(BLUE, "wp0000000000a", "02:02:0a:01:00:01", (A,))
BASE_STATE: frozenset[StateItem] = frozenset(
    {
        TenantNetns(BLUE),
        Gateway(BLUE, GATEWAY),
        Overlay(BLUE, 7),
        VxlanPeer(BLUE, 7, "192.0.2.2"),
        RemoteRoute(BLUE, Prefix(4, 0x0A010040, 26), 7, "192.0.2.2"),
        IpIdentity(BLUE, A, WORKLOAD | 1),
    }
)


@pytest.fixture
def switch(isolated: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


@pytest.fixture
def datapath(switch: Switch, tmp_path: Path) -> Iterator[OvsDatapath]:
    with OvsDatapath(
        switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789
    ) as datapath:
        yield datapath


def config(directory: NamespaceDirectory) -> EndpointConfig:
    """The configuration of `PORT`, for a container of endpoint e1."""
    directory.create("pod").close()
    return EndpointConfig(
        port=PORT,
        netns=str(directory.path / "pod"),
        interface="eth0",
        addresses=(InterfaceAddress(A, 16, GATEWAY),),
        mtu=1450,
        endpoint="e1",
        workload="c1",
    )


def other_config(directory: NamespaceDirectory, number: int) -> EndpointConfig:
    """The configuration of another endpoint; the caller creates its netns."""
    address = Address(4, A.number + number)
    port = Port(BLUE, f"wp{number:011x}", mac_of(address), (address,))
    netns = str(directory.path / f"pod{number}")
    return EndpointConfig(
        port=port, netns=netns, interface="eth0", addresses=(InterfaceAddress(address, 16, GATEWAY),), mtu=1450
    )


def test_converge_changes_nothing_without_drift(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    datapath.converge(BASE_STATE)
    datapath.plug(endpoint := config(directory))
    flows = switch.dump_flows(BRIDGE)
    assert not datapath.has_drifted()
    assert datapath.check(endpoint) == []
    assert datapath.converge(BASE_STATE | {PORT}).repaired == ()
    assert switch.dump_flows(BRIDGE) == flows
    assert not datapath.has_drifted()


def test_a_stale_remote_mac_does_not_affect_a_local_endpoint(
    datapath: OvsDatapath, directory: NamespaceDirectory
) -> None:
    """On a segment, a stale location of a local address is added and removed again."""
    segment = 7
    state: set[StateItem] = {
        TenantNetns(BLUE),
        Segment(BLUE, segment, floods=False),
        Gateway(BLUE, GATEWAY, segment),
    }
    state |= {Overlay(BLUE, segment), VxlanPeer(BLUE, segment, "192.0.2.2"), IpIdentity(BLUE, A, WORKLOAD | 1)}
    state |= {RemoteMac(BLUE, segment, "192.0.2.2", "02:02:0a:01:00:02", (Address(4, A.number + 1),))}
    datapath.converge(state)
    endpoint = config(directory)
    endpoint = replace(endpoint, port=replace(PORT, segment=segment))
    datapath.plug(endpoint)
    old = RemoteMac(BLUE, segment, "192.0.2.2", "02:02:0a:01:00:09", (A,))
    datapath.apply(Difference((old,), ()))
    datapath.apply(Difference((), (old,)))
    assert datapath.converge(state | {endpoint.port}).repaired == ()


def test_plug_batch_fails_only_the_faulty_request(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W26: it leaves nothing behind; the policy changes of the others apply in order."""
    datapath.converge(BASE_STATE)
    configs = [other_config(directory, number) for number in range(1, 5)]
    for number in (1, 2, 4):
        directory.create(f"pod{number}").close()
    first, later = (IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | number) for number in (8, 9))
    policies: list[Difference[StateItem]] = [
        Difference((first,), ()),
        Difference((later,), (first,)),
        NO_CHANGE,
        NO_CHANGE,
    ]
    faults = [*datapath.plug_batch([*map(PlugRequest, configs, policies)])]
    assert [type(fault) for fault in faults] == [type(None), type(None), NotFound, type(None)]
    wanted: set[StateItem] = {*BASE_STATE, later, *(configs[place].port for place in (0, 1, 3))}
    assert datapath.converge(wanted).repaired == ()
    assert sorted(name for name in switch.configure("list-ports", BRIDGE).split() if name.startswith("wp")) == [
        configs[place].port.interface for place in (0, 1, 3)
    ]
    assert all(datapath.check(configs[place]) == [] for place in (0, 1, 3))


async def test_the_first_packet_passes_even_if_the_device_came_up_late(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ovs-vswitchd has finished the iteration in which it created the device, and is paused then.

    When it goes on it replies, walks all ports, forwards, and only then sees that the device is up.
    """
    configs = first, late = other_config(directory, 1), other_config(directory, 2)
    addresses = [each.port.addresses[0] for each in configs]
    datapath.converge(BASE_STATE | {IpIdentity(BLUE, address, WORKLOAD | 1) for address in addresses})
    switch.configure(*f"add-br others -- set bridge others datapath_type=netdev {_ports('others', _OTHERS)}".split())
    with ExitStack() as closing, ExitStack() as paused_switch:
        namespaces = [closing.enter_context(directory.create(Path(each.netns).name)) for each in configs]
        endpoints = [
            NetnsAddress(namespace, ip_address(str(address)))
            for namespace, address in zip(namespaces, addresses, strict=True)
        ]
        datapath.plug(first)
        bring_up_ports = datapath._devices.bring_up_ports

        def bring_up_late(created: Iterable[EndpointConfig]) -> None:
            switch.configure("wait-until", "interface", late.port.interface, "ofport>0")
            switch.command("version")
            paused_switch.enter_context(switch.paused())
            threading.Timer(_PAUSE_S, paused_switch.close).start()
            bring_up_ports(created)

        monkeypatch.setattr(datapath._devices, "bring_up_ports", bring_up_late)
        datapath.plug(late)
        with endpoints[0].open_client(UDP) as sender, endpoints[1].listening(80, UDP) as listener:
            sender.sendto(b"first", (str(endpoints[1].address), 80))
            assert await soon(asyncio.get_running_loop().sock_recv(listener, 64)) == b"first"


def _ports(bridge: str, count: int) -> str:
    """Arguments of `ovs-vsctl` that add internal ports."""
    each = "-- add-port {0} {0}{1} -- set interface {0}{1} type=internal"
    return " ".join(each.format(bridge, number) for number in range(count))


def test_external_ids_name_the_endpoint(datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch) -> None:
    """S-20: endpoint and workload, by the keys that other tools use."""
    datapath.converge(BASE_STATE)
    datapath.plug(config(directory))
    assert_external_ids(switch)


def test_a_deleted_port_is_restored_with_its_external_ids(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """S-20: a new agent restores them from the alias of the device, which survives the switch."""
    datapath.converge(BASE_STATE)
    datapath.plug(endpoint := config(directory))
    switch.kill_daemon()
    switch.configure("del-port", BRIDGE, PORT.interface, wait=False)
    switch.start_daemon()
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789) as other:
        assert f"added port {PORT.interface}" in other.converge(BASE_STATE | {PORT}).repaired
        assert other.check(endpoint) == []
    assert_external_ids(switch)


@pytest.mark.parametrize("what", ["port", "host device", "pod device"])
def test_a_port_lost_with_its_device_is_missing_and_can_be_plugged_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path, what: str
) -> None:
    """R5: OVS deletes the device of a deleted port, and the kernel the macvlan on it."""
    datapath.converge(BASE_STATE)
    datapath.plug(endpoint := config(directory))
    assert datapath.converge(BASE_STATE | {PORT}).missing == frozenset()
    if what == "port":
        switch.configure("del-port", BRIDGE, PORT.interface)
    elif what == "host device":
        subprocess.run(["ip", "link", "del", PORT.interface], check=True, timeout=20)
    else:
        inventory.run(Path(endpoint.netns), f"ip link del {endpoint.interface}")
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(BASE_STATE | {PORT}).missing == {PORT}
        other.plug(endpoint)
        assert other.check(endpoint) == []
        report = other.converge(BASE_STATE | {PORT})
        assert (report.repaired, report.missing) == ((), frozenset())
    assert_external_ids(switch)


async def test_a_plain_file_at_the_netns_path_counts_as_gone(
    datapath: OvsDatapath, directory: NamespaceDirectory
) -> None:
    """A runtime that is killed between umount and rm leaves a file; the device of its pod still exists."""
    datapath.converge(BASE_STATE)
    datapath.plug(endpoint := config(directory))
    directory.delete("pod")
    await asyncio.to_thread(Path(endpoint.netns).touch)
    await until(
        lambda: datapath.converge(BASE_STATE | {PORT}).missing == {PORT}
    )  # the kernel deletes a netns asynchronously
    datapath.unplug(endpoint)
    datapath.reap()
    assert datapath.converge(BASE_STATE).repaired == ()


def test_ofport_request_follows_the_assigned_ofport(datapath: OvsDatapath, switch: Switch) -> None:
    """Otherwise OVS recreates the port when the requested number becomes free, and the macvlan is lost."""
    datapath.converge(BASE_STATE)
    taken = {"theirs": OFPORTS.stop - 1}
    with closing(open_database(switch.directory)) as database:
        bridge = SwitchBridge(database)
        bridge.prepare()
        for name in ("theirs", "ours"):
            wanted = {name: taken["theirs"]}
            assert bridge.wait_for_ofports(bridge.insert_ports({name: {}}, wanted, {name: 1450}), wanted) == {}
    columns = ("ofport", "ofport_request", "ifindex")
    assigned, requested, index = (switch.configure("get", "interface", "ours", column) for column in columns)
    assert assigned == requested != str(taken["theirs"])
    switch.configure("del-port", BRIDGE, "theirs")
    assert switch.configure("get", "interface", "ours", "ifindex") == index


def test_a_pod_interface_that_is_down_is_not_missing(datapath: OvsDatapath, directory: NamespaceDirectory) -> None:
    datapath.converge(BASE_STATE)
    datapath.plug(endpoint := config(directory))
    inventory.run(Path(endpoint.netns), f"ip link set {endpoint.interface} down")
    report = datapath.converge(BASE_STATE | {PORT})
    assert (report.repaired, report.missing) == ((), frozenset())


def assert_external_ids(switch: Switch) -> None:
    external_ids = switch.configure("get", "interface", PORT.interface, "external_ids")
    for pair in ("endpoint-id=e1", "vm-uuid=c1", f"iface-id={PORT.interface}", "iface-status=active"):
        assert pair in external_ids
    assert f'attached-mac="{PORT.mac}"' in external_ids


def test_a_new_datapath_finds_all_state(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    datapath.converge(BASE_STATE)
    datapath.plug(config(directory))
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(BASE_STATE | {PORT}).repaired == ()
        assert other.converge(frozenset()).repaired
    assert switch.configure("list-ports", BRIDGE).split() == []


def test_deleted_flows_are_detected_and_repaired(datapath: OvsDatapath, switch: Switch) -> None:
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    switch.flows("del-flows", BRIDGE, f"table={Table.L3_FORWARDING}")
    assert datapath.has_drifted()
    assert datapath.converge(BASE_STATE).repaired
    assert switch.dump_flows(BRIDGE) == flows


def test_an_outage_is_reported_once_and_again_on_recovery(datapath: OvsDatapath, switch: Switch) -> None:
    """W28: the agent need not retry while the switch is down, and converges at once when it is back."""
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    switch.kill_daemon()
    assert [datapath.has_drifted() for _ in range(3)] == [True, False, False]
    switch.start_daemon()
    assert datapath.has_drifted()
    assert datapath.converge(BASE_STATE).repaired
    assert not datapath.has_drifted()
    assert switch.dump_flows(BRIDGE) == flows


def test_a_restarted_switch_gets_its_flows_first(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W28: with their meters, before devices and netns are read; without flows that were removed meanwhile."""
    profile = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    datapath.converge(BASE_STATE)
    datapath.plug(config(directory), Difference((profile,), ()))
    flows, remote = switch.dump_flows(BRIDGE), RemoteRoute(BLUE, Prefix(4, 0x0A010080, 26), 7, "192.0.2.2")
    datapath.apply(Difference((remote,), ()))
    switch.kill_daemon()
    switch.start_daemon()
    datapath.apply(Difference((), (VxlanPeer(BLUE, 7, "192.0.2.2"),)))
    repaired = datapath.converge({*BASE_STATE, PORT, profile}).repaired
    subjects = [text.split()[1] for text in repaired]
    assert subjects[: len(flows) + 1] == ["meter", *["flow"] * len(flows)]
    assert not {"meter", "flow"} & {*subjects[len(flows) + 1 :]}
    assert switch.dump_flows(BRIDGE) == flows
    assert datapath.converge({*BASE_STATE, PORT, profile}).repaired == ()


def test_items_removed_during_an_outage_are_not_replayed(
    datapath: OvsDatapath, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W28: neither when removing them failed, nor when converge did not get that far."""
    removed = IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | 1)
    later = IpIdentity(BLUE, Address(4, A.number + 8), WORKLOAD | 1)
    profile = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    monkeypatch.setattr(client, "DEADLINE", 1.0)  # a stopped ovs-vswitchd assigns no ofports
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    for remove in (
        lambda: datapath.apply(Difference((), (removed,))),
        lambda: datapath.apply(Difference((profile,), (removed,))),
        lambda: datapath.apply(Difference((TenantNetns(TenantName("red")),), (removed,))),
        lambda: datapath.converge(BASE_STATE | {later}),
    ):
        datapath.converge(BASE_STATE | {removed})
        switch.kill_daemon()
        assert datapath.has_drifted()
        with pytest.raises(DatapathFault):
            datapath.converge(BASE_STATE | {removed})
        with pytest.raises(DatapathFault):
            remove()
        switch.start_daemon()
        assert datapath.has_drifted()
        assert switch.dump_flows(BRIDGE) == []
        datapath.converge(BASE_STATE)
        assert switch.dump_flows(BRIDGE) == flows


def test_flows_are_not_replayed_when_out_of_sync(datapath: OvsDatapath, switch: Switch) -> None:
    """W28: the agent knows of a change that it could not apply yet."""
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    switch.kill_daemon()
    assert datapath.has_drifted()
    switch.start_daemon()
    assert datapath.has_drifted(in_sync=False)
    assert switch.dump_flows(BRIDGE) == []
    datapath.converge(BASE_STATE)
    assert switch.dump_flows(BRIDGE) == flows


@pytest.mark.parametrize("away", ["database", "both"])
def test_prepared_flows_are_not_replayed_later(datapath: OvsDatapath, switch: Switch, away: str) -> None:
    removed = IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | 1)
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    datapath.converge(BASE_STATE | {removed})
    if away == "both":
        switch.kill_daemon()
    switch.kill_database()
    assert datapath.has_drifted()
    switch.start_database()
    if away == "both":
        switch.start_daemon()
    datapath.has_drifted()
    datapath.converge(BASE_STATE | {removed})
    datapath.apply(Difference((), (removed,)))
    switch.kill_daemon()
    switch.start_daemon()
    datapath.apply(Difference((), (VxlanPeer(BLUE, 7, "192.0.2.2"),)))
    datapath.has_drifted()
    assert not {*switch.dump_flows(BRIDGE)} - {*flows}
    datapath.converge(BASE_STATE)
    assert switch.dump_flows(BRIDGE) == flows


def test_a_new_datapath_replays_flows_to_a_restarted_switch(
    datapath: OvsDatapath, switch: Switch, tmp_path: Path
) -> None:
    """W28: it has not installed any of them itself."""
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(BASE_STATE).repaired == ()
        assert not other.has_drifted()
        switch.kill_daemon()
        assert other.has_drifted()
        switch.start_daemon()
        assert other.has_drifted()
        assert other._openflow.is_refilled  # during the handshake, which only this attribute shows
        assert switch.dump_flows(BRIDGE) == flows
        assert other.converge(BASE_STATE).repaired == (f"replayed {len(flows)} flows to the restarted ovs-vswitchd",)
        assert not other.has_drifted()


def test_unplugging_a_metered_port_during_an_outage_does_not_block_recovery(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W28: its flows refer to a meter that the restarted switch does not have."""
    profile = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    datapath.converge(BASE_STATE)
    flows = switch.dump_flows(BRIDGE)
    datapath.plug(endpoint := config(directory), Difference((profile,), ()))
    switch.kill_daemon()
    assert datapath.has_drifted()
    with pytest.raises(DatapathFault):
        datapath.unplug(endpoint, Difference((), (profile,)))
    datapath.reap()
    switch.start_daemon()
    assert datapath.has_drifted()
    datapath.converge(BASE_STATE)
    assert switch.dump_flows(BRIDGE) == flows
    assert not datapath.has_drifted()


def test_a_qos_profile_is_added_and_removed_with_its_port(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """A new agent finds it, and repairs drift of meters."""
    slow, fast = (QosProfile(BLUE, PORT.interface, rate, 10_000, 46, rate, 10_000) for rate in (6_000_000, 16_000_000))
    datapath.converge(BASE_STATE)
    before = switch.dump_flows(BRIDGE)
    datapath.plug(endpoint := config(directory), Difference((slow,), ()))
    assert set(switch_inventory.limits(switch, PORT.interface)) == {"out", "into"}
    datapath.apply(Difference((fast,), (slow,)))
    assert {each.rate for each in switch_inventory.limits(switch, PORT.interface).values()} == {16_000_000}
    wanted: frozenset[StateItem] = BASE_STATE | {PORT, fast}
    assert datapath.converge(wanted).repaired == ()
    own = switch_inventory.meters(switch)
    switch.flows("del-meter", BRIDGE, f"meter={min(own)}")
    assert datapath.has_drifted()
    switch.flows("mod-meter", BRIDGE, f"meter={max(own)},kbps,band=type=drop,rate=9")
    switch.flows("add-meter", BRIDGE, "meter=4000,kbps,band=type=drop,rate=9")
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789) as other:
        assert len(other.converge(wanted).repaired) == 5  # two meters and two flows put, one meter removed
        assert switch_inventory.meters(switch) == own
        assert other.converge(wanted).repaired == ()
        other.unplug(endpoint)
    assert switch_inventory.meters(switch) == set()
    assert switch.dump_flows(BRIDGE) == before


def test_missing_userspace_tso_is_refused_with_the_remedy(datapath: OvsDatapath, switch: Switch) -> None:
    switch.configure("remove", "Open_vSwitch", ".", "other_config", "userspace-tso-enable")
    with pytest.raises(DatapathFault, match="set it with ovs-vsctl and restart ovs-vswitchd"):
        datapath.converge(BASE_STATE)
    assert switch.configure("list-br").split() == []


def test_a_port_with_an_ofport_is_never_recreated(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """OVS clears the error of an early open attempt later than it assigns the number."""
    datapath.converge(BASE_STATE)
    datapath.plug(config(directory))
    row = switch.configure("get", "interface", PORT.interface, "_uuid")
    switch.configure(
        "set", "interface", PORT.interface, 'error="could not open network device (No such device)"', wait=False
    )
    assert datapath.converge(BASE_STATE | {PORT}).repaired == ()
    assert switch.configure("get", "interface", PORT.interface, "_uuid") == row
