"""The node's way to networks whose frames have VLAN tags: a bridge with the uplinks, joined to ours by a patch.

All uplinks are members of one port: with several of them it is a bond, and one that comes or goes leaves the others
alone (T1). That bridge switches frames with tags as any switch does; everything is decided on ours, behind the patch.
Where the switch listens at the machine's devices, the machine goes on hearing what comes without a tag and keeps its
addresses there. The kernel's own datapath would take everything away from it, so there an uplink with an address is
refused (W33).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weft.adapters.ovs.openflow.actions import NORMAL, Output
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.ovsdb.bridge import SwitchBridge
from weft.adapters.ovs.ovsdb.client import Database, Operation
from weft.adapters.ovs.ovsdb.types import items_of, map_of, new_row, one_of, set_of, uuid
from weft.adapters.ovs.ports.garp import Voice, announcement
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.link import alter_link, read_link
from weft.kernel.netlink.route import read_addresses
from weft.kernel.netlink.socket import NetlinkSocket

VLAN_BRIDGE: Final = "contivVlanBridge"
UPLINKS: Final = "uplinkPort"
# The patch's end on our bridge; the other one is called by the same name and `-up`.
PATCH: Final = "weft-vlan"
_PATCH_UP: Final = f"{PATCH}-up"
_MARK = {"weft-uplink": ""}
# Frames that have a tag, whichever, are switched.
_FLOWS = frozenset({Flow(0, 1, match({"vlan_vid": (0x1000, 0x1000)}), (Output(NORMAL),))})
_BOND = {"bond_mode": "balance-tcp", "lacp": "active", "other_config": map_of({"lacp-fallback-ab": "true"})}
_SINGLE = {"bond_mode": set_of(()), "lacp": set_of(()), "other_config": map_of({})}


class Uplinks:
    """See the module. Without names there is no such bridge."""

    def __init__(self, names: Sequence[str], *, switch: Path, database: Database, ours: SwitchBridge) -> None:
        self.names = frozenset(names)
        self._database = database
        self._ours = ours
        self._bridge = SwitchBridge(database, VLAN_BRIDGE)
        self._trunk, self._trunk_at = 0, (0, 0)
        self._is_new = False
        self._openflow = OpenFlow(f"unix:{switch / VLAN_BRIDGE}.mgmt")

    def close(self) -> None:
        self._openflow.close()

    @property
    def trunk(self) -> int:
        """The number of our end of the patch; 0 where there is none."""
        if self.names and self._trunk_at != self._database.news:
            self._trunk, self._trunk_at = self._number(self._ours, PATCH), self._database.news
        return self._trunk

    @property
    def connections(self) -> int:
        return self._openflow.connections

    def converge(self, netlink: NetlinkSocket) -> list[str]:
        """Exactly these uplinks carry frames with tags; what was done, in words. `DatapathFault` where one cannot."""
        if not self.names:
            return self.remove()
        links = {name: read_link(netlink, name) for name in sorted(self.names)}
        if missing := [name for name, link in links.items() if link is None]:
            raise DatapathFault(f"uplink {', '.join(missing)} is not on this machine: name others by --vlan-uplinks")
        netlink.send_batch([alter_link(link.index, up=True) for link in links.values() if link and not link.up])
        repaired = self._bridge.prepare()
        self._spare_addresses(
            {
                name: [str(each) for each in read_addresses(netlink, link=link.index)]
                for name, link in links.items()
                if link
            }
        )
        gathered = [*self._gather()]
        repaired += [*self._join(), *gathered]
        self._is_new |= bool(gathered)
        actual = {each.flow for each in self._openflow.read_flows()}
        self._openflow.change(drop=[flow.key for flow in actual - _FLOWS], put=_FLOWS - actual)
        repaired += [f"put flow {flow} on {VLAN_BRIDGE}" for flow in _FLOWS - actual]
        if faults := [*self._faults()]:
            raise DatapathFault("; ".join(faults))
        return repaired

    def remove(self) -> list[str]:
        """No uplinks, and nothing that was made for them; what was done, in words."""
        if not self._bridge.is_ours:
            return []
        if patch := self._row(self._ours, PATCH):
            self._ours.settled([self._ours.mutate("ports", "delete", uuid(patch))])
        return self._bridge.remove(self._openflow)

    def announce(self, voices: Iterable[Voice]) -> None:
        """Have those heard who are now behind another uplink than before."""
        if self._is_new:
            self.send_garp(voices)
        self._is_new = False

    def send_garp(self, voices: Iterable[Voice]) -> None:
        """Have newcomers heard, whose MACs the switches outside may know from elsewhere."""
        if frames := [*map(announcement, sorted(voices))] if self.trunk else []:
            self._openflow.send(frames, port=self._number(self._bridge, _PATCH_UP))

    def is_disturbed(self) -> bool:
        """Whether others have changed what is in the database about the uplinks."""
        if not self.names:
            return False
        port = self._port(self._bridge, UPLINKS)
        return port is None or self._interfaces(port).keys() != self.names or not self.trunk

    def lacks_flows(self) -> bool:
        """Whether the bridge has other flows of ours than it should."""
        return bool(self.names) and self._openflow.count_flows() != len(_FLOWS)

    def look(self) -> None:
        """As `Connection.look`."""
        if self.names:
            self._openflow.look()

    def _spare_addresses(self, addresses: Mapping[str, Sequence[str]]) -> None:
        row = self._bridge.find()
        addressed = [f"{name} ({', '.join(found)})" for name, found in addresses.items() if found]
        if row is not None and row[1]["datapath_type"] != "netdev" and addressed:
            raise DatapathFault(
                f"uplink {'; '.join(addressed)} has addresses of this machine, which would be cut off: "
                f"give them to {VLAN_BRIDGE} or to another interface"
            )

    def _join(self) -> Iterator[str]:
        """The patch between the two bridges."""
        ends = ((self._ours, PATCH, _PATCH_UP), (self._bridge, _PATCH_UP, PATCH))
        if all(self._port(bridge, name) for bridge, name, _ in ends):
            return
        operations: list[Operation] = []
        for position, (bridge, name, peer) in enumerate(ends):
            if self._port(bridge, name) is None:
                interface = {"name": name, "type": "patch", "options": map_of({"peer": peer})}
                operations += [
                    *_insert_port(name, {f"i{position}": interface}, row=f"p{position}"),
                    bridge.mutate("ports", "insert", new_row(f"p{position}")),
                ]
        self._bridge.settled(operations)
        yield f"joined {VLAN_BRIDGE} to {self._ours.name}"

    def _gather(self) -> Iterator[str]:
        """The one port has these members and no others."""
        port = self._port(self._bridge, UPLINKS)
        kind = _BOND if len(self.names) > 1 else _SINGLE
        if port is None:
            rows = {f"i{position}": {"name": name} for position, name in enumerate(sorted(self.names))}
            inserts = _insert_port(UPLINKS, rows, row="p", **kind)
            self._bridge.settled([*inserts, self._bridge.mutate("ports", "insert", new_row("p"))])
            yield f"added uplinks {', '.join(sorted(self.names))}"
            return
        members = {
            row["name"]: key
            for key in items_of(port["interfaces"])
            if (row := self._database.tables["Interface"].get(key))
        }
        come, gone = self.names - members.keys(), members.keys() - self.names
        if not come and not gone:
            return
        rows = {f"i{position}": {"name": name} for position, name in enumerate(sorted(come))}
        where = [["name", "==", UPLINKS]]
        mutations = [
            ["interfaces", "insert", set_of(map(new_row, rows))],
            ["interfaces", "delete", set_of(uuid(members[name]) for name in gone)],
        ]
        self._bridge.settled(
            [
                *({"op": "insert", "table": "Interface", "uuid-name": key, "row": row} for key, row in rows.items()),
                {"op": "mutate", "table": "Port", "where": where, "mutations": mutations},
                {"op": "update", "table": "Port", "where": where, "row": kind},
            ]
        )
        yield from (f"added uplink {name}" for name in sorted(come))
        yield from (f"removed uplink {name}" for name in sorted(gone))

    def _faults(self) -> Iterator[str]:
        port = self._port(self._bridge, UPLINKS)
        for name, row in self._interfaces(port).items() if port else ():
            if fault := one_of(row.get("error"), ""):
                yield f"uplink {name}: {fault}"

    def _row(self, bridge: SwitchBridge, name: str) -> str | None:
        """The key of a bridge's port of a name."""
        found, ports = bridge.find(), self._database.tables["Port"]
        keys = items_of(found[1]["ports"]) if found else ()
        return next((key for key in keys if key in ports and ports[key]["name"] == name), None)

    def _port(self, bridge: SwitchBridge, name: str) -> Mapping[str, Any] | None:
        key = self._row(bridge, name)
        return self._database.tables["Port"][key] if key else None

    def _number(self, bridge: SwitchBridge, name: str) -> int:
        """That of a bridge's port with one member, called the same; 0 where there is none."""
        port = self._port(bridge, name)
        row = self._interfaces(port).get(name, {}) if port else {}
        number: int = one_of(row.get("ofport"), 0)
        return max(number, 0)

    def _interfaces(self, port: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """The members of a port by name."""
        rows = map(self._database.tables["Interface"].get, items_of(port["interfaces"]))
        return {row["name"]: row for row in rows if row is not None}


def _insert_port(name: str, interfaces: Mapping[str, Operation], *, row: str, **columns: Any) -> list[Operation]:
    """What makes a port with these members, known in the same transaction by the name of its row."""
    port = {"name": name, "interfaces": set_of(map(new_row, interfaces)), "external_ids": map_of(_MARK), **columns}
    return [
        *({"op": "insert", "table": "Interface", "uuid-name": key, "row": each} for key, each in interfaces.items()),
        {"op": "insert", "table": "Port", "uuid-name": row, "row": port},
    ]
