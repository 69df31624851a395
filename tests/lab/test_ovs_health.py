"""What `weft doctor` finds of a real switch: each thing that is not as we need it, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.adapters.ovs.control.health import examine_switch
from weft.adapters.ovs.ovsdb.bridge import NAME
from weft.lab.servers.openvswitch import Switch, running_switch

TSO = "userspace-tso-enable"


@pytest.fixture
def switch(apart: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


def add_bridge(switch: Switch, **settings: str) -> None:
    wanted = {"datapath_type": "netdev", "fail_mode": "secure", "protocols": "OpenFlow13,OpenFlow14,OpenFlow15"}
    words = [f"{name}={value}" for name, value in (wanted | settings).items()]
    switch.configure("add-br", NAME, "--", "set", "bridge", NAME, *words)


def amiss(switch: Switch) -> dict[str, str]:
    """What is to be done, by what is not well."""
    return {found.name: found.remedy for found in examine_switch(switch.directory) if found.remedy}


def test_a_switch_that_is_well(switch: Switch) -> None:
    """With our bridge and without it: netplugin makes that."""
    assert amiss(switch) == {}
    add_bridge(switch)
    texts = {found.name: found.text for found in examine_switch(switch.directory)}
    assert texts.keys() == {"ovsdb-server", "ovs-vswitchd", "forwarding", f"bridge {NAME}"}
    assert "netdev" in texts["forwarding"]


def test_daemons_that_are_away_are_named(switch: Switch) -> None:
    """One after the other; what can still be looked at is."""
    switch.kill_daemon()
    assert amiss(switch) == {"ovs-vswitchd": "start ovs-vswitchd, or see its log"}
    switch.configure("add-br", "another", wait=False)
    switch.kill_database()
    assert "--ovs-dir" in amiss(switch)["ovsdb-server"]
    switch.start()
    assert amiss(switch) == {}


def test_a_directory_without_a_switch(tmp_path: Path) -> None:
    (found,) = examine_switch(tmp_path)
    assert found.stops_us
    assert "start ovsdb-server" in found.remedy


def test_a_bridge_that_others_have_a_hand_in(switch: Switch) -> None:
    """Controllers only warn; a bridge that passes everything on when nobody tells it otherwise does not."""
    add_bridge(switch, fail_mode="standalone", protocols="OpenFlow10")
    texts = [found.text for found in examine_switch(switch.directory) if found.remedy]
    assert any("fail_mode is standalone" in text for text in texts)
    assert any("OpenFlow13, OpenFlow14, OpenFlow15" in text for text in texts)
    switch.configure("del-br", NAME)
    add_bridge(switch)
    switch.configure("set-controller", NAME, "tcp:127.0.0.1:6653")
    (found,) = (each for each in examine_switch(switch.directory) if each.remedy)
    assert "tcp:127.0.0.1:6653" in found.text
    assert (found.remedy, found.stops_us) == (f"ovs-vsctl del-controller {NAME}", False)


def test_lost_checksums(switch: Switch) -> None:
    switch.configure("remove", "Open_vSwitch", ".", "other_config", TSO)
    (found,) = (each for each in examine_switch(switch.directory) if each.remedy)
    assert TSO in found.text
    assert "ovs-vsctl" in found.remedy
