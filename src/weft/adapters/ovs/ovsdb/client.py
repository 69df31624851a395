"""A client of ovsdb-server (RFC 7047): a copy of what we look at, kept by its notifications, and transactions.

It blocks, as the datapath does whose thread it is used on. The copy moves only inside calls: whoever wants news calls
`look`. A lost connection is opened anew by the next call, and everything is listed again; `connections` counts how
often that was. Columns that this server has not are not asked for, and those it has beyond our knowledge are never seen
(W49).
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
from weft.domain.errors import DatapathFault

DATABASE = "Open_vSwitch"

Operation = dict[str, Any]
# A row as the wire has it; `weft.adapters.ovs.ovsdb.types` reads it.
Row = Mapping[str, Any]


class Database(Connection):
    """A connection, opened by its first use. `columns` are those that are copied, by table."""

    def __init__(self, address: str, *, columns: Mapping[str, Sequence[str]]) -> None:
        super().__init__(address)
        self._columns = columns
        self._incoming = Incoming()
        self._last_id = 0
        self._answers: dict[int, Message] = {}
        # The copy: rows by their UUIDs, by table.
        self.tables: defaultdict[str, dict[str, Row]] = defaultdict(dict)
        # How many notifications have come in so far.
        self.changes = 0

    @property
    def news(self) -> tuple[int, int]:
        """Another value whenever the copy may be another."""
        return self.connections, self.changes

    def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Carry out all of the operations or, with a `DatapathFault` that says why, none; their results.

        When the connection is lost meanwhile nobody knows which of the two it was.
        """
        with self.transacting(operations) as results:
            pass
        return results

    @contextmanager
    def transacting(self, operations: Sequence[Operation]) -> Iterator[list[Any]]:
        """The same, carried out while the block runs: the results are there when it ends."""
        self.look_alive()
        number = self._send("transact", [DATABASE, *operations])
        results: list[Any] = []
        try:
            yield results
        finally:
            results += self._answer_to(number, "transact")
        for position, result in enumerate(results):
            if isinstance(result, dict) and (fault := result.get("error")):
                doing = operations[position] if position < len(operations) else {"op": "commit"}
                words = f"{result.get('details', '')}".strip()
                raise DatapathFault(f"ovsdb: {doing['op']} {doing.get('table', '')}: {fault} {words}".rstrip())

    def wait_until(self, holds: Callable[[], bool], *, doing: str) -> None:
        """Return when the copy has come to what is expected; `DatapathFault` when that takes too long."""
        until = time.monotonic() + DEADLINE
        self.look_alive()
        while not holds():
            if time.monotonic() > until:
                raise DatapathFault(f"{doing}: the switch has not done it within {DEADLINE:g} s")
            self._guarded(lambda stream: self._take(stream.receive(until=until)))

    def _begin(self) -> None:
        self._incoming = Incoming()
        self._answers.clear()
        schema = self._call("get_schema", [DATABASE])
        wanted = {
            table: {"columns": [column for column in columns if column in schema["tables"][table]["columns"]]}
            for table, columns in self._columns.items()
            if table in schema["tables"]
        }
        self.tables.clear()
        self._update(self._call("monitor", [DATABASE, None, wanted]))

    def _catch_up(self, stream: Stream) -> None:
        self._take(stream.receive_waiting())

    def _call(self, method: str, params: Sequence[object]) -> Any:
        return self._answer_to(self._send(method, params), method)

    def _send(self, method: str, params: Sequence[object]) -> int:
        """Ask; the number that the answer will have."""
        self._last_id += 1
        question = encode({"method": method, "params": params, "id": self._last_id})
        self._guarded(lambda stream: stream.send(question))
        return self._last_id

    def _answer_to(self, number: int, method: str) -> Any:
        until = time.monotonic() + DEADLINE

        def wait(stream: Stream) -> Message:
            while number not in self._answers:
                self._take(stream.receive(until=until))
            return self._answers.pop(number)

        answer = self._guarded(wait)
        if answer.error is not None:
            raise DatapathFault(f"ovsdb: {method}: {answer.error}")
        return answer.result

    def _take(self, data: bytes) -> None:
        for message in self._incoming.feed(data) if data else ():
            if message.method == "echo":
                assert self._stream is not None
                self._stream.send(encode({"id": message.id, "result": message.params, "error": None}))
            elif message.method == "update" and message.params is not None and len(message.params) == 2:
                self._update(message.params[1])
                self.changes += 1
            elif message.method is None and isinstance(message.id, int):
                self._answers[message.id] = message

    def _update(self, tables: Mapping[str, Mapping[str, Any]]) -> None:
        for table, rows in tables.items():
            for uuid, row in rows.items():
                if "new" in row:
                    self.tables[table][uuid] = row["new"]
                else:
                    self.tables[table].pop(uuid, None)
