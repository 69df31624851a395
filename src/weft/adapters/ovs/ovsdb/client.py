"""A client of ovsdb-server (RFC 7047): a local copy of monitored tables, kept by its updates, and transactions.

It blocks, like the datapath whose thread uses it. The copy changes only inside calls; `poll` fetches updates. The first
call after a lost connection reconnects and reads everything again. Columns that the server lacks are not requested, and
columns that we do not know are never monitored (W49).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weft.adapters.ovs.control.connection import Connection
from weft.adapters.ovs.control.stream import DEADLINE, Stream
from weft.adapters.ovs.ovsdb.jsonrpc import Incoming, Message, encode
from weft.adapters.ovs.ovsdb.types import check_row
from weft.domain.errors import DatapathFault

DATABASE = "Open_vSwitch"

Operation = dict[str, Any]
# Columns in the notation of RFC 7047; `weft.adapters.ovs.ovsdb.types` decodes them.
Row = Mapping[str, Any]


class Database(Connection):
    """A connection that opens on first use. `columns` are the monitored ones, by table."""

    def __init__(self, address: str, *, columns: Mapping[str, Sequence[str]]) -> None:
        super().__init__(address)
        self._columns = columns
        self._incoming = Incoming()
        self._last_id = 0
        self._replies: dict[int, Message] = {}
        # The monitored columns that this server has.
        self._monitored: dict[str, list[str]] = {}
        # The local copy: rows by UUID, by table. An update replaces the row object.
        self.tables: defaultdict[str, dict[str, Row]] = defaultdict(dict)
        # Number of update notifications received.
        self.update_count = 0

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the local copy may have changed."""
        return self.connect_count, self.update_count

    def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Commit all operations, or none with a `DatapathFault`; their results.

        If the connection is lost meanwhile, they may or may not have been committed.
        """
        with self.transacting(operations) as results:
            pass
        return results

    @contextmanager
    def transacting(self, operations: Sequence[Operation]) -> Iterator[list[Any]]:
        """The same; the block runs while the server commits. The results are complete when it ends."""
        self.ensure_connected()
        number = self._send("transact", [DATABASE, *operations])
        results: list[Any] = []
        try:
            yield results
        finally:
            # Even if the block fails: the reply would never leave `_replies`.
            found = self._result_of(number, "transact")
            if not isinstance(found, list):
                raise DatapathFault("ovsdb: transact: the result is not a list")
            results += found
        for position, result in enumerate(results):
            if isinstance(result, dict) and (fault := result.get("error")):
                # An error behind the last operation is about the commit, for example a failed constraint.
                doing = operations[position] if position < len(operations) else {"op": "commit"}
                details = f"{result.get('details', '')}".strip()
                raise DatapathFault(f"ovsdb: {doing['op']} {doing.get('table', '')}: {fault} {details}".rstrip())

    def wait_until(self, holds: Callable[[], bool], *, doing: str) -> None:
        """Return when a condition on the local copy holds; `DatapathFault` on timeout."""
        until = time.monotonic() + DEADLINE
        self.ensure_connected()
        while not holds():
            if time.monotonic() > until:
                raise DatapathFault(f"{doing}: the switch did not finish within {DEADLINE:g} s")
            self._close_on_fault(lambda stream: self._take(stream.receive(until=until)))

    def _handshake(self) -> None:
        self._incoming = Incoming()
        self._replies.clear()
        # ovsdb-server rejects a monitor request that names an unknown column.
        self._monitored = self._available(self._call("get_schema", [DATABASE]))
        wanted = {table: {"columns": columns} for table, columns in self._monitored.items()}
        # Rows may have been deleted while we were disconnected, and the dump does not say so.
        self.tables.clear()
        self._update(self._call("monitor", [DATABASE, None, wanted]))

    def _available(self, schema: Any) -> dict[str, list[str]]:
        """The columns that we want and the server has, by table."""
        match schema:
            case {"tables": dict(tables)}:
                columns = {name: table["columns"] for name, table in tables.items() if _has_columns(table)}
                return {
                    table: [column for column in wanted if column in columns[table]]
                    for table, wanted in self._columns.items()
                    if table in columns
                }
            case _:
                raise DatapathFault("ovsdb: get_schema: the result is not a schema")

    def _drain(self, stream: Stream) -> None:
        self._take(stream.receive_available())

    def _call(self, method: str, params: Sequence[object]) -> Any:
        return self._result_of(self._send(method, params), method)

    def _send(self, method: str, params: Sequence[object]) -> int:
        """Send a request; its id."""
        self._last_id += 1
        request = encode({"method": method, "params": params, "id": self._last_id})
        self._close_on_fault(lambda stream: stream.send(request))
        return self._last_id

    def _result_of(self, number: int, method: str) -> Any:
        until = time.monotonic() + DEADLINE

        def wait(stream: Stream) -> Message:
            while number not in self._replies:
                self._take(stream.receive(until=until))
            return self._replies.pop(number)

        reply = self._close_on_fault(wait)
        if reply.error is not None:
            raise DatapathFault(f"ovsdb: {method}: {reply.error}")
        return reply.result

    def _take(self, data: bytes) -> None:
        for message in self._incoming.feed(data) if data else ():
            # An unanswered echo makes the server close the connection.
            if message.method == "echo":
                assert self._stream is not None
                self._stream.send(encode({"id": message.id, "result": message.params, "error": None}))
            elif message.method == "update" and message.params is not None and len(message.params) == 2:
                self._update(message.params[1])
                self.update_count += 1
            elif message.method is None and isinstance(message.id, int):
                self._replies[message.id] = message

    def _update(self, tables: Any) -> None:
        """Apply table updates (RFC 7047, 4.1.6). Rows are checked here, so that readers of the copy need not."""
        if not isinstance(tables, dict) or not all(isinstance(rows, dict) for rows in tables.values()):
            raise DatapathFault("ovsdb: an update is not a set of tables")
        for table, rows in tables.items():
            columns = self._monitored.get(table, ())
            for uuid, row in rows.items():
                if isinstance(row, dict) and "new" in row:
                    check_row(table, row["new"], columns)
                    self.tables[table][uuid] = row["new"]
                else:
                    self.tables[table].pop(uuid, None)


def _has_columns(table: Any) -> bool:
    return isinstance(table, dict) and isinstance(table.get("columns"), dict)
