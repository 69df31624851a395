"""An agent that is restarted with other tunnel settings uses them for the networks that exist."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.adapters.netns.devices import overlay_name
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.state import Gateway, Overlay, Prefix, RemoteRoute, StateItem, TenantNetns, VxlanPeer
from weft.domain.ids import TenantName
from weft.drivers import DatapathSettings, LinuxDatapathSettings, OvsDatapathSettings, open_datapath
from weft.lab.servers.openvswitch import running_switch

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns as Netns

BLUE = TenantName("blue")
VNI = 7
OLD = parse_address("192.0.2.1", field="vtep")
PEER = VxlanPeer(BLUE, VNI, "192.0.2.2")
STATE: frozenset[StateItem] = frozenset(
    {
        TenantNetns(BLUE),
        Gateway(BLUE, Address(4, 0x0A01FFFE)),
        Overlay(BLUE, VNI),
        PEER,
        RemoteRoute(BLUE, Prefix(4, 0x0A010040, 26), VNI, "192.0.2.2"),
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
