"""Who is behind an uplink is heard on its wire, with the tag of its network."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

from tests.support.ethernet import is_from, tag_heard, wire_of

from weft.adapters.ovs.openflow.actions import LOCAL
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.ports.garp import announcement
from weft.kernel.netns import Namespace
from weft.lab.servers.openvswitch import running_switch
from weft.lab.waiting import DEADLINE

MAC = "02:02:0a:00:00:01"


def test_a_voice_is_heard_with_its_tag(tmp_path: Path) -> None:
    for words in ("link add up0 type veth peer name up1", "link set up0 up", "link set up1 up"):
        subprocess.run(["ip", *words.split()], check=True, timeout=DEADLINE)
    with running_switch(tmp_path / "ovs") as switch, Namespace.current() as here, wire_of(here, interface="up1") as ear:
        switch.configure("add-br", "ours", "--", "set", "bridge", "ours", "datapath_type=netdev", "fail_mode=secure")
        switch.configure("add-port", "ours", "up0")
        with closing(OpenFlow(switch.management("ours"))) as openflow:
            openflow.send([announcement((MAC, 7))], port=LOCAL)
            assert tag_heard(ear, is_from(MAC), within=DEADLINE) == 7
