"""Hosts with a datapath and no agent: the caller plugs pods, and the policy map comes straight from an engine.

The caller must be in private network and mount namespaces (`weft.lab.namespaces`).
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
from weft.domain.desired.segments import RemoteMac, Segment, encap_id
from weft.domain.desired.state import (
    Port,
    Prefix,
    RemoteItem,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VxlanPeer,
    encap_item,
    host_ifname,
    rank,
)
from weft.domain.errors import Unavailable
from weft.domain.ids import DEFAULT_TENANT, EndpointId, EndpointKey, NetworkName, NodeName
from weft.domain.model import NetworkTags
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, PolicyItem
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, change_link, create_veth, read_link
from weft.kernel.netlink.route import LinkAddress, put_address
from weft.kernel.netlink.route import Prefix as LinkPrefix
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.lab.netlab import lab_modes
from weft.lab.servers.openvswitch import running_switch
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import Datapath, EndpointConfig, InterfaceAddress

T = TypeVar("T")

# The pods' network on the wire; VLAN mode has no VNI.
_TAGS = {"vxlan": NetworkTags(vlan=1, vni=1), "vlan": NetworkTags(vlan=1)}
# In bridge mode pods believe in a subnet of this prefix length, so that they send ARP and ND for each other.
_SUBNETS = {4: 8, 6: 64}
_VXLAN_PORT = 4789
_UNDERLAY, _UPLINK = "eth0", "eth1"
_NETWORK = NetworkName("bare")


class BareNode:
    """A host with a datapath. All its pods are in one network."""

    def __init__(self, number: int, directory: Path, *, lab: str, closing: ExitStack) -> None:
        self._modes = lab_modes(lab)
        if self._modes["netmode"] not in _TAGS:
            raise Unavailable(f"unknown network mode {self._modes['netmode']!r}: use vxlan or vlan")
        self._number = encap_id(_TAGS[self._modes["netmode"]])
        self._segment = self._number if self._modes["fwdmode"] == "bridge" else 0
        self.name = NodeName(f"n{number}")
        self.vtep = parse_address(f"192.0.2.{number}", field="vtep")
        self.namespace = closing.enter_context(NamespaceDirectory(directory / "hosts").create(self.name))
        self._plugged: dict[str, EndpointConfig] = {}
        self._policy_map: PolicyMap | None = None
        # The datapath lives on one thread: setns(2) moves a thread, not the process.
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
            raise Unavailable(f"unknown datapath {datapath!r}: use linux or ovs")
        return drivers.LinuxDatapathSettings(directory=directory / self.name, vtep=self.vtep, vxlan_port=_VXLAN_PORT)

    def open(self, others: Sequence[BareNode]) -> None:
        """Open the datapath and create tunnels to other hosts; the underlay must be up."""
        self._datapath = self._on_thread(self._opened.__enter__)
        # On the same thread, as every call to a datapath.
        self._closing.callback(self._on_thread, lambda: self._opened.__exit__(None, None, None))
        items: list[StateItem] = [
            TenantNetns(DEFAULT_TENANT),
            encap_item(DEFAULT_TENANT, tags := _TAGS[self._modes["netmode"]]),
        ]
        if self._segment:
            items.append(Segment(DEFAULT_TENANT, self._segment, floods=False))
        if tags.vni:
            items += [VxlanPeer(DEFAULT_TENANT, tags.vni, str(other.vtep)) for other in others]
        self._apply(Difference(tuple(sorted(items, key=rank)), ()))

    def plug(self, pod: str, address: Address, netns: Path) -> None:
        """Plug a pod. Its traffic is dropped until `enforce` installs its identity."""
        key = EndpointKey(DEFAULT_TENANT, _NETWORK, EndpointId(pod))
        self._plugged[pod] = config = EndpointConfig(
            port=Port(DEFAULT_TENANT, host_ifname(key), mac_of(address), (address,), self._segment),
            netns=str(netns),
            interface="eth0",
            addresses=(InterfaceAddress(address, (_SUBNETS if self._segment else BITS)[address.family]),),
            mtu=self._datapath.mtu,
        )
        self._on_thread(lambda: self._datapath.plug(config))

    def unplug(self, pod: str) -> None:
        config = self._plugged.pop(pod)
        self._on_thread(lambda: self._datapath.unplug(config))

    def add_remote(self, address: Address, other: BareNode) -> None:
        """Add the route, or the FDB entry, of a pod on another host."""
        self._apply(Difference((self._remote(address, other),), ()))

    def remove_remote(self, address: Address, other: BareNode) -> None:
        self._apply(Difference((), (self._remote(address, other),)))

    def enforce(self, engine: Engine, affected: Affected | None) -> None:
        """Apply the engine's policy. Without `affected` it is a new engine, and the policy map is rebuilt."""
        changes: Difference[PolicyItem]
        # A diff of both policy maps, not an empty datapath: pods stay plugged from case to case.
        if self._policy_map is None or affected is None:
            former = self._policy_map.state_items if self._policy_map else frozenset[PolicyItem]()
            self._policy_map = PolicyMap(engine, tenant=DEFAULT_TENANT, node=self.name)
            self._policy_map.refresh()
            changes = diff(self._policy_map.state_items, former, rank=rank)
        else:
            self._policy_map.note(affected)
            changes = self._policy_map.refresh()
        self._apply(Difference(changes.put, changes.drop))
        # Cached verdicts of a switch may outlive a change of its flows for a moment.
        self._on_thread(self._datapath.flush_datapath_cache)

    def count_denied(self) -> int:
        """The number of packets that policy has denied on this host."""
        counters = self._on_thread(self._datapath.counters)
        verdicts = (verdict for tenant in counters for verdict in tenant.verdicts.items())
        return sum(count for verdict_id, count in verdicts if verdict_id & VERDICT_DENY)

    def _remote(self, address: Address, node: BareNode) -> RemoteItem:
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
    """Open one host, or two joined by an underlay and an uplink veth. Namespaces are pinned in the directory."""
    with ExitStack() as closing:
        # Both hosts exist before either opens its datapath, which needs the underlay for its VTEP.
        NamespaceDirectory(directory / "hosts").prepare()
        nodes = [BareNode(number, directory, lab=lab, closing=closing) for number in range(1, hosts + 1)]
        if len(nodes) > 1:
            _connect(*nodes)
        for node in nodes:
            node.open([other for other in nodes if other is not node])
        yield nodes


def _connect(one: BareNode, two: BareNode) -> None:
    """Connect two hosts by a veth for the underlay and another for VLAN uplinks."""
    # The kernel creates the peer directly in the other namespace.
    with NetlinkSocket(NETLINK_ROUTE, namespace=one.namespace) as netlink:
        for end in (Device(name=_UNDERLAY), Device(name=_UPLINK)):
            netlink.send_batch([create_veth(end, end, peer_namespace=two.namespace.fd)])
    for node in (one, two):
        _configure_underlay(node.namespace, node.vtep)


def _configure_underlay(namespace: Namespace, vtep: Address) -> None:
    with NetlinkSocket(NETLINK_ROUTE, namespace=namespace) as netlink:
        link = read_link(netlink, _UNDERLAY)
        assert link is not None
        own = LinkAddress(link=link.index, prefix=LinkPrefix(vtep, 24))
        netlink.send_batch([change_link(LOOPBACK_IFINDEX, up=True), change_link(link.index, up=True), put_address(own)])
