"""Ports as they are read from the copy of the switch's database: again only where something has changed."""

from __future__ import annotations

import pytest

from weft.adapters.ovs.ovsdb.bridge import NAME, PORT_NUMBERS, SwitchBridge
from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.types import map_of, set_of, uuid

OURS = map_of({"weft": ""})


@pytest.fixture
def database() -> Database:
    """A copy with two ports of ours and one of somebody else, of a server that nobody asks."""
    database = Database("unix:/nowhere", columns={})
    for key, number, marks in (("a", 1, OURS), ("b", 2, OURS), ("theirs", 3, map_of({}))):
        database.tables["Interface"][f"i-{key}"] = {"name": key, "ofport": number, "error": set_of(())}
        database.tables["Port"][key] = {"name": key, "interfaces": uuid(f"i-{key}"), "external_ids": marks}
    database.tables["Bridge"]["0"] = {"name": NAME, "ports": set_of(map(uuid, ("a", "b", "theirs")))}
    database.changes += 1
    return database


def numbers(bridge: SwitchBridge) -> dict[str, int]:
    return {name: port.number for name, port in bridge.ports().items()}


def test_ports_of_others_are_not_ours(database: Database) -> None:
    assert numbers(SwitchBridge(database)) == {"a": 1, "b": 2}


def test_what_changes_is_read_again(database: Database) -> None:
    """Its number, its error, its marks; the others are as they were."""
    bridge = SwitchBridge(database)
    kept = bridge.ports()["b"]
    database.tables["Interface"]["i-a"] = {"name": "a", "ofport": -1, "error": "no such device"}
    database.changes += 1
    assert numbers(bridge) == {"a": 0, "b": 2}
    assert bridge.ports()["a"].error == "no such device"
    assert bridge.ports()["b"] is kept
    database.tables["Port"]["b"] = {**database.tables["Port"]["b"], "external_ids": map_of({})}
    database.changes += 1
    assert numbers(bridge) == {"a": 0}


def test_ports_come_and_go(database: Database) -> None:
    bridge = SwitchBridge(database)
    assert numbers(bridge) == {"a": 1, "b": 2}
    database.tables["Bridge"]["0"] = {"name": NAME, "ports": set_of([uuid("b"), uuid("theirs")])}
    database.changes += 1
    assert numbers(bridge) == {"b": 2}


def test_a_port_whose_interface_is_not_known_yet_has_no_number(database: Database) -> None:
    bridge = SwitchBridge(database)
    row = database.tables["Interface"].pop("i-a")
    database.changes += 1
    assert numbers(bridge) == {"a": 0, "b": 2}
    database.tables["Interface"]["i-a"] = row
    database.changes += 1
    assert numbers(bridge) == {"a": 1, "b": 2}


def test_a_port_whose_device_is_gone_has_no_number(database: Database) -> None:
    """The switch leaves it its number, and tells that no device of the kernel has an index for it."""
    bridge = SwitchBridge(database)
    for index, number in ((set_of(()), 1), (7, 1), (0, 0)):
        database.tables["Interface"]["i-a"] = {"name": "a", "ofport": 1, "error": set_of(()), "ifindex": index}
        database.changes += 1
        assert numbers(bridge) == {"a": number, "b": 2}
        assert bridge.ports()["a"].given == 1


def test_numbers_of_all_ports_are_taken_and_used_ones_come_back_last(database: Database) -> None:
    """They are none that the switch would give to somebody who asks for no number."""
    first = PORT_NUMBERS.start
    theirs = {"name": "theirs", "ofport": first + 1, "error": set_of(()), "ifindex": 0}  # a patch has no device
    database.tables["Interface"]["i-theirs"] = theirs
    database.changes += 1
    bridge = SwitchBridge(database)
    assert bridge.reserve_ofport(["c", "d"]) == {"c": first, "d": first + 2}
    assert bridge.reserve_ofport(["e"]) == {"e": first + 3}


def test_a_port_is_known_by_the_host_end_that_it_has_become(database: Database) -> None:
    """One that is nobody's yet is among no others; the names of both are taken."""
    bridge = SwitchBridge(database)
    for key, marks in (("a", {"weft": "", "iface-id": "wp1"}), ("b", {"weft": "", "weft-spare": ""})):
        database.tables["Port"][key] = {**database.tables["Port"][key], "external_ids": map_of(marks)}
    database.changes += 1
    assert numbers(bridge) == dict(bridge.numbers()) == {"wp1": 1}
    assert {name: port.name for name, port in bridge.ports().items()} == {"wp1": "a"}
    assert {name: port.number for name, port in bridge.spares().items()} == {"b": 2}
