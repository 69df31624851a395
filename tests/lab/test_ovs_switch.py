"""The lab's own Open vSwitch: real daemons that forward packets and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

from weft.lab.servers.openvswitch import Switch, running_switch


def test_the_lab_switch_works_with_ovs_tools_and_daemon_restarts(tmp_path: Path) -> None:
    with running_switch(tmp_path / "ovs") as switch:
        switch.configure("add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev", "fail_mode=secure")
        switch.flows("add-flow", "br0", "priority=7,ip,actions=drop")
        assert any("priority=7,ip" in flow for flow in switch.dump_flows("br0"))
        switch.kill_daemon()
        switch.start_daemon()
        assert switch.dump_flows("br0") == []
        switch.kill_database()
        switch.start_database()
        assert "br0" in switch.configure("list-br")


def test_the_lab_switch_stops_with_its_context(tmp_path: Path) -> None:
    with running_switch(tmp_path / "ovs") as switch:
        pass
    _assert_stopped(switch)


def _assert_stopped(switch: Switch) -> None:
    try:
        switch.run("ovs-vsctl", f"--db={switch.database}", "--timeout=1", "--no-wait", "list-br")
    except AssertionError:
        return
    raise AssertionError("ovsdb-server still answers")
