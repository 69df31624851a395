"""Our OVSDB client against a real ovsdb-server; ovs-vsctl judges what it wrote and writes what it must notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.adapters.ovs.ovsdb.client import Database, Operation
from weft.adapters.ovs.ovsdb.types import items_of, map_of, mapping_of, new_row, one_of, set_of, uuid
from weft.domain.errors import DatapathFault, Invalid
from weft.lab.servers.openvswitch import Switch, running_switch
from weft.lab.servers.processes import free_port
from weft.lab.waiting import until

COLUMNS = {
    "Open_vSwitch": ("bridges", "cur_cfg"),
    "Bridge": ("name", "ports", "external_ids"),
    "Interface": ("name", "ofport", "a_column_of_next_year"),
    "A_table_of_next_year": ("name",),
}


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        yield switch


@pytest.fixture
def database(switch: Switch) -> Iterator[Database]:
    database = Database(switch.database, columns=COLUMNS)
    yield database
    database.close()


def names(database: Database, table: str) -> set[str]:
    return {row["name"] for row in database.tables[table].values()}


def bridge(database: Database, name: str) -> list[Operation]:
    (root,) = database.tables["Open_vSwitch"]
    return [
        {"op": "insert", "table": "Interface", "uuid-name": "i", "row": {"name": name, "type": "internal"}},
        {"op": "insert", "table": "Port", "uuid-name": "p", "row": {"name": name, "interfaces": new_row("i")}},
        {
            "op": "insert",
            "table": "Bridge",
            "uuid-name": "b",
            "row": {"name": name, "ports": set_of([new_row("p")]), "external_ids": map_of({"who": "us"})},
        },
        {
            "op": "mutate",
            "table": "Open_vSwitch",
            "where": [["_uuid", "==", uuid(root)]],
            "mutations": [["bridges", "insert", new_row("b")]],
        },
    ]


def test_what_is_written_is_what_ovs_vsctl_reads(switch: Switch, database: Database) -> None:
    database.look()
    database.transact(bridge(database, "br0"))
    assert switch.configure("list-br").split() == ["br0"]
    assert switch.configure("br-get-external-id", "br0", "who").split() == ["us"]
    assert names(database, "Bridge") == {"br0"}


def test_what_others_write_is_noticed(switch: Switch, database: Database) -> None:
    """W49: columns and tables that this server has not are no matter, and those beyond our knowledge neither."""
    database.look()
    switch.configure("add-br", "br1", "--", "set", "bridge", "br1", "datapath_type=netdev")
    database.wait_until(lambda: "br1" in names(database, "Bridge"), doing="add br1")
    (row,) = database.tables["Bridge"].values()
    assert (len(items_of(row["ports"])), mapping_of(row["external_ids"])) == (1, {})
    database.wait_until(
        lambda: one_of(next(iter(database.tables["Interface"].values()))["ofport"], 0) == 65534, doing="number br1"
    )
    switch.configure("del-br", "br1")
    database.wait_until(lambda: not database.tables["Bridge"], doing="delete br1")


def test_a_transaction_that_is_refused_changes_nothing(switch: Switch, database: Database) -> None:
    database.look()
    operations = [*bridge(database, "br0"), {"op": "abort"}]
    with pytest.raises(DatapathFault, match="abort"):
        database.transact(operations)
    with pytest.raises(DatapathFault, match="No column next_year"):
        database.transact([{"op": "insert", "table": "Bridge", "row": {"next_year": 1}}])
    assert switch.configure("list-br").split() == []


def test_a_server_that_comes_back_is_listed_again(switch: Switch, database: Database) -> None:
    """W28: the switch is restarted under us."""
    database.look()
    switch.kill_database()
    with pytest.raises(DatapathFault):
        database.look()
    with pytest.raises(DatapathFault):
        database.transact([])
    switch.start_database()
    switch.configure("add-br", "br2", wait=False)
    database.look()
    assert names(database, "Bridge") == {"br2"}
    assert database.connections == 2


async def test_it_speaks_tcp_and_answers_when_it_is_asked_whether_it_lives(switch: Switch) -> None:
    port = free_port()
    control = str(switch.directory / "ovsdb.ctl")
    switch.run("ovs-appctl", "-t", control, "ovsdb-server/add-remote", f"ptcp:{port}:127.0.0.1")
    database = Database(f"tcp:127.0.0.1:{port}", columns=COLUMNS)

    def listens() -> bool:
        """The server says so before it does."""
        try:
            database.look()
        except DatapathFault:
            return False
        return True

    try:
        await until(listens)
        (root,) = database.tables["Open_vSwitch"]
        assert database.transact([{"op": "comment", "comment": "hello"}]) == [{}]
        assert root
    finally:
        database.close()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid, match="neither unix:PATH nor tcp:HOST:PORT"):
        Database("db.sock", columns=COLUMNS).look()
