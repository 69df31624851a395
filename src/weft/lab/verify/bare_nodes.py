"""Hosts with a datapath each and nothing else: pods are plugged by hand, and policy comes straight from an engine.

The caller must be in network and mount namespaces of its own (`weft.lab.namespaces`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from weft import drivers
from weft.domain.addresses import BITS, Address, mac_of, parse_address
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.segments import RemoteMac, Segment, wire_number
from weft.domain.desired.state import (
    Beyond,
    Port,
    Prefix,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VxlanPeer,
    host_end,
    rank,
    way_of,
)
from weft.domain.errors import Unavailable
from weft.domain.ids import DEFAULT_TENANT, EndpointId, EndpointKey, NetworkName, NodeName
from weft.domain.model import NetworkTags
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, PolicyPart
from weft.kernel.netlink.link import LOOPBACK, Device, alter_link, create_veth, read_link
from weft.kernel.netlink.route import LinkAddress, put_address
from weft.kernel.netlink.route import Prefix as LinkPrefix
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.lab_names import lab_modes
from weft.lab.servers.openvswitch import running_switch
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import Datapath, EndpointConfig, InterfaceAddress

T = TypeVar("T")

_TAGS = {"vxlan": NetworkTags(vlan=1, vni=1), "vlan": NetworkTags(vlan=1)}
# How long the prefixes are of the subnets that pods of a segment take for theirs.
_SUBNETS = {4: 8, 6: 64}
_VXLAN_PORT = 4789
_CABLE, _UPLINK = "eth0", "eth1"
_NETWORK = NetworkName("bare")


class BareNode:
    """A host with a datapath, on a thread that lives there. Its pods are in one network of a lab's modes."""

    def __init__(self, number: int, directory: Path, *, lab: str, closing: ExitStack) -> None:
        self._modes = lab_modes(lab)
        if self._modes["netmode"] not in _TAGS:
            raise Unavailable(f"there is no mode {self._modes['netmode']!r}: say vxlan or vlan")
        self._number = wire_number(_TAGS[self._modes["netmode"]])
        self._segment = self._number if self._modes["fwdmode"] == "bridge" else 0
        self.name = NodeName(f"n{number}")
        self.vtep = parse_address(f"192.0.2.{number}", field="vtep")
        self.namespace = closing.enter_context(NamespaceDirectory(directory / "hosts").create(self.name))
        self._wired: dict[str, EndpointConfig] = {}
        self._tables: PolicyMap | None = None
        self._thread = closing.enter_context(ThreadPoolExecutor(max_workers=1, initializer=self.namespace.enter))
        self._opened: AbstractContextManager[Datapath] = drivers.open_datapath(
            self._settings(self._modes["datapath"], directory, closing)
        )
        self._closing = closing

    def _settings(self, datapath: str, directory: Path, closing: ExitStack) -> drivers.DatapathSettings:
        if datapath == "ovs":
            machine = directory / "hosts" / self.name
            switch = closing.enter_context(running_switch(directory / f"{self.name}-ovs", netns=machine))
            uplinks = (_UPLINK,) if self._modes["netmode"] == "vlan" else ()
            return drivers.OvsDatapathSettings(
                switch=switch.directory,
                directory=directory / self.name,
                vtep=self.vtep,
                vxlan_port=_VXLAN_PORT,
                uplinks=uplinks,
            )
        if datapath != "linux":
            raise Unavailable(f"there is no datapath {datapath!r}: say linux or ovs")
        return drivers.LinuxDatapathSettings(directory=directory / self.name, vtep=self.vtep, vxlan_port=_VXLAN_PORT)

    def open(self, others: Sequence[BareNode]) -> None:
        """Open the datapath, with the way to other hosts; the cable to them must be there."""
        self._datapath = self._on_thread(self._opened.__enter__)
        self._closing.callback(self._on_thread, lambda: self._opened.__exit__(None, None, None))
        ground: list[StateItem] = [
            TenantNetns(DEFAULT_TENANT),
            way_of(DEFAULT_TENANT, tags := _TAGS[self._modes["netmode"]]),
        ]
        if self._segment:
            ground.append(Segment(DEFAULT_TENANT, self._segment, floods=False))
        if tags.vni:
            ground += [VxlanPeer(DEFAULT_TENANT, tags.vni, str(other.vtep)) for other in others]
        self._apply(Difference(tuple(sorted(ground, key=rank)), ()))

    def plug(self, pod: str, address: Address, netns: Path) -> None:
        """Wire a pod. Nothing comes to it before `enforce` has said who it is."""
        key = EndpointKey(DEFAULT_TENANT, _NETWORK, EndpointId(pod))
        self._wired[pod] = wiring = EndpointConfig(
            port=Port(DEFAULT_TENANT, host_end(key), mac_of(address), (address,), self._segment),
            netns=str(netns),
            interface="eth0",
            addresses=(InterfaceAddress(address, (_SUBNETS if self._segment else BITS)[address.family]),),
            mtu=self._datapath.mtu,
        )
        self._on_thread(lambda: self._datapath.plug(wiring))

    def unplug(self, pod: str) -> None:
        wiring = self._wired.pop(pod)
        self._on_thread(lambda: self._datapath.unplug(wiring))

    def learn(self, address: Address, other: BareNode) -> None:
        """A pod is on another host."""
        self._apply(Difference((self._beyond(address, other),), ()))

    def forget(self, address: Address, other: BareNode) -> None:
        self._apply(Difference((), (self._beyond(address, other),)))

    def enforce(self, engine: Engine, touched: Affected | None) -> None:
        """Bring into force what an engine says now. Without `touched` it is another engine than the last time."""
        changes: Difference[PolicyPart]
        if self._tables is None or touched is None:
            former = self._tables.parts if self._tables else frozenset[PolicyPart]()
            self._tables = PolicyMap(engine, tenant=DEFAULT_TENANT, node=self.name)
            self._tables.refresh()
            changes = diff(self._tables.parts, former, rank=rank)
        else:
            self._tables.note(touched)
            changes = self._tables.refresh()
        self._apply(Difference(changes.put, changes.drop))
        self._on_thread(self._datapath.settle)

    def count_refused(self) -> int:
        """How many packets policy has refused here."""
        counters = self._on_thread(self._datapath.counters)
        return sum(count for each in counters for outcome, count in each.outcomes.items() if outcome & VERDICT_DENY)

    def _beyond(self, address: Address, node: BareNode) -> Beyond:
        if self._segment:
            return RemoteMac(DEFAULT_TENANT, self._number, str(node.vtep), mac_of(address), (address,))
        prefix = Prefix(address.family, address.number, BITS[address.family])
        return RemoteRoute(DEFAULT_TENANT, prefix, self._number, str(node.vtep))

    def _apply(self, difference: Difference[StateItem]) -> None:
        self._on_thread(lambda: self._datapath.apply(difference))

    def _on_thread(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result(DEADLINE)


@contextmanager
def open_nodes(directory: Path, *, lab: str, hosts: int) -> Iterator[list[BareNode]]:
    """One host, or two that are joined by two cables. What is pinned is pinned in the directory."""
    with ExitStack() as closing:
        NamespaceDirectory(directory / "hosts").prepare()
        nodes = [BareNode(number, directory, lab=lab, closing=closing) for number in range(1, hosts + 1)]
        if len(nodes) > 1:
            _join(*nodes)
        for node in nodes:
            node.open([other for other in nodes if other is not node])
        yield nodes


def _join(one: BareNode, two: BareNode) -> None:
    """A cable between two hosts, and another between their uplinks."""
    with NetlinkSocket(ROUTE, namespace=one.namespace) as netlink:
        for end in (Device(name=_CABLE), Device(name=_UPLINK)):
            netlink.send_batch([create_veth(end, end, peer_namespace=two.namespace.fd)])
    for node in (one, two):
        _raise(node.namespace, node.vtep)


def _raise(namespace: Namespace, vtep: Address) -> None:
    with NetlinkSocket(ROUTE, namespace=namespace) as netlink:
        link = read_link(netlink, _CABLE)
        assert link is not None
        own = LinkAddress(link=link.index, prefix=LinkPrefix(vtep, 24))
        netlink.send_batch([alter_link(LOOPBACK, up=True), alter_link(link.index, up=True), put_address(own)])
