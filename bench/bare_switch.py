"""Open vSwitch without Weft: a switch that only gets ports, and a hand-written pipeline with conntrack."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path

from bench.labs import Pair, ip
from weft.adapters.ovs.ovsdb.bridge import SwitchBridge, open_database
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.servers.openvswitch import Switch, running_switch

_PIPELINE = (
    "table=0,priority=2,arp,actions=NORMAL",
    "table=0,priority=1,ip,actions=ct(table=1,zone=1)",
    "table=1,priority=1,ct_state=+trk+new,ip,actions=ct(commit,zone=1),NORMAL",
    "table=1,priority=1,ct_state=+trk+est,ip,actions=NORMAL",
)


class BareSwitch:
    """A switch on a machine whose veth devices exist and are up, with one peer namespace each."""

    def __init__(self, directory: Path, stack: ExitStack, *, ports: int) -> None:
        namespaces = NamespaceDirectory(directory)
        namespaces.prepare()
        machine = stack.enter_context(namespaces.create("machine"))
        self._switch = stack.enter_context(running_switch(directory / "ovs", netns=namespaces.path / "machine"))
        for number in range(ports):
            stack.enter_context(namespaces.create(f"pod{number}"))
            ip(
                machine,
                f"link add b{number} type veth peer name eth0 netns {namespaces.path}/pod{number}",
                f"link set b{number} up",
            )
        database = open_database(self._switch.directory)
        stack.callback(database.close)
        self._bridge = SwitchBridge(database)
        self._bridge.prepare()
        self._names = (f"b{number}" for number in count())
        self._added = 0

    def add(self, ports: int) -> float:
        """Milliseconds from the commit of ports until the switch has assigned their ofports."""
        names = [*islice(self._names, ports)]
        self._added += ports
        began = time.perf_counter()
        self._bridge.add_ports({name: {} for name in names})
        return (time.perf_counter() - began) * 1e3

    def fill(self, ports: int) -> None:
        """Add ports up to this number."""
        if ports > self._added:
            self.add(ports - self._added)


class HandMade:
    """Pods on Open vSwitch bridges that track every connection, with four flows."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._namespaces = NamespaceDirectory(directory / "netns")
        self._namespaces.prepare()
        self._underlay = stack.enter_context(Namespace.current())

    def one_host(self) -> Pair:
        """Create two pods on one bridge."""
        host, switch = self._host("plain")
        pods = [self._pod(host, switch, f"plain{number}", address=f"10.98.0.{number}") for number in (1, 2)]
        return Pair(pods[0], pods[1], "10.98.0.2")

    def two_hosts(self) -> Pair:
        """Create a pod on either side of a kernel VXLAN tunnel between two bridges."""
        pods = []
        for number, other in ((1, 2), (2, 1)):
            host, switch = self._host(f"tunnel{number}")
            ip(
                self._underlay,
                f"link add hand{number} type veth peer name eth0 netns {self._namespaces.path}/tunnel{number}",
                f"link set hand{number} master underlay up",
            )
            ip(
                host,
                f"addr add 192.0.2.{100 + number}/24 dev eth0",
                "link set eth0 up",
                f"link add vx0 type vxlan id 99 dstport 4789 local 192.0.2.{100 + number} remote 192.0.2.{100 + other}",
                "link set vx0 up",
            )
            switch.configure("add-port", "hand", "vx0")
            pods.append(self._pod(host, switch, f"far{number}", address=f"10.99.0.{number}"))
        return Pair(pods[0], pods[1], "10.99.0.2")

    def on_switch(self, machine: Path, switch: Switch) -> Pair:
        """Create two pods on a bridge of a switch that has other bridges."""
        host = self._stack.enter_context(Namespace.open(machine))
        self._make_bridge(switch)
        pods = [self._pod(host, switch, f"beside{number}", address=f"10.97.0.{number}") for number in (1, 2)]
        return Pair(pods[0], pods[1], "10.97.0.2")

    @staticmethod
    def put_flows(switch: Switch) -> bool:
        """Install the flows of the bridge; False if the switch does not answer."""
        command = ["ovs-ofctl", "add-flows", switch.management("hand"), "-"]
        flows = "\n".join(_PIPELINE)
        return (
            subprocess.run(command, input=flows, text=True, check=False, timeout=60, capture_output=True).returncode
            == 0
        )

    def _host(self, name: str) -> tuple[Namespace, Switch]:
        host = self._stack.enter_context(self._namespaces.create(name))
        place = self._directory / f"{name}-ovs"
        switch = self._stack.enter_context(running_switch(place, netns=self._namespaces.path / name))
        self._make_bridge(switch)
        return host, switch

    def _make_bridge(self, switch: Switch) -> None:
        switch.configure("add-br", "hand", "--", "set", "bridge", "hand", "datapath_type=netdev", "fail_mode=secure")
        assert self.put_flows(switch)

    def _pod(self, host: Namespace, switch: Switch, name: str, *, address: str) -> Path:
        path = self._namespaces.path / name
        pod = self._stack.enter_context(self._namespaces.create(name))
        ip(host, f"link add {name} mtu 1450 type veth peer name eth0 netns {path}", f"link set {name} up")
        ip(pod, f"addr add {address}/24 dev eth0", "link set eth0 mtu 1450 up")
        switch.configure("add-port", "hand", name)
        return path
