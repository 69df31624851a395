"""Ports decoded from the local copy of OVSDB, and again only after a change."""

from __future__ import annotations

import pytest

from weft.adapters.ovs.ovsdb.bridge import BRIDGE, OFPORTS, SwitchBridge
from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.types import map_of, set_of, uuid

OURS = map_of({"weft": ""})


@pytest.fixture
def database() -> Database:
    """A local copy, without a server, with two ports of ours and a foreign one."""
    database = Database("unix:/nowhere", columns={})
    for key, number, external_ids in (("a", 1, OURS), ("b", 2, OURS), ("theirs", 3, map_of({}))):
        database.tables["Interface"][f"i-{key}"] = {"name": key, "ofport": number, "error": set_of(())}
        database.tables["Port"][key] = {"name": key, "interfaces": uuid(f"i-{key}"), "external_ids": external_ids}
    database.tables["Bridge"]["0"] = {"name": BRIDGE, "ports": set_of(map(uuid, ("a", "b", "theirs")))}
    database.update_count += 1
    return database


def ofports(bridge: SwitchBridge) -> dict[str, int]:
    return {name: port.ofport for name, port in bridge.ports().items()}


def test_foreign_ports_are_ignored(database: Database) -> None:
    assert ofports(SwitchBridge(database)) == {"a": 1, "b": 2}


def test_only_changed_rows_are_read_again(database: Database) -> None:
    """Number, error and external_ids follow; the other ports are the same objects."""
    bridge = SwitchBridge(database)
    kept = bridge.ports()["b"]
    database.tables["Interface"]["i-a"] = {"name": "a", "ofport": -1, "error": "no such device"}
    database.update_count += 1
    assert ofports(bridge) == {"a": 0, "b": 2}
    assert bridge.ports()["a"].error == "no such device"
    assert bridge.ports()["b"] is kept
    database.tables["Port"]["b"] = {**database.tables["Port"]["b"], "external_ids": map_of({})}
    database.update_count += 1
    assert ofports(bridge) == {"a": 0}


def test_ports_are_added_and_removed(database: Database) -> None:
    bridge = SwitchBridge(database)
    assert ofports(bridge) == {"a": 1, "b": 2}
    database.tables["Bridge"]["0"] = {"name": BRIDGE, "ports": set_of([uuid("b"), uuid("theirs")])}
    database.update_count += 1
    assert ofports(bridge) == {"b": 2}


def test_a_port_without_an_interface_row_has_no_ofport(database: Database) -> None:
    bridge = SwitchBridge(database)
    row = database.tables["Interface"].pop("i-a")
    database.update_count += 1
    assert ofports(bridge) == {"a": 0, "b": 2}
    database.tables["Interface"]["i-a"] = row
    database.update_count += 1
    assert ofports(bridge) == {"a": 1, "b": 2}


def test_a_port_without_a_device_has_no_ofport(database: Database) -> None:
    """OVS keeps the number of a port whose device is gone, but its ifindex is 0."""
    bridge = SwitchBridge(database)
    for index, number in ((set_of(()), 1), (7, 1), (0, 0)):
        database.tables["Interface"]["i-a"] = {"name": "a", "ofport": 1, "error": set_of(()), "ifindex": index}
        database.update_count += 1
        assert ofports(bridge) == {"a": number, "b": 2}
        assert bridge.ports()["a"].assigned_ofport == 1


def test_ofports_are_unique_and_reused_last(database: Database) -> None:
    """They are outside the range that OVS assigns to ports without a request."""
    first = OFPORTS.start
    theirs = {"name": "theirs", "ofport": first + 1, "error": set_of(()), "ifindex": 0}  # a patch has no device
    database.tables["Interface"]["i-theirs"] = theirs
    database.update_count += 1
    bridge = SwitchBridge(database)
    assert bridge.reserve_ofport(["c", "d"]) == {"c": first, "d": first + 2}
    assert bridge.reserve_ofport(["e"]) == {"e": first + 3}


def test_an_assigned_pool_port_is_found_by_its_iface_id(database: Database) -> None:
    """A pool port is not among the ports in use."""
    bridge = SwitchBridge(database)
    for key, external_ids in (("a", {"weft": "", "iface-id": "wp1"}), ("b", {"weft": "", "weft-pool": ""})):
        database.tables["Port"][key] = {**database.tables["Port"][key], "external_ids": map_of(external_ids)}
    database.update_count += 1
    assert ofports(bridge) == dict(bridge.ofports()) == {"wp1": 1}
    assert {name: port.name for name, port in bridge.ports().items()} == {"wp1": "a"}
    assert {name: port.ofport for name, port in bridge.pool_ports().items()} == {"b": 2}
