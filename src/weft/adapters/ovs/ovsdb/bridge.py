"""A bridge of ours in OVSDB: its ports with their owners, and the IDs of tenants.

Our rows have the key `weft` in `external_ids`, so an agent that has just started finds them; bridges and ports of
others are left alone. An existing port is never deleted and created again, which would interrupt its traffic. The
bridge has `fail_mode=secure`: without our flows it drops everything.
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
from weft.adapters.ovs.ovsdb.flow_tables import plan_table_names, read_table_names
from weft.adapters.ovs.ovsdb.types import items_of, map_of, mapping_of, named_uuid, one_of, set_of, uuid
from weft.domain.errors import DatapathFault, Exhausted
from weft.domain.ids import TenantName

# The integration bridge, by Contiv's name (contiv 7.1).
BRIDGE: Final = "contivVxlanBridge"

# Keys of `external_ids`. This one, or another that begins with it, marks a row as ours.
_OWNER_KEY: Final = "weft"
# The tenant of a workload port.
TENANT_KEY: Final = "weft-tenant"
# The interface name of the endpoint (kuryr 2.5). A port from the pool has another name in the switch.
IFACE_ID_KEY: Final = "iface-id"
# Marks a pre-provisioned port without an endpoint (`weft.adapters.ovs.ports.pool`); the value is its MTU.
POOL_KEY: Final = "weft-pool"
# Of the bridge: `weft-tenant-NAME` holds the ID of a tenant.
_TENANT_ID_PREFIX: Final = "weft-tenant-"

# A tenant ID is a conntrack zone too, which has 16 bits; zone 0 is the default zone of the host.
_TENANT_IDS: Final = range(1, 1 << 16)
# The `ofport_request`s we use. OVS assigns small numbers to ports without a request. If two ports want the same number,
# OVS removes both for a moment; an internal port loses its device then, and with it the workload's macvlan.
OFPORTS: Final = range(0x1000, 0x8000)
_KERNEL_MODULE = Path("/sys/module/openvswitch")

_COLUMNS = {
    "Open_vSwitch": ("bridges", "next_cfg", "cur_cfg", "datapath_types", "other_config"),
    "Bridge": ("name", "ports", "external_ids", "datapath_type", "fail_mode", "protocols", "flow_tables"),
    "Flow_Table": ("name",),
    "Port": ("name", "interfaces", "external_ids"),
    "Interface": ("name", "ofport", "ofport_request", "error", "ifindex", "admin_state"),
}
_UP = "up"
PROTOCOLS: Final = ("OpenFlow13", "OpenFlow14", "OpenFlow15")
TSO_DISABLED: Final = (
    "without other_config:userspace-tso-enable=true in table Open_vSwitch workloads send wrong checksums"
)
TSO_REMEDY: Final = "set it with ovs-vsctl and restart ovs-vswitchd"


class SwitchPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of the bridge as OVSDB has it."""

    name: str
    row: str
    # The OpenFlow port number; 0 while ovs-vswitchd has not assigned one, or the device is gone.
    ofport: int
    # The same, but also of a port whose device is gone.
    assigned_ofport: int
    # Column `ofport_request`; 0 without.
    requested_ofport: int = 0
    # Whether ovs-vswitchd has seen the device up: it sends no packets to it before.
    is_up: bool = False
    # Why it has no `ofport`. OVS clears an old error later than it assigns the number, so it is empty with one.
    error: str
    external_ids: Mapping[str, str]

    @property
    def interface(self) -> str:
        """The interface name of the endpoint, which for a port from the pool is not the port's name."""
        return self.external_ids.get(IFACE_ID_KEY, self.name)

    @property
    def is_ours(self) -> bool:
        return any(key.startswith(_OWNER_KEY) for key in self.external_ids)


class _CachedPort(NamedTuple):
    """A port with the rows that it was read from. A change replaces the row object in `Database.tables`."""

    port_row: Row
    interface_key: str
    interface_row: Row
    port: SwitchPort


_NO_ROW: Final[Row] = {}
_NO_INTERNAL: Final[Mapping[str, int]] = {}
_NO_NAMES: Final[Mapping[int, str]] = {}


def open_database(directory: Path) -> Database:
    """A client for the OVSDB of a switch, whose sockets are in the directory."""
    return Database(f"unix:{directory / 'db.sock'}", columns=_COLUMNS)


def preferred_datapath_type(datapath_types: Iterable[str]) -> str:
    """`system` if the kernel module is loaded, else `netdev`, the userspace datapath."""
    return "system" if "system" in datapath_types and _KERNEL_MODULE.exists() else "netdev"


