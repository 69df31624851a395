"""Tunnels of both datapaths: their settings after a restart of the agent, and the nodes they accept packets from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.adapters.netns.devices import overlay_name
from weft.adapters.netns.host.vtep_ruleset import VTEP_TABLE
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.diff import diff
from weft.domain.desired.state import Gateway, Overlay, Prefix, RemoteRoute, StateItem, TenantNetns, VxlanPeer, rank
from weft.domain.ids import TenantName
from weft.drivers import DatapathSettings, LinuxDatapathSettings, OvsDatapathSettings, open_datapath
from weft.lab.servers.openvswitch import running_switch

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns as Netns

BLUE = TenantName("blue")
VNI = 7
OLD = parse_address("192.0.2.1", field="vtep")
PEER = VxlanPeer(BLUE, VNI, "192.0.2.2")
ROUTE = RemoteRoute(BLUE, Prefix(4, 0x0A010040, 26), VNI, PEER.vtep)
STATE: frozenset[StateItem] = frozenset(
    {
        TenantNetns(BLUE),
        Gateway(BLUE, Address(4, 0x0A01FFFE)),
        Overlay(BLUE, VNI),
        PEER,
        ROUTE,
    }
)

MakeSettings = Callable[[Address, int], DatapathSettings]


@pytest.fixture(params=["linux", "ovs"])
def make_settings(request: pytest.FixtureRequest, isolated: None, tmp_path: Path) -> Iterator[MakeSettings]:
    netns = tmp_path / "netns"
    if request.param == "linux":
        yield lambda vtep, port: LinuxDatapathSettings(directory=netns, vtep=vtep, vxlan_port=port)
        return
    with running_switch(tmp_path / "ovs") as switch:
        yield lambda vtep, port: OvsDatapathSettings(
            switch=switch.directory, directory=netns, vtep=vtep, vxlan_port=port
        )


def test_H1_existing_tunnels_get_a_new_vtep_address_and_port(
    make_settings: MakeSettings, here: Netns, tmp_path: Path
) -> None:
    """Other nodes drop what comes from the old address, which is no longer that of a node."""
    with open_datapath(make_settings(OLD, 4789)) as datapath:
        datapath.converge(STATE)
        assert tunnel(here, tmp_path) == ("192.0.2.1", 4789)
    for text, port in (("192.0.2.9", 4789), ("192.0.2.9", 8472), ("2001:db8::9", 8472)):
        vtep = parse_address(text, field="vtep")
        # No tunnel leads to a node of the other address family.
        state = STATE if vtep.family == 4 else STATE - {PEER}
        with open_datapath(make_settings(vtep, port)) as datapath:
            assert any(overlay_name(VNI) in each for each in datapath.converge(state).repaired)
            assert tunnel(here, tmp_path) == (text, port)
            assert not datapath.converge(state).repaired
            assert not datapath.has_drifted()


def tunnel(here: Netns, tmp_path: Path) -> tuple[str, int]:
    """The local address and the port of the VXLAN device: in the tenant netns, or in that of the switch."""
    pinned = tmp_path / "netns" / BLUE
    name = overlay_name(VNI)
    inside = subprocess.run(
        ["nsenter", f"--net={pinned}", "ip", "link", "show", name], check=False, capture_output=True
    )
    prefix = ("nsenter", f"--net={pinned}") if inside.returncode == 0 else ()
    (link,) = here.ask(*prefix, "ip", "-j", "-d", "link", "show", name)
    data = link["linkinfo"]["info_data"]
    return data.get("local") or data["local6"], data["port"]


def test_H1_packets_of_a_node_are_accepted_from_its_first_item_to_its_last(
    make_settings: MakeSettings, here: Netns
) -> None:
    """Each datapath keeps the table in step; what it does to packets shows `test_node_vxlan_injection`."""
    with open_datapath(make_settings(OLD, 4789)) as datapath:
        datapath.converge(STATE - {PEER, ROUTE})
        assert not peers(here)
        datapath.apply(diff(STATE, STATE - {PEER, ROUTE}, rank=rank))
        assert peers(here) == ["192.0.2.2"]
        datapath.apply(diff(STATE - {PEER, ROUTE}, STATE, rank=rank))
        assert not peers(here)
        datapath.converge(STATE)
        assert peers(here) == ["192.0.2.2"]
        datapath.uninstall()
        tables = here.ask("nft", "-j", "list", "tables")["nftables"]
        assert not [each for each in tables if each.get("table", {}).get("name") == VTEP_TABLE]


def peers(here: Netns) -> list[str]:
    listed = here.ask("nft", "-j", "list", "set", "inet", VTEP_TABLE, "vtep_peers")["nftables"]
    return next(each["set"].get("elem", []) for each in listed if "set" in each)
