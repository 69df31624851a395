"""The names of OpenFlow tables in OVSDB: `ovs-ofctl` shows those of docs/reference/ovs-tables.md."""

from __future__ import annotations

import re
from pathlib import Path

from weft.adapters.ovs.datapath import OvsDatapath
from weft.adapters.ovs.ovsdb.bridge import BRIDGE
from weft.adapters.ovs.pipeline.tables import NAMES
from weft.domain.addresses import parse_address
from weft.domain.desired.state import TenantNetns
from weft.domain.ids import TenantName
from weft.lab.servers.openvswitch import Switch, running_switch

VTEP = parse_address("192.0.2.1", field="vtep")
DESIRED = frozenset({TenantNetns(TenantName("blue"))})


def shown_names(switch: Switch) -> set[str]:
    flows = switch.flows("dump-flows", BRIDGE, "--names", "--no-stats")
    return set(re.findall(r"(?:table=|goto_table:)(\w+)", flows))


def test_ovs_ofctl_shows_the_table_names_of_the_reference(isolated: None, tmp_path: Path) -> None:
    """They are restored when somebody clears them, and survive a restart of ovs-vswitchd."""
    with (
        running_switch(tmp_path / "ovs") as switch,
        OvsDatapath(
            switch=switch.directory, directory=tmp_path / "tenant-netns", vtep=VTEP, vxlan_port=4789
        ) as datapath,
    ):
        datapath.converge(DESIRED)
        assert {"Classifier", "ConntrackZone", "L3Forwarding"} <= shown_names(switch) <= set(NAMES.values())
        switch.configure("clear", "bridge", BRIDGE, "flow_tables")
        assert datapath.converge(DESIRED).repaired == (f"set flow_tables of bridge {BRIDGE}",)
        switch.kill_daemon()
        switch.start_daemon()
        datapath.converge(DESIRED)
        assert {"Classifier", "ConntrackZone"} <= shown_names(switch) <= set(NAMES.values())
