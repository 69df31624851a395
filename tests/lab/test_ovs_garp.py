"""RARP announcements arrive on the wire with the VLAN tag of their network."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

from tests.support.ethernet import is_from, open_packet_socket, received_vlan_tag

from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.openflow.constants import OFPP_LOCAL
from weft.adapters.ovs.ports.garp import rarp_frame
from weft.kernel.netns import Namespace
from weft.lab.servers.openvswitch import running_switch
from weft.lab.waiting import DEADLINE

MAC = "02:02:0a:00:00:01"


def test_a_rarp_announcement_has_the_vlan_tag(tmp_path: Path) -> None:
    for words in ("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up"):
        subprocess.run(["ip", *words.split()], check=True, timeout=DEADLINE)
    with (
        running_switch(tmp_path / "ovs") as switch,
        Namespace.current() as here,
        open_packet_socket(here, interface="up1") as capture,
    ):
        switch.configure("add-br", "ours", "--", "set", "bridge", "ours", "datapath_type=netdev", "fail_mode=secure")
        switch.configure("add-port", "ours", "up0")
        with closing(OpenFlow(switch.management("ours"))) as openflow:
            openflow.send([rarp_frame((MAC, 7))], port=OFPP_LOCAL)
            assert received_vlan_tag(capture, is_from(MAC), within=DEADLINE) == 7
