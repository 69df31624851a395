"""Our bridge in the switch's database: its ports, whose they are, and the numbers of tenants.

What is ours bears our mark in `external_ids`, so a process with no memory finds all of it; bridges and ports of others
are left alone. A port that stands is never deleted and made again. The bridge forwards nothing by itself
(`fail_mode=secure`): without flows of ours it drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.ovsdb.client import Database, Operation, Row
from weft.adapters.ovs.ovsdb.types import items_of, map_of, mapping_of, new_row, one_of, set_of, uuid
from weft.domain.errors import DatapathFault, Exhausted
from weft.domain.ids import TenantName

NAME: Final = "contivVxlanBridge"
_MARK: Final = "weft"
# What says whose workload's port it is.
TENANT_MARK: Final = "weft-tenant"
# What says which host end it is (kuryr 2.5): a port that was made in advance has another name.
INTERFACE_MARK: Final = "iface-id"
# What says that it is nobody's yet (`spares`), and its MTU.
SPARE_MARK: Final = "weft-spare"
_NUMBER_PREFIX = "weft-tenant-"
_TENANTS = range(1, 1 << 16)
# What we ask for: the switch gives small ones to those who ask for none. Where two want the same it would take both
# ports away for a moment, and with a device that it has made itself goes what stands on it.
PORT_NUMBERS: Final = range(0x1000, 0x8000)
_KERNEL_MODULE = Path("/sys/module/openvswitch")

_COLUMNS = {
    "Open_vSwitch": ("bridges", "next_cfg", "cur_cfg", "datapath_types", "other_config"),
    "Bridge": ("name", "ports", "external_ids", "datapath_type", "fail_mode", "protocols"),
    "Port": ("name", "interfaces", "external_ids"),
    "Interface": ("name", "ofport", "ofport_request", "error", "ifindex", "admin_state"),
}
_UP = "up"
PROTOCOLS: Final = ("OpenFlow13", "OpenFlow14", "OpenFlow15")
LOST_CHECKSUMS: Final = (
    "without other_config:userspace-tso-enable=true in table Open_vSwitch workloads send wrong checksums"
)
CHECKSUMS_REMEDY: Final = "set it with ovs-vsctl and restart ovs-vswitchd"


class SwitchPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of ours as it is found. `number` is 0 until the switch has it, and `error` says why it has it not.

    What the switch says of a device that it has looked for in vain it takes back later than it gives the number.
    """

    name: str
    row: str
    number: int
    # The number that it has in the switch, also when its device is gone or it needs none.
    given: int
    # The number that it asked for; 0: none.
    asked: int = 0
    # Whether the switch has heard that its device is up.
    is_up: bool = False
    error: str
    marks: Mapping[str, str]

    @property
    def interface(self) -> str:
        """What it is known by: the host end that it is, which may have another name in the switch."""
        return self.marks.get(INTERFACE_MARK, self.name)

    @property
    def is_ours(self) -> bool:
        return any(name.startswith(_MARK) for name in self.marks)


class _Rows(NamedTuple):
    """The rows that a port was read from: they are others when something about it has changed."""

    port: Row
    interface_key: str
    interface: Row
    made: SwitchPort


_NO_ROW: Final[Row] = {}
_NOTHING_MADE: Final[Mapping[str, int]] = {}


def open_database(directory: Path) -> Database:
    """What we look at in the database of a switch, whose sockets are in the directory."""
    return Database(f"unix:{directory / 'db.sock'}", columns=_COLUMNS)


def best_kind(kinds: Iterable[str]) -> str:
    """Of the datapaths a switch offers that we use: the kernel forwards where it can, else the switch itself."""
    return "system" if "system" in kinds and _KERNEL_MODULE.exists() else "netdev"


def loses_checksums(kind: str, root: Mapping[str, Any]) -> bool:
    """Whether a switch with these settings never makes the checksums that workloads leave to their devices."""
    return kind == "netdev" and mapping_of(root["other_config"]).get("userspace-tso-enable") != "true"


