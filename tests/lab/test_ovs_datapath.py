"""The datapath by itself: what it notices, what it finds, and what it refuses."""

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
from weft.adapters.ovs.ovsdb.bridge import NAME, PORT_NUMBERS, SwitchBridge, open_database
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
from weft.lab.traffic import UDP, Place
from weft.lab.waiting import soon, until
from weft.ports.datapath import NO_CHANGE, EndpointConfig, InterfaceAddress, PlugRequest

BLUE = TenantName("blue")
VTEP = parse_address("192.0.2.1", field="vtep")
A = Address(4, 0x0A010001)
GATEWAY = Address(4, 0x0A01FFFE)
# Long enough for a newcomer to be answered, and for a packet to be sent to it, by who does not wait for the switch.
_STILL_S = 0.5
# So many ports take the switch some milliseconds to go over.
_OTHERS = 100
PORT = Port(BLUE, "wp0000000000a", "02:02:0a:01:00:01", (A,))
GROUND: frozenset[StateItem] = frozenset(
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
def switch(apart: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


@pytest.fixture
def datapath(switch: Switch, tmp_path: Path) -> Iterator[OvsDatapath]:
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as datapath:
        yield datapath


def wiring(directory: NamespaceDirectory) -> EndpointConfig:
    """That of the port, as a container of the endpoint e1."""
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


def other_wiring(directory: NamespaceDirectory, number: int) -> EndpointConfig:
    """That of another workload; the caller makes its namespace."""
    address = Address(4, A.number + number)
    port = Port(BLUE, f"wp{number:011x}", mac_of(address), (address,))
    netns = str(directory.path / f"pod{number}")
    return EndpointConfig(
        port=port, netns=netns, interface="eth0", addresses=(InterfaceAddress(address, 16, GATEWAY),), mtu=1450
    )


def test_what_stands_is_left_as_it_is(datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch) -> None:
    datapath.converge(GROUND)
    datapath.plug(wired := wiring(directory))
    flows = switch.dump_flows(NAME)
    assert not datapath.has_drifted()
    assert datapath.check(wired) == []
    assert datapath.converge(GROUND | {PORT}).repaired == ()
    assert switch.dump_flows(NAME) == flows
    assert not datapath.has_drifted()


def test_news_of_others_leave_alone_who_is_here(datapath: OvsDatapath, directory: NamespaceDirectory) -> None:
    """On a segment too what stands is left as it is; an old place of an address is told of and gone again."""
    segment = 7
    ground: set[StateItem] = {
        TenantNetns(BLUE),
        Segment(BLUE, segment, floods=False),
        Gateway(BLUE, GATEWAY, segment),
    }
    ground |= {Overlay(BLUE, segment), VxlanPeer(BLUE, segment, "192.0.2.2"), IpIdentity(BLUE, A, WORKLOAD | 1)}
    ground |= {RemoteMac(BLUE, segment, "192.0.2.2", "02:02:0a:01:00:02", (Address(4, A.number + 1),))}
    datapath.converge(ground)
    wired = wiring(directory)
    wired = replace(wired, port=replace(PORT, segment=segment))
    datapath.plug(wired)
    old = RemoteMac(BLUE, segment, "192.0.2.2", "02:02:0a:01:00:09", (A,))
    datapath.apply(Difference((old,), ()))
    datapath.apply(Difference((), (old,)))
    assert datapath.converge(ground | {wired.port}).repaired == ()


def test_workloads_that_come_at_once_share_what_the_switch_does(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W26: one that fails leaves nothing and holds up nobody; the others' policy comes to where it leads in turn."""
    datapath.converge(GROUND)
    wirings = [other_wiring(directory, number) for number in range(1, 5)]
    for number in (1, 2, 4):
        directory.create(f"pod{number}").close()
    first, later = (IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | number) for number in (8, 9))
    policies: list[Difference[StateItem]] = [
        Difference((first,), ()),
        Difference((later,), (first,)),
        NO_CHANGE,
        NO_CHANGE,
    ]
    faults = [*datapath.plug_together([*map(PlugRequest, wirings, policies)])]
    assert [type(fault) for fault in faults] == [type(None), type(None), NotFound, type(None)]
    wanted: set[StateItem] = {*GROUND, later, *(wirings[place].port for place in (0, 1, 3))}
    assert datapath.converge(wanted).repaired == ()
    assert sorted(name for name in switch.configure("list-ports", NAME).split() if name.startswith("wp")) == [
        wirings[place].port.interface for place in (0, 1, 3)
    ]
    assert all(datapath.check(wirings[place]) == [] for place in (0, 1, 3))


async def test_the_first_packet_passes_however_late_the_device_was_up(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch was done with the round in which it made the device, and has not looked up since.

    When it does it answers, goes over all ports, forwards, and only then hears that the device is up.
    """
    wirings = first, late = other_wiring(directory, 1), other_wiring(directory, 2)
    addresses = [each.port.addresses[0] for each in wirings]
    datapath.converge(GROUND | {IpIdentity(BLUE, address, WORKLOAD | 1) for address in addresses})
    switch.configure(*f"add-br others -- set bridge others datapath_type=netdev {_ports('others', _OTHERS)}".split())
    with ExitStack() as closing, ExitStack() as still:
        spaces = [closing.enter_context(directory.create(Path(each.netns).name)) for each in wirings]
        places = [Place(space, ip_address(str(address))) for space, address in zip(spaces, addresses, strict=True)]
        datapath.plug(first)
        raise_made = datapath._devices.raise_made

        def raise_late(made: Iterable[EndpointConfig]) -> None:
            switch.configure("wait-until", "interface", late.port.interface, "ofport>0")
            switch.command("version")
            still.enter_context(switch.held_still())
            threading.Timer(_STILL_S, still.close).start()
            raise_made(made)

        monkeypatch.setattr(datapath._devices, "raise_made", raise_late)
        datapath.plug(late)
        with places[0].open_caller(UDP) as mouth, places[1].listening(80, UDP) as ear:
            mouth.sendto(b"first", (str(places[1].address), 80))
            assert await soon(asyncio.get_running_loop().sock_recv(ear, 64)) == b"first"


def _ports(bridge: str, count: int) -> str:
    """Ports that the switch makes, in the words of `ovs-vsctl`."""
    each = "-- add-port {0} {0}{1} -- set interface {0}{1} type=internal"
    return " ".join(each.format(bridge, number) for number in range(count))


def test_a_port_says_whose_it_is(datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch) -> None:
    """S-20: the endpoint and the workload, in the words that others look for."""
    datapath.converge(GROUND)
    datapath.plug(wiring(directory))
    tells_whose_it_is(switch)


def test_a_port_that_others_took_away_comes_back_as_it_was(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """S-20: one with no memory gives it the same marks, by what its device tells, which outlived the switch."""
    datapath.converge(GROUND)
    datapath.plug(wired := wiring(directory))
    switch.kill_daemon()
    switch.configure("del-port", NAME, PORT.interface, wait=False)
    switch.start_daemon()
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as other:
        assert f"added port {PORT.interface}" in other.converge(GROUND | {PORT}).repaired
        assert other.check(wired) == []
    tells_whose_it_is(switch)


@pytest.mark.parametrize("what", ["port", "host end", "workload's end"])
def test_a_port_that_was_lost_with_its_device_is_told_and_can_be_had_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path, what: str
) -> None:
    """R5: the switch takes the device of a port along, and the workload's end goes with that."""
    datapath.converge(GROUND)
    datapath.plug(wired := wiring(directory))
    assert datapath.converge(GROUND | {PORT}).missing == frozenset()
    if what == "port":
        switch.configure("del-port", NAME, PORT.interface)
    elif what == "host end":
        subprocess.run(["ip", "link", "del", PORT.interface], check=True, timeout=20)
    else:
        inventory.run(Path(wired.netns), f"ip link del {wired.interface}")
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(GROUND | {PORT}).missing == {PORT}
        other.plug(wired)
        assert other.check(wired) == []
        findings = other.converge(GROUND | {PORT})
        assert (findings.repaired, findings.missing) == ((), frozenset())
    tells_whose_it_is(switch)


async def test_a_namespace_that_has_left_a_file_behind_is_gone(
    datapath: OvsDatapath, directory: NamespaceDirectory
) -> None:
    """A runtime that is killed between umount and rm leaves one; the device of its pod is there as before."""
    datapath.converge(GROUND)
    datapath.plug(wired := wiring(directory))
    directory.delete("pod")
    await asyncio.to_thread(Path(wired.netns).touch)
    await until(lambda: datapath.converge(GROUND | {PORT}).missing == {PORT})  # the kernel takes its time
    datapath.unplug(wired)
    datapath.reap()
    assert datapath.converge(GROUND).repaired == ()


def test_a_port_that_was_given_another_number_asks_for_it_from_now_on(datapath: OvsDatapath, switch: Switch) -> None:
    """Else the switch makes it again when the one that was asked for is free, and what stands on it goes."""
    datapath.converge(GROUND)
    taken = {"theirs": PORT_NUMBERS.stop - 1}
    with closing(open_database(switch.directory)) as database:
        bridge = SwitchBridge(database)
        bridge.prepare()
        for name in ("theirs", "ours"):
            wanted = {name: taken["theirs"]}
            assert bridge.wait_for(bridge.ask_for({name: {}}, wanted, {name: 1450}), wanted) == {}
    columns = ("ofport", "ofport_request", "ifindex")
    given, asked, index = (switch.configure("get", "interface", "ours", column) for column in columns)
    assert given == asked != str(taken["theirs"])
    switch.configure("del-port", NAME, "theirs")
    assert switch.configure("get", "interface", "ours", "ifindex") == index


def test_a_workload_whose_end_is_down_has_lost_nothing(datapath: OvsDatapath, directory: NamespaceDirectory) -> None:
    datapath.converge(GROUND)
    datapath.plug(wired := wiring(directory))
    inventory.run(Path(wired.netns), f"ip link set {wired.interface} down")
    findings = datapath.converge(GROUND | {PORT})
    assert (findings.repaired, findings.missing) == ((), frozenset())


def tells_whose_it_is(switch: Switch) -> None:
    marks = switch.configure("get", "interface", PORT.interface, "external_ids")
    for mark in ("endpoint-id=e1", "vm-uuid=c1", f"iface-id={PORT.interface}", "iface-status=active"):
        assert mark in marks
    assert f'attached-mac="{PORT.mac}"' in marks


def test_one_with_no_memory_finds_everything(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    datapath.converge(GROUND)
    datapath.plug(wiring(directory))
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(GROUND | {PORT}).repaired == ()
        assert other.converge(frozenset()).repaired
    assert switch.configure("list-ports", NAME).split() == []


def test_what_others_do_to_our_flows_is_noticed_and_mended(datapath: OvsDatapath, switch: Switch) -> None:
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    switch.flows("del-flows", NAME, f"table={Table.ROUTE}")
    assert datapath.has_drifted()
    assert datapath.converge(GROUND).repaired
    assert switch.dump_flows(NAME) == flows


def test_a_switch_that_is_away_is_told_of_once_and_when_it_is_back(datapath: OvsDatapath, switch: Switch) -> None:
    """W28: whoever waits for it need not try again and again, and hears at once that it is worth it."""
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    switch.kill_daemon()
    assert [datapath.has_drifted() for _ in range(3)] == [True, False, False]
    switch.start_daemon()
    assert datapath.has_drifted()
    assert datapath.converge(GROUND).repaired
    assert not datapath.has_drifted()
    assert switch.dump_flows(NAME) == flows


def test_a_switch_that_was_started_anew_has_its_flows_first(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W28: with their meters, before devices and spaces are looked at; with nothing that was dropped meanwhile."""
    shape = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    datapath.converge(GROUND)
    datapath.plug(wiring(directory), Difference((shape,), ()))
    flows, remote = switch.dump_flows(NAME), RemoteRoute(BLUE, Prefix(4, 0x0A010080, 26), 7, "192.0.2.2")
    datapath.apply(Difference((remote,), ()))
    switch.kill_daemon()
    switch.start_daemon()
    datapath.apply(Difference((), (VxlanPeer(BLUE, 7, "192.0.2.2"),)))
    told = datapath.converge({*GROUND, PORT, shape}).repaired
    subjects = [text.split()[1] for text in told]
    assert subjects[: len(flows) + 1] == ["meter", *["flow"] * len(flows)]
    assert not {"meter", "flow"} & {*subjects[len(flows) + 1 :]}
    assert switch.dump_flows(NAME) == flows
    assert datapath.converge({*GROUND, PORT, shape}).repaired == ()


def test_what_is_withdrawn_while_the_switch_is_away_does_not_come_back_with_it(
    datapath: OvsDatapath, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W28: neither what was refused to be taken away nor what a round did not come to."""
    gone = IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | 1)
    later = IpIdentity(BLUE, Address(4, A.number + 8), WORKLOAD | 1)
    shape = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    monkeypatch.setattr(client, "DEADLINE", 1.0)  # a switch that is away numbers no ports
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    for withdraw in (
        lambda: datapath.apply(Difference((), (gone,))),
        lambda: datapath.apply(Difference((shape,), (gone,))),
        lambda: datapath.apply(Difference((TenantNetns(TenantName("red")),), (gone,))),
        lambda: datapath.converge(GROUND | {later}),
    ):
        datapath.converge(GROUND | {gone})
        switch.kill_daemon()
        assert datapath.has_drifted()
        with pytest.raises(DatapathFault):
            datapath.converge(GROUND | {gone})
        with pytest.raises(DatapathFault):
            withdraw()
        switch.start_daemon()
        assert datapath.has_drifted()
        assert switch.dump_flows(NAME) == []
        datapath.converge(GROUND)
        assert switch.dump_flows(NAME) == flows


def test_nothing_comes_back_with_the_switch_that_may_not_be_wanted_any_more(
    datapath: OvsDatapath, switch: Switch
) -> None:
    """W28: the agent has heard of something that it could not tell yet."""
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    switch.kill_daemon()
    assert datapath.has_drifted()
    switch.start_daemon()
    assert datapath.has_drifted(is_current=False)
    assert switch.dump_flows(NAME) == []
    datapath.converge(GROUND)
    assert switch.dump_flows(NAME) == flows


@pytest.mark.parametrize("away", ["database", "both"])
def test_what_stood_by_once_is_not_put_later(datapath: OvsDatapath, switch: Switch, away: str) -> None:
    gone = IpIdentity(BLUE, Address(4, A.number + 9), WORKLOAD | 1)
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    datapath.converge(GROUND | {gone})
    if away == "both":
        switch.kill_daemon()
    switch.kill_database()
    assert datapath.has_drifted()
    switch.start_database()
    if away == "both":
        switch.start_daemon()
    datapath.has_drifted()
    datapath.converge(GROUND | {gone})
    datapath.apply(Difference((), (gone,)))
    switch.kill_daemon()
    switch.start_daemon()
    datapath.apply(Difference((), (VxlanPeer(BLUE, 7, "192.0.2.2"),)))
    datapath.has_drifted()
    assert not {*switch.dump_flows(NAME)} - {*flows}
    datapath.converge(GROUND)
    assert switch.dump_flows(NAME) == flows


def test_one_with_no_memory_gives_a_switch_that_comes_back_its_flows(
    datapath: OvsDatapath, switch: Switch, tmp_path: Path
) -> None:
    """W28: it has put none of them itself."""
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as other:
        assert other.converge(GROUND).repaired == ()
        assert not other.has_drifted()
        switch.kill_daemon()
        assert other.has_drifted()
        switch.start_daemon()
        assert other.has_drifted()
        assert other._openflow.is_refilled  # with the first words, which nobody else can tell
        assert switch.dump_flows(NAME) == flows
        assert other.converge(GROUND).repaired == (f"put all {len(flows)} flows into a switch that was started anew",)
        assert not other.has_drifted()


def test_a_workload_with_a_limit_that_leaves_while_the_switch_is_away_holds_up_nobody(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """W28: its flows name a meter that nobody would put for them."""
    shape = QosProfile(BLUE, PORT.interface, 6_000_000, 10_000, 46)
    datapath.converge(GROUND)
    flows = switch.dump_flows(NAME)
    datapath.plug(wired := wiring(directory), Difference((shape,), ()))
    switch.kill_daemon()
    assert datapath.has_drifted()
    with pytest.raises(DatapathFault):
        datapath.unplug(wired, Difference((), (shape,)))
    datapath.reap()
    switch.start_daemon()
    assert datapath.has_drifted()
    datapath.converge(GROUND)
    assert switch.dump_flows(NAME) == flows
    assert not datapath.has_drifted()


def test_a_shape_comes_and_goes_with_its_port(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch, tmp_path: Path
) -> None:
    """One with no memory finds it, and mends what others did to it or left."""
    slow, fast = (QosProfile(BLUE, PORT.interface, rate, 10_000, 46, rate, 10_000) for rate in (6_000_000, 16_000_000))
    datapath.converge(GROUND)
    before = switch.dump_flows(NAME)
    datapath.plug(wired := wiring(directory), Difference((slow,), ()))
    assert set(switch_inventory.limits(switch, PORT.interface)) == {"out", "into"}
    datapath.apply(Difference((fast,), (slow,)))
    assert {each.rate for each in switch_inventory.limits(switch, PORT.interface).values()} == {16_000_000}
    wanted: frozenset[StateItem] = GROUND | {PORT, fast}
    assert datapath.converge(wanted).repaired == ()
    own = switch_inventory.meters(switch)
    switch.flows("del-meter", NAME, f"meter={min(own)}")
    assert datapath.has_drifted()
    switch.flows("mod-meter", NAME, f"meter={max(own)},kbps,band=type=drop,rate=9")
    switch.flows("add-meter", NAME, "meter=4000,kbps,band=type=drop,rate=9")
    with OvsDatapath(switch=switch.directory, directory=tmp_path / "spaces", vtep=VTEP, vxlan_port=4789) as other:
        assert len(other.converge(wanted).repaired) == 5  # two meters and two flows put, one meter removed
        assert switch_inventory.meters(switch) == own
        assert other.converge(wanted).repaired == ()
        other.unplug(wired)
    assert switch_inventory.meters(switch) == set()
    assert switch.dump_flows(NAME) == before


def test_lost_checksums_are_refused_with_the_remedy(datapath: OvsDatapath, switch: Switch) -> None:
    switch.configure("remove", "Open_vSwitch", ".", "other_config", "userspace-tso-enable")
    with pytest.raises(DatapathFault, match="set it with ovs-vsctl and restart ovs-vswitchd"):
        datapath.converge(GROUND)
    assert switch.configure("list-br").split() == []


def test_a_port_that_has_a_number_is_never_made_again(
    datapath: OvsDatapath, directory: NamespaceDirectory, switch: Switch
) -> None:
    """The switch may look for a device before that is there, and takes back later what it says of it then."""
    datapath.converge(GROUND)
    datapath.plug(wiring(directory))
    row = switch.configure("get", "interface", PORT.interface, "_uuid")
    switch.configure(
        "set", "interface", PORT.interface, 'error="could not open network device (No such device)"', wait=False
    )
    assert datapath.converge(GROUND | {PORT}).repaired == ()
    assert switch.configure("get", "interface", PORT.interface, "_uuid") == row
