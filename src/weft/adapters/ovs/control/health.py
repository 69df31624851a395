"""How a switch is, for a person at the machine: what we need of it, each with what to do where that is not so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from weft.adapters.ovs.control.unixctl import ask_switch
from weft.adapters.ovs.ovsdb.bridge import (
    CHECKSUMS_REMEDY,
    LOST_CHECKSUMS,
    NAME,
    PROTOCOLS,
    best_kind,
    loses_checksums,
)
from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.types import items_of, one_of
from weft.adapters.ovs.ovsdb.uplinks import VLAN_BRIDGE
from weft.domain.errors import DatapathFault
from weft.ports.datapath import Finding

_OLDEST = (3, 1)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_COLUMNS = {
    "Open_vSwitch": ("next_cfg", "cur_cfg", "datapath_types", "other_config"),
    "Bridge": ("name", "fail_mode", "protocols", "controller", "datapath_type"),
    "Controller": ("target",),
}
_MENDED = "netplugin mends this by itself within a minute; if it stays, see its log"


def examine_switch(directory: Path) -> Iterator[Finding]:
    """All that can be looked at; what needs a daemon that is away is left out. Changes nothing."""
    with closing(Database(f"unix:{directory / 'db.sock'}", columns=_COLUMNS)) as database:
        try:
            database.look()
        except DatapathFault as error:
            remedy = "start ovsdb-server, or name the directory of its db.sock by --ovs-dir"
            yield Finding(name="ovsdb-server", text=error.message, remedy=remedy)
            return
        yield Finding(name="ovsdb-server", text=f"{directory / 'db.sock'} answers")
        root = next(iter(database.tables["Open_vSwitch"].values()), None)
        if root is None:
            yield Finding(name="ovsdb-server", text="the database is empty", remedy="run ovs-vsctl init")
            return
        yield from _examine_daemon(directory, root)
        yield _examine_forwarding(root)
        for bridge in database.tables["Bridge"].values():
            if bridge["name"] in {NAME, VLAN_BRIDGE}:
                yield from _examine_bridge(bridge, database.tables["Controller"])


def _examine_daemon(directory: Path, root: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        words = ask_switch(directory, "version").strip()
    except DatapathFault as error:
        yield Finding(name="ovs-vswitchd", text=error.message, remedy="start ovs-vswitchd, or see its log")
        return
    found = _VERSION.search(words)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST:
        remedy = f"upgrade Open vSwitch to {_OLDEST[0]}.{_OLDEST[1]} or newer"
        yield Finding(name="ovs-vswitchd", text=f"it is {words.splitlines()[0]}", remedy=remedy)
    elif root["cur_cfg"] < root["next_cfg"]:
        text = f"it has done {root['cur_cfg']} of the {root['next_cfg']} things it was told"
        remedy = "see that it reaches this ovsdb-server, and its log"
        yield Finding(name="ovs-vswitchd", text=text, remedy=remedy, stops_us=False)
    else:
        yield Finding(name="ovs-vswitchd", text=f"{words.splitlines()[0]} follows the database")


def _examine_forwarding(root: Mapping[str, Any]) -> Finding:
    kinds = items_of(root["datapath_types"])
    kind = best_kind(kinds)
    if kind not in kinds:
        text = f"the switch offers {', '.join(kinds) or 'no datapath'}, of which we can use none"
        return Finding(name="forwarding", text=text, remedy="install a build of Open vSwitch with the netdev datapath")
    if loses_checksums(kind, root):
        return Finding(name="forwarding", text=LOST_CHECKSUMS, remedy=CHECKSUMS_REMEDY)
    where = "in ovs-vswitchd itself (netdev)" if kind == "netdev" else "in the kernel"
    return Finding(name="forwarding", text=f"new bridges forward {where}")


def _examine_bridge(bridge: Mapping[str, Any], controllers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    name = f"bridge {bridge['name']}"
    faults = []
    if (mode := one_of(bridge["fail_mode"], "standalone")) != "secure":
        faults.append(f"its fail_mode is {mode}, not secure: without flows it passes everything on")
    if missing := set(PROTOCOLS) - {*items_of(bridge["protocols"])}:
        faults.append(f"it does not speak {', '.join(sorted(missing))}")
    for fault in faults:
        yield Finding(name=name, text=fault, remedy=_MENDED)
    targets = [controllers[each]["target"] for each in items_of(bridge["controller"]) if each in controllers]
    if targets:
        yield Finding(
            name=name,
            text=f"controllers that are not ours may change its flows: {', '.join(sorted(targets))}",
            remedy=f"ovs-vsctl del-controller {bridge['name']}",
            stops_us=False,
        )
    if not faults and not targets:
        kind = bridge["datapath_type"] or "system"
        yield Finding(name=name, text=f"of type {kind}, drops what no flow passes on, and nobody else has a hand in it")