def lacks_tso(datapath_type: str, root: Mapping[str, Any]) -> bool:
    """Whether the userspace datapath would forward packets without the checksums that workloads offload."""
    return datapath_type == "netdev" and mapping_of(root["other_config"]).get("userspace-tso-enable") != "true"


class SwitchBridge:
    """A bridge of ours. Methods that read the database or write raise `DatapathFault` when it does not answer."""

    def __init__(self, database: Database, name: str = BRIDGE, *, table_names: Mapping[int, str] = _NO_NAMES) -> None:
        """`table_names` are shown by `ovs-ofctl --names` and by `ovs-appctl ofproto/trace`."""
        self.database = database
        self.name = name
        self._table_names = dict(table_names)
        self._last_ofport = OFPORTS.start - 1
        self._cache: dict[str, _CachedPort] = {}
        self._all: Sequence[SwitchPort] = ()
        self._ours: Mapping[str, SwitchPort] = {}
        self._pool: Mapping[str, SwitchPort] = {}
        self._ofports: Mapping[str, int] = {}
        self._read_at = (0, 0)
        # For ports that were removed: the OVSDB connection, and the `cur_cfg` at which ovs-vswitchd has removed them.
        self._removed_at: dict[str, tuple[int, int]] = {}

    def prepare(self) -> list[str]:
        """Create the bridge, or repair its settings; a log of the changes."""
        self.database.ensure_connected()
        row = self.find()
        if row is None:
            self._create()
            return [f"made bridge {self.name}"]
        _, bridge = row
        self._require_tso(bridge["datapath_type"] or "system")
        columns: dict[str, Any] = {}
        if one_of(bridge["fail_mode"]) != "secure":
            columns["fail_mode"] = "secure"
        if not set(PROTOCOLS) <= set(items_of(bridge["protocols"])):
            columns["protocols"] = set_of({*items_of(bridge["protocols"]), *PROTOCOLS})
        inserts: list[Operation] = []
        if self._table_names and read_table_names(self.database, bridge) != self._table_names:
            inserts, columns["flow_tables"] = plan_table_names(self._table_names)
        if columns:
            update = {"op": "update", "table": "Bridge", "where": self._where(), "row": columns}
            self.transact_and_wait([*inserts, update])
        return [f"set {name} of bridge {self.name}" for name in columns]

    @property
    def is_ours(self) -> bool:
        """Whether the bridge exists, and we created it."""
        row = self.find()
        return row is not None and _OWNER_KEY in mapping_of(row[1]["external_ids"])

    def remove(self, openflow: OpenFlow) -> list[str]:
        """Delete the bridge; a log of the changes. If it has ports of others, remove only what is ours from it.

        `openflow` is a connection to this bridge.
        """
        row = self.find()
        if row is None:
            return []
        key, bridge = row
        others = [port.name for port in self._read_ports() if not port.is_ours and port.name != self.name]
        if self.is_ours and not others:
            mutations = [["bridges", "delete", uuid(key)]]
            self.transact_and_wait([{"op": "mutate", "table": "Open_vSwitch", "where": [], "mutations": mutations}])
            return [f"removed bridge {self.name}"]
        # Foreign ports depend on the bridge, so only our flows, meters, ports and keys go.
        flows = [counted.flow.key for counted in openflow.read_flows()]
        keys = [name for name in mapping_of(bridge["external_ids"]) if name.startswith(_OWNER_KEY)]
        if not flows and not keys:
            return []
        openflow.change(drop=flows)
        openflow.drop_meters(meter.number for meter in openflow.read_meters())
        ports = [uuid(port.row) for port in self._read_ports() if port.is_ours]
        self.transact_and_wait(
            [self.mutate("ports", "delete", set_of(ports)), self.mutate("external_ids", "delete", set_of(keys))]
        )
        return [f"left bridge {self.name} to ports of others: {', '.join(sorted(others))}"]

    def ports(self) -> Mapping[str, SwitchPort]:
        """Our ports in use, by the endpoint's interface name, without those of the pool."""
        self._read_ports()
        return self._ours

    def ofports(self) -> Mapping[str, int]:
        """The OpenFlow port numbers of `ports`, without ports that have none."""
        self._read_ports()
        return self._ofports

    def pool_ports(self) -> Mapping[str, SwitchPort]:
        """Our pre-provisioned ports without an endpoint, by name."""
        self._read_ports()
        return self._pool

    def add_ports(
        self, external_ids: Mapping[str, Mapping[str, str]], internal: Mapping[str, int] = _NO_INTERNAL
    ) -> None:
        """Add ports with their `external_ids` by name, and wait for their numbers. See `insert_ports`.

        `DatapathFault` names the ports that failed; the others exist all the same.
        """
        if not external_ids:
            return
        ofports = self.reserve_ofport(external_ids)
        if failed := self.wait_for_ofports(self.insert_ports(external_ids, ofports, internal), ofports):
            raise DatapathFault("; ".join(failed.values()))

    def reserve_ofport(self, names: Iterable[str]) -> dict[str, int]:
        """Choose the port numbers that new ports will request. Others may still take them first."""
        ofports = self._free_ofports()
        return {name: next(ofports) for name in names}

    def insert_ports(
        self,
        external_ids: Mapping[str, Mapping[str, str]],
        ofports: Mapping[str, int],
        internal: Mapping[str, int] = _NO_INTERNAL,
    ) -> dict[str, str]:
        """Insert ports into OVSDB without waiting for ovs-vswitchd; their Interface rows by name.

        `internal` has the MTU of ports whose device OVS creates; the devices of the others exist.
        """
        if not external_ids:
            return {}
        self._wait_until_removed(external_ids)
        operations: list[Operation] = []
        for position, (name, own) in enumerate(external_ids.items()):
            interface: dict[str, Any] = {"name": name, "ofport_request": ofports[name]}
            port = {
                "name": name,
                "interfaces": named_uuid(f"i{position}"),
                "external_ids": map_of({_OWNER_KEY: "", **own}),
            }
            interface["external_ids"] = port["external_ids"]
            if mtu := internal.get(name):
                interface |= {"type": "internal", "mtu_request": mtu}
            operations += [
                {"op": "insert", "table": "Interface", "uuid-name": f"i{position}", "row": interface},
                {"op": "insert", "table": "Port", "uuid-name": f"p{position}", "row": port},
            ]
        added = set_of(named_uuid(f"p{position}") for position in range(len(external_ids)))
        results = self.database.transact([*operations, self.mutate("ports", "insert", added)])
        try:
            return {name: one_of(results[2 * position]["uuid"]) for position, name in enumerate(external_ids)}
        except (LookupError, TypeError) as error:
            raise DatapathFault("ovsdb: insert: the results have no UUIDs") from error

    def wait_for_ofports(self, rows: Mapping[str, str], ofports: Mapping[str, int]) -> dict[str, str]:
        """Wait until ovs-vswitchd has added ports, given by Interface rows; errors by name.

        A port with another number than requested requests that one from now on. Otherwise ovs-vswitchd would move it to
        the requested number, and so recreate it, as soon as that is free.
        """
        if not rows:
            return {}
        interfaces = self.database.tables["Interface"]

        def ofport(row: str) -> int:
            return int(one_of(interfaces.get(row, {}).get("ofport"), 0))

        def error(row: str) -> str:
            return str(one_of(interfaces.get(row, {}).get("error"), ""))

        self.database.wait_until(
            lambda: all(ofport(row) > 0 or error(row) for row in rows.values()), doing=f"add ports to {self.name}"
        )
        # OVS writes -1 for a port that it could not add.
        misplaced = {row: ofport(row) for name, row in rows.items() if ofport(row) not in {ofports[name], 0, -1}}
        if misplaced:
            self.database.transact(
                [
                    {
                        "op": "update",
                        "table": "Interface",
                        "where": [["_uuid", "==", uuid(row)]],
                        "row": {"ofport_request": assigned},
                    }
                    for row, assigned in misplaced.items()
                ]
            )
        return {name: f"ovs: {name}: {error(row)}" for name, row in rows.items() if ofport(row) <= 0}

    @contextmanager
    def assign_pool_ports(self, external_ids: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
        """Give pool ports, by name, the `external_ids` of endpoints. The block runs while OVSDB commits.

        There is no need to wait for ovs-vswitchd, which has the ports already.
        """
        if not external_ids:
            yield
            return
        operations = [
            {
                "op": "update",
                "table": table,
                "where": [["name", "==", name]],
                "row": {"external_ids": map_of({_OWNER_KEY: "", **own})},
            }
            for name, own in external_ids.items()
            for table in ("Port", "Interface")
        ]
        with self.database.transacting(operations):
            yield
        # The transaction's own update notification may come after its result.
        self.database.wait_until(lambda: not self.pool_ports().keys() & external_ids.keys(), doing="assign pool ports")

    def remove_ports(self, names: Set[str], *, wait: bool = False) -> None:
        """Remove our ports by interface name; missing ones are ignored.

        With `wait` ovs-vswitchd has closed their devices on return.
        """
        if not names:
            return
        self.database.ensure_connected()
        rows = {port.name: port.row for name, port in {**self.ports(), **self.pool_ports()}.items() if name in names}
        if rows:
            next_cfg = self._transact_next_cfg([self.mutate("ports", "delete", set_of(map(uuid, rows.values())))])
            connection, cur_cfg = self.database.connect_count, self._root()["cur_cfg"]
            # Drop what ovs-vswitchd has done meanwhile, so that the mapping does not grow.
            self._removed_at = {
                name: (at, cfg) for name, (at, cfg) in self._removed_at.items() if at == connection and cfg > cur_cfg
            }
            self._removed_at |= dict.fromkeys([*names, *rows], (connection, next_cfg))
        if wait:
            self._wait_until_removed(names)

    def _wait_until_removed(self, names: Iterable[str]) -> None:
        """Wait until ovs-vswitchd has removed ports of these names: it would take a new one for the old one.

        After a reconnect there is nothing to wait for: a restarted database may count `cur_cfg` from the start, and
        ovs-vswitchd has read all of it again.
        """
        found = (self._removed_at.get(name, (0, 0)) for name in names)
        next_cfg = max((cfg for at, cfg in found if at == self.database.connect_count), default=0)
        self.database.wait_until(lambda: self._root()["cur_cfg"] >= next_cfg, doing="remove ports")

    def tenants(self) -> dict[TenantName, int]:
        """All tenants that have an ID."""
        row = self.find()
        external_ids = {} if row is None else mapping_of(row[1]["external_ids"])
        return {
            TenantName(key.removeprefix(_TENANT_ID_PREFIX)): int(tenant_id)
            for key, tenant_id in external_ids.items()
            if key.startswith(_TENANT_ID_PREFIX) and tenant_id.isdecimal()
        }

    def tenant_ids_of(self, tenants: Set[TenantName]) -> dict[TenantName, int]:
        """The IDs of some tenants, without those that have none."""
        return {tenant: tenant_id for tenant, tenant_id in self.tenants().items() if tenant in tenants}

    def allocate_tenant_ids(self, tenants: Iterable[TenantName]) -> None:
        """Give IDs to tenants that have none. They are stored in OVSDB, so they survive restarts."""
        known = self.tenants()
        free = (tenant_id for tenant_id in _TENANT_IDS if tenant_id not in known.values())
        allocated: dict[str, str] = {}
        for tenant in sorted(set(tenants) - known.keys()):
            tenant_id = next(free, None)
            if tenant_id is None:
                raise Exhausted(f"no tenant ID left on this switch for tenant {tenant}")
            allocated[f"{_TENANT_ID_PREFIX}{tenant}"] = str(tenant_id)
        if allocated:
            self.database.transact([self.mutate("external_ids", "insert", map_of(allocated))])

    def release_tenant_ids(self, tenants: Iterable[TenantName]) -> None:
        """Release the IDs of deleted tenants. The caller has removed all that uses them."""
        keys = [f"{_TENANT_ID_PREFIX}{tenant}" for tenant in tenants]
        if keys:
            self.database.transact([self.mutate("external_ids", "delete", set_of(keys))])

    def _create(self) -> None:
        datapath_type = preferred_datapath_type(items_of(self._root()["datapath_types"]))
        self._require_tso(datapath_type)
        bridge = {
            "name": self.name,
            "datapath_type": datapath_type if datapath_type != "system" else "",
            "fail_mode": "secure",
            "protocols": set_of(PROTOCOLS),
            "external_ids": map_of({_OWNER_KEY: ""}),
            "ports": set_of([named_uuid("p")]),
        }
        inserts, bridge["flow_tables"] = plan_table_names(self._table_names)
        # Every bridge has an internal port of its own name, which ovs-vsctl adds by itself.
        local_port = {"name": self.name, "type": "internal"}
        self.transact_and_wait(
            [
                *inserts,
                {"op": "insert", "table": "Interface", "uuid-name": "i", "row": local_port},
                {
                    "op": "insert",
                    "table": "Port",
                    "uuid-name": "p",
                    "row": {"name": self.name, "interfaces": named_uuid("i")},
                },
                {"op": "insert", "table": "Bridge", "uuid-name": "b", "row": bridge},
                {
                    "op": "mutate",
                    "table": "Open_vSwitch",
                    "where": [],
                    "mutations": [["bridges", "insert", named_uuid("b")]],
                },
            ]
        )

    def _require_tso(self, datapath_type: str) -> None:
        if lacks_tso(datapath_type, self._root()):
            raise DatapathFault(f"ovs: {TSO_DISABLED}: {TSO_REMEDY}")

    def _free_ofports(self) -> Iterator[int]:
        """Unused port numbers. A number is reused as late as possible, so that no stale flow applies to a new port."""
        used = {number for port in self._read_ports() for number in (port.assigned_ofport, port.requested_ofport)}
        for number in chain(range(self._last_ofport + 1, OFPORTS.stop), range(OFPORTS.start, self._last_ofport + 1)):
            if number not in used:
                self._last_ofport = number
                yield number
        raise Exhausted(f"no port number left on bridge {self.name}")

    def _read_ports(self) -> Sequence[SwitchPort]:
        """All ports of the bridge. An update is mostly about one port, so the others are taken from the cache."""
        version = self.database.version
        if self._read_at != version:
            before, row = self._cache, self.find()
            keys = () if row is None else items_of(row[1]["ports"])
            self._cache = {key: cached for key in keys if (cached := self._read_port(key, before.get(key))) is not None}
            self._all = [cached.port for cached in self._cache.values()]
            ours = [port for port in self._all if _OWNER_KEY in port.external_ids]
            self._ours = {port.interface: port for port in ours if POOL_KEY not in port.external_ids}
            self._pool = {port.name: port for port in ours if POOL_KEY in port.external_ids}
            self._ofports = {name: port.ofport for name, port in self._ours.items() if port.ofport}
            self._read_at = version
        return self._all

    def _read_port(self, key: str, before: _CachedPort | None) -> _CachedPort | None:
        row = self.database.tables["Port"].get(key)
        if row is None:
            return None
        cached = before if before is not None and before.port_row is row else None
        interface_key = cached.interface_key if cached else one_of(row["interfaces"])
        interface = self.database.tables["Interface"].get(interface_key, _NO_ROW)
        if cached and cached.interface_row is interface:
            return cached
        # A port keeps its number when its device disappears; only `ifindex` becomes 0.
        assigned = max(one_of(interface.get("ofport"), 0), 0)
        ofport = 0 if one_of(interface.get("ifindex")) == 0 else assigned
        port = SwitchPort(
            name=row["name"],
            row=key,
            ofport=ofport,
            assigned_ofport=assigned,
            requested_ofport=one_of(interface.get("ofport_request"), 0),
            is_up=one_of(interface.get("admin_state"), "") == _UP,
            error="" if ofport else one_of(interface.get("error"), ""),
            external_ids=mapping_of(row["external_ids"]),
        )
        return _CachedPort(row, interface_key, interface, port)

    def find(self) -> tuple[str, Mapping[str, Any]] | None:
        """The bridge's row with its UUID; None if there is no such bridge."""
        rows = self.database.tables["Bridge"].items()
        return next(((key, row) for key, row in rows if row["name"] == self.name), None)

    def _root(self) -> Mapping[str, Any]:
        for row in self.database.tables["Open_vSwitch"].values():
            return row
        raise DatapathFault("ovs: the database has not been initialised: run ovs-vsctl init")

    def _where(self) -> list[Any]:
        return [["name", "==", self.name]]

    def mutate(self, column: str, mutator: str, value: Any) -> Operation:
        """The operation that mutates a column of the bridge."""
        return {"op": "mutate", "table": "Bridge", "where": self._where(), "mutations": [[column, mutator, value]]}

    def transact_and_wait(self, operations: Sequence[Operation]) -> None:
        """Commit operations, and wait until ovs-vswitchd has applied them, as ovs-vsctl does."""
        next_cfg = self._transact_next_cfg(operations)
        self.database.wait_until(lambda: self._root()["cur_cfg"] >= next_cfg, doing="configure the switch")

    def _transact_next_cfg(self, operations: Sequence[Operation]) -> int:
        """Commit operations, and increment `next_cfg`: ovs-vswitchd copies it to `cur_cfg` when it has applied them."""
        results = self.database.transact(
            [
                *operations,
                {"op": "mutate", "table": "Open_vSwitch", "where": [], "mutations": [["next_cfg", "+=", 1]]},
                {"op": "select", "table": "Open_vSwitch", "where": [], "columns": ["next_cfg"]},
            ]
        )
        try:
            return int(results[-1]["rows"][0]["next_cfg"])
        except (LookupError, TypeError, ValueError) as error:
            raise DatapathFault("ovsdb: select: the result has no next_cfg") from error
