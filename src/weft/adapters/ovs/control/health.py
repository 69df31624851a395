"""Checks of an Open vSwitch installation for `weft doctor`: each requirement, with a remedy if it is not met."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from weft.adapters.ovs.control.unixctl import unixctl_call
from weft.adapters.ovs.ovsdb.bridge import (
    BRIDGE,
    PROTOCOLS,
    TSO_DISABLED,
    TSO_REMEDY,
    lacks_tso,
    preferred_datapath_type,
)
from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.types import items_of, one_of
from weft.adapters.ovs.ovsdb.uplinks import VLAN_BRIDGE
from weft.domain.errors import DatapathFault
from weft.ports.datapath import CheckResult

# The first version with conntrack flush by address (NXT_CT_FLUSH).
_MIN_VERSION = (3, 1)
_VERSION = re.compile(r"(\d+)\.(\d+)")
_COLUMNS = {
    "Open_vSwitch": ("next_cfg", "cur_cfg", "datapath_types", "other_config"),
    "Bridge": ("name", "fail_mode", "protocols", "controller", "datapath_type"),
    "Controller": ("target",),
}
_SELF_REPAIR = "netplugin repairs this within a minute; if it does not, see its log"


def check_switch(directory: Path) -> Iterator[CheckResult]:
    """Check daemons, datapath and bridges, as far as the daemons run. Changes nothing."""
    with closing(Database(f"unix:{directory / 'db.sock'}", columns=_COLUMNS)) as database:
        try:
            database.poll()
        except DatapathFault as error:
            remedy = "start ovsdb-server, or name the directory of its db.sock by --ovs-dir"
            yield CheckResult(name="ovsdb-server", text=error.message, remedy=remedy)
            return
        yield CheckResult(name="ovsdb-server", text=f"connected to {directory / 'db.sock'}")
        root = next(iter(database.tables["Open_vSwitch"].values()), None)
        if root is None:
            yield CheckResult(name="ovsdb-server", text="the database is empty", remedy="run ovs-vsctl init")
            return
        yield from _check_daemon(directory, root)
        yield _check_datapath(root)
        # Bridges of others may be as they like.
        for bridge in database.tables["Bridge"].values():
            if bridge["name"] in {BRIDGE, VLAN_BRIDGE}:
                yield from _check_bridge(bridge, database.tables["Controller"])


def _check_daemon(directory: Path, root: Mapping[str, Any]) -> Iterator[CheckResult]:
    try:
        version = unixctl_call(directory, "version").strip()
    except DatapathFault as error:
        yield CheckResult(name="ovs-vswitchd", text=error.message, remedy="start ovs-vswitchd, or see its log")
        return
    found = _VERSION.search(version)
    if found is not None and (int(found[1]), int(found[2])) < _MIN_VERSION:
        remedy = f"upgrade Open vSwitch to {_MIN_VERSION[0]}.{_MIN_VERSION[1]} or newer"
        yield CheckResult(name="ovs-vswitchd", text=f"{version.splitlines()[0]} is too old", remedy=remedy)
    # Only a warning: it may be about to apply it.
    elif root["cur_cfg"] < root["next_cfg"]:
        text = f"it has applied configuration {root['cur_cfg']}, ovsdb-server has {root['next_cfg']}"
        remedy = "check that it is connected to this ovsdb-server, and see its log"
        yield CheckResult(name="ovs-vswitchd", text=text, remedy=remedy, is_fatal=False)
    else:
        yield CheckResult(name="ovs-vswitchd", text=f"{version.splitlines()[0]} is in sync with the database")


def _check_datapath(root: Mapping[str, Any]) -> CheckResult:
    types = items_of(root["datapath_types"])
    datapath_type = preferred_datapath_type(types)
    if datapath_type not in types:
        text = f"the switch offers {', '.join(types) or 'no datapath type'}, but neither system nor netdev"
        return CheckResult(name="forwarding", text=text, remedy="install Open vSwitch with the netdev datapath")
    if lacks_tso(datapath_type, root):
        return CheckResult(name="forwarding", text=TSO_DISABLED, remedy=TSO_REMEDY)
    where = "in ovs-vswitchd itself (netdev)" if datapath_type == "netdev" else "in the kernel"
    return CheckResult(name="forwarding", text=f"new bridges forward {where}")


def _check_bridge(bridge: Mapping[str, Any], controllers: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    name = f"bridge {bridge['name']}"
    faults = []
    # An empty column means standalone.
    if (mode := one_of(bridge["fail_mode"], "standalone")) != "secure":
        faults.append(f"fail_mode is {mode}, not secure: without flows it forwards everything")
    if missing := set(PROTOCOLS) - {*items_of(bridge["protocols"])}:
        faults.append(f"it lacks the protocols {', '.join(sorted(missing))}")
    for fault in faults:
        yield CheckResult(name=name, text=fault, remedy=_SELF_REPAIR)
    targets = [controllers[key]["target"] for key in items_of(bridge["controller"]) if key in controllers]
    if targets:
        yield CheckResult(
            name=name,
            text=f"foreign controllers may change its flows: {', '.join(sorted(targets))}",
            remedy=f"ovs-vsctl del-controller {bridge['name']}",
            is_fatal=False,
        )
    if not faults and not targets:
        datapath_type = bridge["datapath_type"] or "system"
        yield CheckResult(name=name, text=f"datapath type {datapath_type}, fail_mode secure, no foreign controller")