class SwitchBridge:
    """See the module. `look` and everything that writes may raise `DatapathFault` when the database does not answer."""

    def __init__(self, database: Database, name: str = NAME) -> None:
        self.database = database
        self.name = name
        self._last_number = PORT_NUMBERS.start - 1
        self._rows: dict[str, _Rows] = {}
        self._all: Sequence[SwitchPort] = ()
        self._ours: Mapping[str, SwitchPort] = {}
        self._spares: Mapping[str, SwitchPort] = {}
        self._numbers: Mapping[str, int] = {}
        self._read_at = (0, 0)
        # Of ports that were dropped: the connection to the database, and what the switch counts to when it follows.
        self._let_go_at: dict[str, tuple[int, int]] = {}

    def prepare(self) -> list[str]:
        """The bridge is there and as it must be; what was done to it, in words."""
        self.database.look_alive()
        row = self.find()
        if row is None:
            self._create()
            return [f"made bridge {self.name}"]
        _, found = row
        kind = found["datapath_type"] or "system"
        self._refuse_lost_checksums(kind)
        amiss: dict[str, Any] = {}
        if one_of(found["fail_mode"]) != "secure":
            amiss["fail_mode"] = "secure"
        if not set(PROTOCOLS) <= set(items_of(found["protocols"])):
            amiss["protocols"] = set_of({*items_of(found["protocols"]), *PROTOCOLS})
        if amiss:
            self.settled([{"op": "update", "table": "Bridge", "where": self._where(), "row": amiss}])
        return [f"set {name} of bridge {self.name}" for name in amiss]

    @property
    def is_ours(self) -> bool:
        """Whether there is such a bridge and it bears our mark."""
        row = self.find()
        return row is not None and _MARK in mapping_of(row[1]["external_ids"])

    def remove(self, openflow: OpenFlow) -> list[str]:
        """No bridge of ours; what was done, in words. One that has ports of others is left to them, without our flows.

        `openflow` leads to it.
        """
        row = self.find()
        if row is None:
            return []
        key, found = row
        others = [port.name for port in self._read_ports() if not port.is_ours and port.name != self.name]
        if self.is_ours and not others:
            gone = [["bridges", "delete", uuid(key)]]
            self.settled([{"op": "mutate", "table": "Open_vSwitch", "where": [], "mutations": gone}])
            return [f"removed bridge {self.name}"]
        flows = [each.flow.key for each in openflow.read_flows()]
        marks = [name for name in mapping_of(found["external_ids"]) if name.startswith(_MARK)]
        if not flows and not marks:
            return []
        openflow.change(drop=flows)
        openflow.drop_meters(meter.number for meter in openflow.read_meters())
        ports = [uuid(port.row) for port in self._read_ports() if port.is_ours]
        self.settled(
            [self.mutate("ports", "delete", set_of(ports)), self.mutate("external_ids", "delete", set_of(marks))]
        )
        return [f"left bridge {self.name} to ports of others: {', '.join(sorted(others))}"]

    def ports(self) -> Mapping[str, SwitchPort]:
        """Those of ours that are somebody's, by what they are known by."""
        self._read_ports()
        return self._ours

    def numbers(self) -> Mapping[str, int]:
        """The numbers of `ports` that the switch has."""
        self._read_ports()
        return self._numbers

    def spares(self) -> Mapping[str, SwitchPort]:
        """Those of ours that are nobody's yet, by name."""
        self._read_ports()
        return self._spares

    def add(self, marks: Mapping[str, Mapping[str, str]], made: Mapping[str, int] = _NOTHING_MADE) -> None:
        """Ports of these names, each with its marks; the switch has them when this returns. See `ask_for`.

        It has none that `DatapathFault` names: what else was asked for is there all the same.
        """
        if not marks:
            return
        numbers = self.reserve_ofport(marks)
        if failed := self.wait_for(self.ask_for(marks, numbers, made), numbers):
            raise DatapathFault("; ".join(failed.values()))

    def reserve_ofport(self, names: Iterable[str]) -> dict[str, int]:
        """The numbers that ports to come will have, unless others take them first."""
        numbers = self._free_numbers()
        return {name: next(numbers) for name in names}

    def ask_for(
        self,
        marks: Mapping[str, Mapping[str, str]],
        numbers: Mapping[str, int],
        made: Mapping[str, int] = _NOTHING_MADE,
    ) -> dict[str, str]:
        """Ask the switch for ports, whose devices are there or `made` by it with an MTU; their rows by their names."""
        if not marks:
            return {}
        self._wait_until_let_go(marks)
        operations: list[Operation] = []
        for position, (name, own) in enumerate(marks.items()):
            interface: dict[str, Any] = {"name": name, "ofport_request": numbers[name]}
            port = {"name": name, "interfaces": new_row(f"i{position}"), "external_ids": map_of({_MARK: "", **own})}
            interface["external_ids"] = port["external_ids"]
            if mtu := made.get(name):
                interface |= {"type": "internal", "mtu_request": mtu}
            operations += [
                {"op": "insert", "table": "Interface", "uuid-name": f"i{position}", "row": interface},
                {"op": "insert", "table": "Port", "uuid-name": f"p{position}", "row": port},
            ]
        added = set_of(new_row(f"p{position}") for position in range(len(marks)))
        results = self.database.transact([*operations, self.mutate("ports", "insert", added)])
        return {name: one_of(results[2 * position]["uuid"]) for position, name in enumerate(marks)}

    def wait_for(self, rows: Mapping[str, str], numbers: Mapping[str, int]) -> dict[str, str]:
        """Wait until the switch has taken ports it was asked for; why it has not taken some, by their names.

        Those that were given other numbers ask for these from now on, else the switch would make them again one day.
        """
        if not rows:
            return {}
        interfaces = self.database.tables["Interface"]

        def number(row: str) -> int:
            return int(one_of(interfaces.get(row, {}).get("ofport"), 0))

        def error(row: str) -> str:
            return str(one_of(interfaces.get(row, {}).get("error"), ""))

        self.database.wait_until(
            lambda: all(number(row) > 0 or error(row) for row in rows.values()), doing=f"add ports to {self.name}"
        )
        misplaced = {row: number(row) for name, row in rows.items() if number(row) not in {numbers[name], 0, -1}}
        if misplaced:
            self.database.transact(
                [
                    {
                        "op": "update",
                        "table": "Interface",
                        "where": [["_uuid", "==", uuid(row)]],
                        "row": {"ofport_request": given},
                    }
                    for row, given in misplaced.items()
                ]
            )
        return {name: f"ovs: {name}: {error(row)}" for name, row in rows.items() if number(row) <= 0}

    @contextmanager
    def assign_pool_port(self, marks: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
        """Spares of these names are somebody's, with these marks, when the block ends.

        The switch is not waited for: it has them.
        """
        if not marks:
            yield
            return
        operations = [
            {
                "op": "update",
                "table": table,
                "where": [["name", "==", name]],
                "row": {"external_ids": map_of({_MARK: "", **own})},
            }
            for name, own in marks.items()
            for table in ("Port", "Interface")
        ]
        with self.database.transacting(operations):
            yield
        self.database.wait_until(lambda: not self.spares().keys() & marks.keys(), doing="hand over ports")

    def drop(self, names: Set[str], *, wait: bool = False) -> None:
        """No ports of ours that are known by these names; gone already is fine.

        With `wait` the switch has let go of their devices.
        """
        if not names:
            return
        self.database.look_alive()
        there = {**self.ports(), **self.spares()}
        rows = {port.name: port.row for name, port in there.items() if name in names}
        if rows:
            followed = self._ask_to_settle([self.mutate("ports", "delete", set_of(map(uuid, rows.values())))])
            now = self.database.connections, self._root()["cur_cfg"]
            self._let_go_at = {name: at for name, at in self._let_go_at.items() if at[0] == now[0] and at[1] > now[1]}
            self._let_go_at |= dict.fromkeys([*names, *rows], (now[0], followed))
        if wait:
            self._wait_until_let_go(names)

    def _wait_until_let_go(self, names: Iterable[str]) -> None:
        """Return when the switch has followed in dropping ports of these names: it takes one for another of its name.

        A database that was away meanwhile may count anew, and the switch has read all of it again.
        """
        found = (self._let_go_at.get(name, (0, 0)) for name in names)
        count = max((count for at, count in found if at == self.database.connections), default=0)
        self.database.wait_until(lambda: self._root()["cur_cfg"] >= count, doing="let go of ports")

    def tenants(self) -> dict[TenantName, int]:
        """The tenants that have numbers."""
        row = self.find()
        found = {} if row is None else mapping_of(row[1]["external_ids"])
        return {
            TenantName(key.removeprefix(_NUMBER_PREFIX)): int(number)
            for key, number in found.items()
            if key.startswith(_NUMBER_PREFIX) and number.isdecimal()
        }

    def numbers_of(self, tenants: Set[TenantName]) -> dict[TenantName, int]:
        """The numbers of these tenants, as far as they have any."""
        return {tenant: number for tenant, number in self.tenants().items() if tenant in tenants}

    def number(self, tenants: Iterable[TenantName]) -> None:
        """Give numbers to tenants that have none. They keep them until they are forgotten, whoever dies meanwhile."""
        known = self.tenants()
        free = (number for number in _TENANTS if number not in known.values())
        given: dict[str, str] = {}
        for tenant in sorted(set(tenants) - known.keys()):
            number = next(free, None)
            if number is None:
                raise Exhausted(f"the switch has no number left for tenant {tenant}")
            given[f"{_NUMBER_PREFIX}{tenant}"] = str(number)
        if given:
            self.database.transact([self.mutate("external_ids", "insert", map_of(given))])

    def forget(self, tenants: Iterable[TenantName]) -> None:
        """Take the numbers of tenants back, of which nothing is there any more."""
        keys = [f"{_NUMBER_PREFIX}{tenant}" for tenant in tenants]
        if keys:
            self.database.transact([self.mutate("external_ids", "delete", set_of(keys))])

    def _create(self) -> None:
        kind = best_kind(items_of(self._root()["datapath_types"]))
        self._refuse_lost_checksums(kind)
        bridge = {
            "name": self.name,
            "datapath_type": kind if kind != "system" else "",
            "fail_mode": "secure",
            "protocols": set_of(PROTOCOLS),
            "external_ids": map_of({_MARK: ""}),
            "ports": set_of([new_row("p")]),
        }
        own = {"name": self.name, "type": "internal"}
        self.settled(
            [
                {"op": "insert", "table": "Interface", "uuid-name": "i", "row": own},
                {
                    "op": "insert",
                    "table": "Port",
                    "uuid-name": "p",
                    "row": {"name": self.name, "interfaces": new_row("i")},
                },
                {"op": "insert", "table": "Bridge", "uuid-name": "b", "row": bridge},
                {
                    "op": "mutate",
                    "table": "Open_vSwitch",
                    "where": [],
                    "mutations": [["bridges", "insert", new_row("b")]],
                },
            ]
        )

    def _refuse_lost_checksums(self, kind: str) -> None:
        if loses_checksums(kind, self._root()):
            raise DatapathFault(f"ovs: {LOST_CHECKSUMS}: {CHECKSUMS_REMEDY}")

    def _free_numbers(self) -> Iterator[int]:
        """Numbers that no port has; those used last come back last, so that nobody inherits a flow or a mistake."""
        taken = {number for port in self._read_ports() for number in (port.given, port.asked)}
        for number in chain(
            range(self._last_number + 1, PORT_NUMBERS.stop), range(PORT_NUMBERS.start, self._last_number + 1)
        ):
            if number not in taken:
                self._last_number = number
                yield number
        raise Exhausted("the switch has no number left for a port")

    def _read_ports(self) -> Sequence[SwitchPort]:
        """All ports of the bridge. News are mostly about one of them, so the others are not read again."""
        news = self.database.news
        if self._read_at != news:
            before, row = self._rows, self.find()
            keys = () if row is None else items_of(row[1]["ports"])
            self._rows = {key: rows for key in keys if (rows := self._read_port(key, before.get(key))) is not None}
            self._all = [rows.made for rows in self._rows.values()]
            ours = [port for port in self._all if _MARK in port.marks]
            self._ours = {port.interface: port for port in ours if SPARE_MARK not in port.marks}
            self._spares = {port.name: port for port in ours if SPARE_MARK in port.marks}
            self._numbers = {name: port.number for name, port in self._ours.items() if port.number}
            self._read_at = news
        return self._all

    def _read_port(self, key: str, before: _Rows | None) -> _Rows | None:
        port = self.database.tables["Port"].get(key)
        if port is None:
            return None
        same = before if before is not None and before.port is port else None
        interface_key = same.interface_key if same else one_of(port["interfaces"])
        interface = self.database.tables["Interface"].get(interface_key, _NO_ROW)
        if same and same.interface is interface:
            return same
        # A port keeps its number when its device goes, of which then only the index tells.
        given = max(one_of(interface.get("ofport"), 0), 0)
        number = 0 if one_of(interface.get("ifindex")) == 0 else given
        made = SwitchPort(
            name=port["name"],
            row=key,
            number=number,
            given=given,
            asked=one_of(interface.get("ofport_request"), 0),
            is_up=one_of(interface.get("admin_state"), "") == _UP,
            error="" if number else one_of(interface.get("error"), ""),
            marks=mapping_of(port["external_ids"]),
        )
        return _Rows(port, interface_key, interface, made)

    def find(self) -> tuple[str, Mapping[str, Any]] | None:
        """The bridge's row, where there is one."""
        rows = self.database.tables["Bridge"].items()
        return next(((key, row) for key, row in rows if row["name"] == self.name), None)

    def _root(self) -> Mapping[str, Any]:
        for row in self.database.tables["Open_vSwitch"].values():
            return row
        raise DatapathFault("ovs: the database has not been initialised: run ovs-vsctl init")

    def _where(self) -> list[Any]:
        return [["name", "==", self.name]]

    def mutate(self, column: str, verb: str, value: Any) -> Operation:
        """What changes a column of the bridge."""
        return {"op": "mutate", "table": "Bridge", "where": self._where(), "mutations": [[column, verb, value]]}

    def settled(self, operations: Sequence[Operation]) -> None:
        """Carry them out, and wait until the switch has."""
        wanted = self._ask_to_settle(operations)
        self.database.wait_until(lambda: self._root()["cur_cfg"] >= wanted, doing="configure the switch")

    def _ask_to_settle(self, operations: Sequence[Operation]) -> int:
        """Carry them out; the count that the switch will have come to when it has followed."""
        results = self.database.transact(
            [
                *operations,
                {"op": "mutate", "table": "Open_vSwitch", "where": [], "mutations": [["next_cfg", "+=", 1]]},
                {"op": "select", "table": "Open_vSwitch", "where": [], "columns": ["next_cfg"]},
            ]
        )
        return int(results[-1]["rows"][0]["next_cfg"])
