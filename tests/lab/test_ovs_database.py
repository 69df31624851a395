"""Our OVSDB client against a real ovsdb-server, with ovs-vsctl as the other side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.adapters.ovs.ovsdb.client import Database, Operation
from weft.adapters.ovs.ovsdb.types import items_of, map_of, mapping_of, named_uuid, one_of, set_of, uuid
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
        {"op": "insert", "table": "Port", "uuid-name": "p", "row": {"name": name, "interfaces": named_uuid("i")}},
        {
            "op": "insert",
            "table": "Bridge",
            "uuid-name": "b",
            "row": {"name": name, "ports": set_of([named_uuid("p")]), "external_ids": map_of({"who": "us"})},
        },
        {
            "op": "mutate",
            "table": "Open_vSwitch",
            "where": [["_uuid", "==", uuid(root)]],
            "mutations": [["bridges", "insert", named_uuid("b")]],
        },
    ]


def test_ovs_vsctl_reads_what_we_write(switch: Switch, database: Database) -> None:
    database.poll()
    database.transact(bridge(database, "br0"))
    assert switch.configure("list-br").split() == ["br0"]
    assert switch.configure("br-get-external-id", "br0", "who").split() == ["us"]
    assert names(database, "Bridge") == {"br0"}


def test_updates_of_others_are_received(switch: Switch, database: Database) -> None:
    """W49: neither columns that the server lacks nor columns that we do not know matter."""
    database.poll()
    switch.configure("add-br", "br1", "--", "set", "bridge", "br1", "datapath_type=netdev")
    database.wait_until(lambda: "br1" in names(database, "Bridge"), doing="add br1")
    (row,) = database.tables["Bridge"].values()
    assert (len(items_of(row["ports"])), mapping_of(row["external_ids"])) == (1, {})
    database.wait_until(
        lambda: one_of(next(iter(database.tables["Interface"].values()))["ofport"], 0) == 65534, doing="number br1"
    )
    switch.configure("del-br", "br1")
    database.wait_until(lambda: not database.tables["Bridge"], doing="delete br1")


def test_a_rejected_transaction_changes_nothing(switch: Switch, database: Database) -> None:
    database.poll()
    operations = [*bridge(database, "br0"), {"op": "abort"}]
    with pytest.raises(DatapathFault, match="abort"):
        database.transact(operations)
    with pytest.raises(DatapathFault, match="No column next_year"):
        database.transact([{"op": "insert", "table": "Bridge", "row": {"next_year": 1}}])
    assert switch.configure("list-br").split() == []


def test_the_tables_are_read_again_after_a_reconnect(switch: Switch, database: Database) -> None:
    """W28: ovsdb-server is restarted."""
    database.poll()
    switch.kill_database()
    with pytest.raises(DatapathFault):
        database.poll()
    with pytest.raises(DatapathFault):
        database.transact([])
    switch.start_database()
    switch.configure("add-br", "br2", wait=False)
    database.poll()
    assert names(database, "Bridge") == {"br2"}
    assert database.connect_count == 2


async def test_a_tcp_address(switch: Switch) -> None:
    port = free_port()
    control = str(switch.directory / "ovsdb.ctl")
    switch.run("ovs-appctl", "-t", control, "ovsdb-server/add-remote", f"ptcp:{port}:127.0.0.1")
    database = Database(f"tcp:127.0.0.1:{port}", columns=COLUMNS)

    def listens() -> bool:
        """ovs-appctl returns before the server listens."""
        try:
            database.poll()
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


def test_an_invalid_address_is_rejected() -> None:
    with pytest.raises(Invalid, match="neither unix:PATH nor tcp:HOST:PORT"):
        Database("db.sock", columns=COLUMNS).poll()
