"""Names of a bridge's OpenFlow tables in OVSDB, which `ovs-ofctl --names` and `ovs-appctl ofproto/trace` show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.adapters.ovs.ovsdb.client import Database, Operation
from weft.adapters.ovs.ovsdb.types import Value, mapping_of, named_uuid, one_of


def plan_table_names(names: Mapping[int, str]) -> tuple[list[Operation], Value]:
    """Return operations that insert a Flow_Table row for each name, and a `flow_tables` column that refers to them.

    ovsdb-server deletes the rows that the bridge referred to before: Flow_Table is not a root table.
    """
    inserts: list[Operation] = [
        {"op": "insert", "table": "Flow_Table", "uuid-name": f"t{number}", "row": {"name": name}}
        for number, name in names.items()
    ]
    return inserts, ["map", [[number, named_uuid(f"t{number}")] for number in names]]


def read_table_names(database: Database, bridge: Mapping[str, Any]) -> dict[int, str]:
    """Return the names that the tables of a bridge have."""
    rows = database.tables["Flow_Table"]
    references = {int(number): one_of(row) for number, row in mapping_of(bridge["flow_tables"]).items()}
    return {number: one_of(rows[row]["name"], "") for number, row in references.items() if row in rows}
