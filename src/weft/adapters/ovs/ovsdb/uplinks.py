"""Uplinks for VLAN networks: a bridge of its own with the physical interfaces, connected to ours by a patch.

All uplinks are members of one port; several make a bond, and adding or removing one does not interrupt the others (T1).
That bridge switches tagged frames like any switch; policy is enforced on the integration bridge, behind the patch.
With the userspace datapath the host still receives untagged frames and keeps its addresses on the interface. The kernel
datapath would take all frames away from it, so an uplink with an address is refused there (W33).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weft.adapters.ovs.openflow.actions import Output
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.openflow.constants import OFPP_NORMAL
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.ovsdb.bridge import SwitchBridge
from weft.adapters.ovs.ovsdb.client import Database, Operation
from weft.adapters.ovs.ovsdb.types import items_of, map_of, named_uuid, one_of, set_of, uuid
from weft.adapters.ovs.ports.garp import AnnouncedMac, rarp_frame
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.link import change_link, read_link
from weft.kernel.netlink.route import read_addresses
from weft.kernel.netlink.socket import NetlinkSocket

# Names of Contiv (contiv 7.1).
VLAN_BRIDGE: Final = "contivVlanBridge"
UPLINKS: Final = "uplinkPort"
# The patch port on the integration bridge; its peer has the suffix `-up`.
PATCH: Final = "weft-vlan"
_PATCH_UP: Final = f"{PATCH}-up"
_EXTERNAL_IDS = {"weft-uplink": ""}
# NORMAL switching for frames with a VLAN tag (OFPVID_PRESENT); others are dropped.
_FLOWS = frozenset({Flow(0, 1, match({"vlan_vid": (0x1000, 0x1000)}), (Output(OFPP_NORMAL),))})
# Without LACP on the other side the bond falls back to active-backup.
_BOND = {"bond_mode": "balance-tcp", "lacp": "active", "other_config": map_of({"lacp-fallback-ab": "true"})}
# Resets the columns when a bond loses all members but one.
_SINGLE = {"bond_mode": set_of(()), "lacp": set_of(()), "other_config": map_of({})}


class Uplinks:
    """The VLAN bridge. Without names there is none. `integration` is the bridge that the patch leads to."""

    def __init__(self, names: Sequence[str], *, switch: Path, database: Database, integration: SwitchBridge) -> None:
        self.names = frozenset(names)
        self._database = database
        self._integration = integration
        self._bridge = SwitchBridge(database, VLAN_BRIDGE)
        self._trunk, self._trunk_at = 0, (0, 0)
        self._uplinks_changed = False
        self._openflow = OpenFlow(f"unix:{switch / VLAN_BRIDGE}.mgmt")

    def close(self) -> None:
        self._openflow.close()

    @property
    def trunk(self) -> int:
        """The number of the patch port on the integration bridge; 0 if there is none."""
        # Every flow context asks for it, so look it up only when the database has changed.
        if self.names and self._trunk_at != self._database.version:
            self._trunk, self._trunk_at = self._ofport(self._integration, PATCH), self._database.version
        return self._trunk

    @property
    def connect_count(self) -> int:
        return self._openflow.connect_count

    def converge(self, netlink: NetlinkSocket) -> list[str]:
        """Make these interfaces the uplinks; a log of the changes. `DatapathFault` if one is missing or fails."""
        if not self.names:
            return self.remove()
        links = {name: read_link(netlink, name) for name in sorted(self.names)}
        if missing := [name for name, link in links.items() if link is None]:
            raise DatapathFault(f"uplink {', '.join(missing)} is not on this machine: name others by --vlan-uplinks")
        netlink.send_batch([change_link(link.index, up=True) for link in links.values() if link and not link.up])
        repaired = self._bridge.prepare()
        self._refuse_host_addresses(
            {
                name: [str(address) for address in read_addresses(netlink, link=link.index)]
                for name, link in links.items()
                if link
            }
        )
        changes = [*self._reconcile_members()]
        repaired += [*self._connect_bridges(), *changes]
        self._uplinks_changed |= bool(changes)
        actual = {counted.flow for counted in self._openflow.read_flows()}
        self._openflow.change(drop=[flow.key for flow in actual - _FLOWS], put=_FLOWS - actual)
        repaired += [f"put flow {flow} on {VLAN_BRIDGE}" for flow in _FLOWS - actual]
        if faults := [*self._faults()]:
            raise DatapathFault("; ".join(faults))
        return repaired

    def remove(self) -> list[str]:
        """Remove the VLAN bridge and the patch; a log of the changes."""
        if not self._bridge.is_ours:
            return []
        # The patch port is on the integration bridge, which stays.
        if patch := self._row(self._integration, PATCH):
            self._integration.transact_and_wait([self._integration.mutate("ports", "delete", uuid(patch))])
        return self._bridge.remove(self._openflow)

    def announce(self, macs: Iterable[AnnouncedMac]) -> None:
        """Announce MACs if the uplinks have changed since the last call: they are behind another switch port now."""
        if self._uplinks_changed:
            self.send_garp(macs)
        self._uplinks_changed = False

    def send_garp(self, macs: Iterable[AnnouncedMac]) -> None:
        """Announce MACs of new endpoints, which physical switches may know from another node."""
        if frames := [*map(rarp_frame, sorted(macs))] if self.trunk else []:
            self._openflow.send(frames, port=self._ofport(self._bridge, _PATCH_UP))

    def has_drifted(self) -> bool:
        """Whether the uplink port or the patch in OVSDB is not as configured."""
        if not self.names:
            return False
        port = self._port(self._bridge, UPLINKS)
        return port is None or self._interfaces(port).keys() != self.names or not self.trunk

    def lacks_flows(self) -> bool:
        """Whether the bridge has another number of our flows than it should."""
        return bool(self.names) and self._openflow.count_flows() != len(_FLOWS)

    def poll(self) -> None:
        """As `Connection.poll`."""
        if self.names:
            self._openflow.poll()

    def _refuse_host_addresses(self, addresses: Mapping[str, Sequence[str]]) -> None:
        row = self._bridge.find()
        addressed = [f"{name} ({', '.join(found)})" for name, found in addresses.items() if found]
        if row is not None and row[1]["datapath_type"] != "netdev" and addressed:
            raise DatapathFault(
                f"uplink {'; '.join(addressed)} has addresses of this host, which would become unreachable: "
                f"move them to {VLAN_BRIDGE} or to another interface"
            )

    def _connect_bridges(self) -> Iterator[str]:
        """Create the patch between the two bridges."""
        ends = ((self._integration, PATCH, _PATCH_UP), (self._bridge, _PATCH_UP, PATCH))
        if all(self._port(bridge, name) for bridge, name, _ in ends):
            return
        operations: list[Operation] = []
        for position, (bridge, name, peer) in enumerate(ends):
            if self._port(bridge, name) is None:
                interface = {"name": name, "type": "patch", "options": map_of({"peer": peer})}
                operations += [
                    *_insert_port(name, {f"i{position}": interface}, row=f"p{position}"),
                    bridge.mutate("ports", "insert", named_uuid(f"p{position}")),
                ]
        self._bridge.transact_and_wait(operations)
        yield f"connected {VLAN_BRIDGE} to {self._integration.name}"

    def _reconcile_members(self) -> Iterator[str]:
        """Make the uplinks the members of the uplink port."""
        port = self._port(self._bridge, UPLINKS)
        settings = _BOND if len(self.names) > 1 else _SINGLE
        if port is None:
            rows = {f"i{position}": {"name": name} for position, name in enumerate(sorted(self.names))}
            inserts = _insert_port(UPLINKS, rows, row="p", **settings)
            self._bridge.transact_and_wait([*inserts, self._bridge.mutate("ports", "insert", named_uuid("p"))])
            yield f"added uplinks {', '.join(sorted(self.names))}"
            return
        members = {
            row["name"]: key
            for key in items_of(port["interfaces"])
            if (row := self._database.tables["Interface"].get(key))
        }
        added, removed = self.names - members.keys(), members.keys() - self.names
        if not added and not removed:
            return
        rows = {f"i{position}": {"name": name} for position, name in enumerate(sorted(added))}
        where = [["name", "==", UPLINKS]]
        # One transaction: a port without interfaces violates the schema, and a bond must not be without members.
        mutations = [
            ["interfaces", "insert", set_of(map(named_uuid, rows))],
            ["interfaces", "delete", set_of(uuid(members[name]) for name in removed)],
        ]
        self._bridge.transact_and_wait(
            [
                *({"op": "insert", "table": "Interface", "uuid-name": key, "row": row} for key, row in rows.items()),
                {"op": "mutate", "table": "Port", "where": where, "mutations": mutations},
                {"op": "update", "table": "Port", "where": where, "row": settings},
            ]
        )
        yield from (f"added uplink {name}" for name in sorted(added))
        yield from (f"removed uplink {name}" for name in sorted(removed))

    def _faults(self) -> Iterator[str]:
        port = self._port(self._bridge, UPLINKS)
        for name, row in self._interfaces(port).items() if port else ():
            if fault := one_of(row.get("error"), ""):
                yield f"uplink {name}: {fault}"

    def _row(self, bridge: SwitchBridge, name: str) -> str | None:
        """The UUID of a port of a bridge, by name."""
        found, ports = bridge.find(), self._database.tables["Port"]
        keys = items_of(found[1]["ports"]) if found else ()
        return next((key for key in keys if key in ports and ports[key]["name"] == name), None)

    def _port(self, bridge: SwitchBridge, name: str) -> Mapping[str, Any] | None:
        key = self._row(bridge, name)
        return self._database.tables["Port"][key] if key else None

    def _ofport(self, bridge: SwitchBridge, name: str) -> int:
        """The number of a port of a bridge, by name; 0 if there is none."""
        port = self._port(bridge, name)
        row = self._interfaces(port).get(name, {}) if port else {}
        number: int = one_of(row.get("ofport"), 0)
        return max(number, 0)

    def _interfaces(self, port: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The interfaces of a port by name."""
        rows = map(self._database.tables["Interface"].get, items_of(port["interfaces"]))
        return {row["name"]: row for row in rows if row is not None}


def _insert_port(name: str, interfaces: Mapping[str, Operation], *, row: str, **columns: Any) -> list[Operation]:
    """The operations that insert a port with these interfaces. `row` names it within the transaction."""
    port = {
        "name": name,
        "interfaces": set_of(map(named_uuid, interfaces)),
        "external_ids": map_of(_EXTERNAL_IDS),
        **columns,
    }
    return [
        *(
            {"op": "insert", "table": "Interface", "uuid-name": key, "row": interface}
            for key, interface in interfaces.items()
        ),
        {"op": "insert", "table": "Port", "uuid-name": row, "row": port},
    ]
