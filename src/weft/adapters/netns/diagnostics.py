"""Diagnostics of the kernel datapath: feature probes, foreign firewalls, state of tenant netns, drops and counters."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft.adapters.netns.devices import PORT_PREFIX, TENANT_HOST_LINK
from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.netns.host.nat_tenant import NETDEV_BASE
from weft.adapters.netns.host.ruleset import COMMENT
from weft.adapters.netns.nft.base import BASE
from weft.adapters.netns.nft.bridge_filter import BRIDGE_BASE, BRIDGE_SYSCTLS
from weft.adapters.netns.nft.entries import TABLE
from weft.adapters.netns.nft.policy_maps import read_counters
from weft.adapters.netns.tenant_netns import SYSCTLS, TenantNetnsDriver
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import (
    LOOPBACK_IFINDEX,
    Device,
    Vxlan,
    create_bridge,
    create_ifb,
    create_macvlan,
    create_veth,
    create_vxlan,
)
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netlink.tc import IngressRedirect, Limit, put_limit, put_redirect
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.ports.datapath import CheckResult, Drop, TenantNetnsReport, VerdictCounters

_SYSCTL_ROOT = Path("/proc/sys")
# Interface indexes that are free in a new namespace.
_IFB_INDEX = 100
_VETH_INDEX = 100
_HOOKS = frozenset({"input", "forward", "output"})
# A verdict map with a concatenated key: the base table has none, so the probe adds one.
_VERDICT_MAP = f"""\
add map inet {TABLE} verdicts {{ type ipv4_addr . inet_service : verdict; }}
add element inet {TABLE} verdicts {{ 192.0.2.1 . 80 : drop }}
"""


class KernelTools:
    """`weft.ports.datapath.DatapathTools` for a datapath without a switch: host ends are in the tenant netns.

    The ovs datapath overrides what differs there.
    """

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return probe_kernel()

    @staticmethod
    def find_conflicts() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return foreign_drops()

    @staticmethod
    def check_switch(switch: Path) -> Iterator[CheckResult]:  # noqa: ARG004  there is none
        """See `weft.ports.datapath.DatapathTools`."""
        yield from ()

    @staticmethod
    def enter_tenant_netns(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with NamespaceDirectory(directory).open(tenant) as namespace:
            namespace.enter()

    @staticmethod
    def enter_host_side_netns(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        KernelTools.enter_tenant_netns(directory, tenant)

    @staticmethod
    def enter_pod_netns(netns: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        with Namespace.open(netns) as namespace:
            namespace.enter()

    @staticmethod
    def remove_netns_dir(directory: Path) -> None:
        """See `weft.ports.datapath.DatapathTools`."""
        NamespaceDirectory(directory).remove()


def survey_tenant_netns(tenant: TenantName, netns: TenantNetnsDriver) -> TenantNetnsReport:
    """Read the devices of a tenant netns, and what differs from the state that `prepare` makes."""
    wanted = SYSCTLS | BRIDGE_SYSCTLS if netns.table.has_bridge_filter else SYSCTLS
    faults = [f"{name} is {found}, not {wanted[name]}" for name, found in _deviating_sysctls(netns, wanted).items()]
    faults += [f"device {link.name} is down" for link in netns.links() if not link.up]
    if not netns.table.exists():
        faults.append(f"the table inet {TABLE} is missing: no anti-spoofing, no policy")
    names = sorted(link.name for link in netns.links())
    return TenantNetnsReport(
        tenant=tenant,
        ports=tuple(name for name in names if name.startswith(PORT_PREFIX)),
        devices=tuple(name for name in names if not name.startswith(PORT_PREFIX)),
        faults=tuple(faults),
    )


def _deviating_sysctls(netns: TenantNetnsDriver, wanted: Mapping[str, str]) -> Mapping[str, str]:
    # The net sysctls under /proc are those of the reading thread's netns.
    def read() -> dict[str, str]:
        return {name: (_SYSCTL_ROOT / name).read_text().strip() for name in wanted}

    return {name: found for name, found in netns.namespace.run(read).items() if found != wanted[name]}


def read_drops(tenant: TenantName, netns: TenantNetnsDriver) -> list[Drop]:
    """Read the dropped packets of one tenant; see `weft.ports.datapath.Datapath.drops`."""
    names = {index: name for name, index in netns.indexes.items()}
    return [
        Drop(
            tenant=tenant,
            # The packet mark is a verdict id or a drop reason (`drop_reasons`).
            verdict_id=0 if logged.mark in DROP_REASONS else logged.mark,
            reason=DROP_REASONS.get(logged.mark, ""),
            source=logged.packet.source,
            target=logged.packet.target,
            protocol=logged.packet.protocol,
            source_port=logged.packet.source_port,
            target_port=logged.packet.target_port,
            in_iface=names.get(logged.in_iface, ""),
            out_iface=names.get(logged.out_iface, ""),
            at=logged.at,
        )
        for logged in netns.read_drop_log()
    ]


def read_verdict_counters(tenant: TenantName, netns: TenantNetnsDriver) -> VerdictCounters:
    """Read the counters of one tenant; see `weft.ports.datapath.Datapath.counters`."""
    verdicts, reasons = read_counters(netns.netfilter)
    return VerdictCounters(tenant=tenant, verdicts=verdicts, reasons=reasons)


def probe_kernel() -> list[str]:
    """Try every kernel feature that we need in a temporary netns; describe those that are missing."""
    missing: list[str] = []
    with Namespace.new() as namespace, NetlinkSocket(NETLINK_ROUTE, namespace=namespace) as netlink:
        tunnel = Vxlan(vni=1, port=4789, local=Address(4, 0x7F000001))
        for feature, request in (
            ("veth devices", create_veth(Device(name="wp0"), Device(name="wp1"), peer_namespace=namespace.fd)),
            ("vxlan devices", create_vxlan(Device(name="wx1"), tunnel, namespace=namespace.fd)),
        ):
            try:
                netlink.send_batch([request])
            except DatapathFault as error:
                missing.append(f"the kernel cannot create {feature}: {error.message}")
        missing += _probe_qos(netlink)
        # Without protocol names every ruleset fails: one message is enough.
        missing += _probe_protocols() or [
            *_probe_nftables(namespace),
            *_probe_netdev_egress(namespace, netlink),
            *_probe_br_netfilter(namespace, netlink),
        ]
    return missing


def probe_macvlan() -> list[str]:
    """Try macvlan devices, which workloads get where a switch has the device below."""
    with Namespace.new() as namespace, NetlinkSocket(NETLINK_ROUTE, namespace=namespace) as netlink:
        try:
            lower = Device(name="wp0", index=_VETH_INDEX), Device(name="wp1", index=_VETH_INDEX + 1)
            netlink.send_batch([create_veth(*lower, peer_namespace=namespace.fd)])
            netlink.send_batch([create_macvlan(Device(name="eth0"), over=_VETH_INDEX, namespace=namespace.fd)])
        except DatapathFault as error:
            return [f"the kernel cannot create macvlan devices: {error.message}"]
    return []


def _probe_protocols() -> list[str]:
    try:
        socket.getprotobyname("ipv6-icmp")
    except OSError:
        return ["nftables does not know protocols by their names: /etc/protocols is missing, install netbase"]
    return []


def _probe_qos(netlink: NetlinkSocket) -> list[str]:
    try:
        netlink.send_batch(
            [
                create_ifb(Device(name="wi0", index=_IFB_INDEX)),
                put_limit(Limit(link=_IFB_INDEX, rate=1 << 20, burst=1 << 16)),
                *put_redirect(IngressRedirect(link=LOOPBACK_IFINDEX, into=_IFB_INDEX)),
            ]
        )
    except DatapathFault as error:
        return [f"the kernel cannot limit bandwidth, so QoS profiles with a rate will fail: {error.message}"]
    return []


def _probe_nftables(namespace: Namespace) -> list[str]:
    try:
        with open_nftables(namespace) as nftables:
            nftables.run(BASE + _VERDICT_MAP)
    except DatapathFault as error:
        return [f"nftables lacks a feature that we need: {error.message}"]
    return []


def _probe_netdev_egress(namespace: Namespace, netlink: NetlinkSocket) -> list[str]:
    try:
        link, other_end = Device(name=TENANT_HOST_LINK), Device(name="wh1")
        netlink.send_batch([create_veth(link, other_end, peer_namespace=namespace.fd)])
        with open_nftables(namespace) as nftables:
            nftables.run(NETDEV_BASE)
    except DatapathFault as error:
        return [f"the kernel has no nft egress hook with fwd, so replies to remote hosts will fail: {error.message}"]
    return []


def _probe_br_netfilter(namespace: Namespace, netlink: NetlinkSocket) -> list[str]:
    try:
        # The sysctls only exist once br_netfilter is loaded.
        netlink.send_batch([create_bridge(Device(name="wb0"))])
        namespace.write_sysctls(BRIDGE_SYSCTLS)
        with open_nftables(namespace) as nftables:
            nftables.run(BRIDGE_BASE)
    except DatapathFault as error:
        return [f"the kernel cannot filter bridged packets, so bridge mode cannot be used: {error.message}"]
    return []


def foreign_drops() -> list[str]:
    """Describe the chains of others in the calling thread's netns that drop by default."""
    with Namespace.current() as here, open_nftables(here) as nftables:
        listed = nftables.read("list ruleset", elements=False)
    chains = [item["chain"] for item in listed if "chain" in item]
    passed = {_chain_of(item["rule"]) for item in listed if item.get("rule", {}).get("comment") == COMMENT}
    return [
        f"chain {chain['name']} of table {chain['family']} {chain['table']} drops by default"
        + ("; a rule of ours accepts workloads" if (chain["family"], chain["table"], chain["name"]) in passed else "")
        for chain in chains
        if chain.get("policy") == "drop" and chain.get("hook") in _HOOKS
    ]


def _chain_of(rule: Mapping[str, str]) -> tuple[str, str, str]:
    return rule["family"], rule["table"], rule["chain"]
