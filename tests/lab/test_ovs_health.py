"""`weft doctor` on a real switch: each unmet requirement with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.adapters.ovs.control.health import check_switch
from weft.adapters.ovs.ovsdb.bridge import BRIDGE
from weft.lab.servers.openvswitch import Switch, running_switch

TSO = "userspace-tso-enable"


@pytest.fixture
def switch(isolated: None, tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


def add_bridge(switch: Switch, **settings: str) -> None:
    wanted = {"datapath_type": "netdev", "fail_mode": "secure", "protocols": "OpenFlow13,OpenFlow14,OpenFlow15"}
    words = [f"{name}={value}" for name, value in (wanted | settings).items()]
    switch.configure("add-br", BRIDGE, "--", "set", "bridge", BRIDGE, *words)


def remedies(switch: Switch) -> dict[str, str]:
    """The remedy of each failed check, by name."""
    return {result.name: result.remedy for result in check_switch(switch.directory) if result.remedy}


def test_a_healthy_switch(switch: Switch) -> None:
    """With and without our bridge, which netplugin creates."""
    assert remedies(switch) == {}
    add_bridge(switch)
    texts = {result.name: result.text for result in check_switch(switch.directory)}
    assert texts.keys() == {"ovsdb-server", "ovs-vswitchd", "forwarding", f"bridge {BRIDGE}"}
    assert "netdev" in texts["forwarding"]


def test_stopped_daemons_are_reported(switch: Switch) -> None:
    """One after the other; the other checks still run."""
    switch.kill_daemon()
    assert remedies(switch) == {"ovs-vswitchd": "start ovs-vswitchd, or see its log"}
    switch.configure("add-br", "another", wait=False)
    switch.kill_database()
    assert "--ovs-dir" in remedies(switch)["ovsdb-server"]
    switch.start()
    assert remedies(switch) == {}


def test_a_directory_without_a_switch(tmp_path: Path) -> None:
    (result,) = check_switch(tmp_path)
    assert result.is_fatal
    assert "start ovsdb-server" in result.remedy


def test_wrong_bridge_settings_and_foreign_controllers_are_reported(switch: Switch) -> None:
    """A foreign controller is a warning, a bridge that forwards everything without flows an error."""
    add_bridge(switch, fail_mode="standalone", protocols="OpenFlow10")
    texts = [result.text for result in check_switch(switch.directory) if result.remedy]
    assert any("fail_mode is standalone" in text for text in texts)
    assert any("OpenFlow13, OpenFlow14, OpenFlow15" in text for text in texts)
    switch.configure("del-br", BRIDGE)
    add_bridge(switch)
    switch.configure("set-controller", BRIDGE, "tcp:127.0.0.1:6653")
    (result,) = (check for check in check_switch(switch.directory) if check.remedy)
    assert "tcp:127.0.0.1:6653" in result.text
    assert (result.remedy, result.is_fatal) == (f"ovs-vsctl del-controller {BRIDGE}", False)


def test_missing_userspace_tso_is_reported(switch: Switch) -> None:
    switch.configure("remove", "Open_vSwitch", ".", "other_config", TSO)
    (result,) = (check for check in check_switch(switch.directory) if check.remedy)
    assert TSO in result.text
    assert "ovs-vsctl" in result.remedy
