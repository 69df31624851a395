"""What a person on call wants to know of the kernel: whether it can do what we need, and what it has of ours."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from weft.adapters.netns.host.nat_tenant import HOME_BASE
from weft.adapters.netns.host.ruleset import COMMENT
from weft.adapters.netns.nft.base import BASE, TABLE
from weft.adapters.netns.nft.bridge_filter import BRIDGE_BASE, BRIDGE_SYSCTLS
from weft.adapters.netns.nft.policy_chains import INSIDE, PORT_PREFIX
from weft.adapters.netns.tenant_netns import SYSCTLS, TenantNetnsDriver
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import (
    LOOPBACK,
    Device,
    Vxlan,
    create_bridge,
    create_ifb,
    create_macvlan,
    create_veth,
    create_vxlan,
)
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netlink.tc import IngressRedirect, Limit, put_diversion, put_limit
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.ports.datapath import SpaceSurvey

_SYSCTL_ROOT = Path("/proc/sys")
_METER = 100
# An index that no device has in a namespace that is new.
_LOWEST = 100
_HOOKS = frozenset({"input", "forward", "output"})
_VERDICT_MAP = f"""\
add map inet {TABLE} verdicts {{ type ipv4_addr . inet_service : verdict; }}
add element inet {TABLE} verdicts {{ 192.0.2.1 . 80 : drop }}
"""


def survey_space(tenant: TenantName, space: TenantNetnsDriver) -> SpaceSurvey:
    """The devices of a space, and what is not as `prepare` made it."""
    wanted = SYSCTLS | BRIDGE_SYSCTLS if space.table.is_bridged else SYSCTLS
    faults = [f"{name} is {found}, not {wanted[name]}" for name, found in _deviating_sysctls(space, wanted).items()]
    faults += [f"device {link.name} is down" for link in space.links() if not link.up]
    if not space.table.exists():
        faults.append(f"the table inet {TABLE} is missing: workloads may speak for others")
    names = sorted(link.name for link in space.links())
    return SpaceSurvey(
        tenant=tenant,
        ports=tuple(name for name in names if name.startswith(PORT_PREFIX)),
        devices=tuple(name for name in names if not name.startswith(PORT_PREFIX)),
        faults=tuple(faults),
    )


def _deviating_sysctls(space: TenantNetnsDriver, wanted: Mapping[str, str]) -> Mapping[str, str]:
    def read() -> dict[str, str]:
        return {name: (_SYSCTL_ROOT / name).read_text().strip() for name in wanted}

    return {name: found for name, found in space.namespace.run(read).items() if found != wanted[name]}


def probe_kernel() -> list[str]:
    """What the kernel and its libraries do not let us make, tried out in a namespace that is gone afterwards."""
    lacking: list[str] = []
    with Namespace.new() as namespace, NetlinkSocket(ROUTE, namespace=namespace) as netlink:
        tunnel = Vxlan(vni=1, port=4789, local=Address(4, 0x7F000001))
        for what, request in (
            ("veth devices", create_veth(Device(name="wp0"), Device(name="wp1"), peer_namespace=namespace.fd)),
            ("vxlan devices", create_vxlan(Device(name="wx1"), tunnel, namespace=namespace.fd)),
        ):
            try:
                netlink.send_batch([request])
            except DatapathFault as error:
                lacking.append(f"the kernel makes no {what}: {error.message}")
        lacking += _probe_shaping(netlink)
        lacking += _probe_protocols() or [
            *_probe_nftables(namespace),
            *_probe_leading_home(namespace, netlink),
            *_probe_bridging(namespace, netlink),
        ]
    return lacking


def probe_macvlan() -> list[str]:
    """The same for devices that stand on others, as workloads' do where a switch has the others."""
    with Namespace.new() as namespace, NetlinkSocket(ROUTE, namespace=namespace) as netlink:
        try:
            below = Device(name="wp0", index=_LOWEST), Device(name="wp1", index=_LOWEST + 1)
            netlink.send_batch([create_veth(*below, peer_namespace=namespace.fd)])
            netlink.send_batch([create_macvlan(Device(name="eth0"), over=_LOWEST, namespace=namespace.fd)])
        except DatapathFault as error:
            return [f"the kernel makes no macvlan devices: {error.message}"]
    return []


def _probe_protocols() -> list[str]:
    try:
        socket.getprotobyname("ipv6-icmp")
    except OSError:
        return ["nftables does not know protocols by their names: /etc/protocols is missing, install netbase"]
    return []


def _probe_shaping(netlink: NetlinkSocket) -> list[str]:
    try:
        netlink.send_batch(
            [
                create_ifb(Device(name="wi0", index=_METER)),
                put_limit(Limit(link=_METER, rate=1 << 20, burst=1 << 16)),
                *put_diversion(IngressRedirect(link=LOOPBACK, into=_METER)),
            ]
        )
    except DatapathFault as error:
        return [f"the kernel limits no bandwidth, so profiles that ask for it cannot be carried out: {error.message}"]
    return []


def _probe_nftables(namespace: Namespace) -> list[str]:
    try:
        with open_nftables(namespace) as nftables:
            nftables.run(BASE + _VERDICT_MAP)
    except DatapathFault as error:
        return [f"nftables does not do what we need: {error.message}"]
    return []


def _probe_leading_home(namespace: Namespace, netlink: NetlinkSocket) -> list[str]:
    try:
        link, other_end = Device(name=INSIDE), Device(name="wh1")
        netlink.send_batch([create_veth(link, other_end, peer_namespace=namespace.fd)])
        with open_nftables(namespace) as nftables:
            nftables.run(HOME_BASE)
    except DatapathFault as error:
        return [f"the kernel does not forward from the end of a link, so hosts are not answered: {error.message}"]
    return []


def _probe_bridging(namespace: Namespace, netlink: NetlinkSocket) -> list[str]:
    try:
        netlink.send_batch([create_bridge(Device(name="wb0"))])
        namespace.write_sysctls(BRIDGE_SYSCTLS)
        with open_nftables(namespace) as nftables:
            nftables.run(BRIDGE_BASE)
    except DatapathFault as error:
        return [f"the kernel does not judge what passes a bridge, so bridge mode cannot be used: {error.message}"]
    return []


def foreign_drops() -> list[str]:
    """The chains of others in the calling thread's namespace that drop what no rule of theirs accepts."""
    with Namespace.current() as here, open_nftables(here) as nftables:
        listed = nftables.read("list ruleset", elements=False)
    chains = [item["chain"] for item in listed if "chain" in item]
    passed = {_chain_of(item["rule"]) for item in listed if item.get("rule", {}).get("comment") == COMMENT}
    return [
        f"chain {chain['name']} of table {chain['family']} {chain['table']} drops what it does not know"
        + ("; workloads pass by a rule of ours" if (chain["family"], chain["table"], chain["name"]) in passed else "")
        for chain in chains
        if chain.get("policy") == "drop" and chain.get("hook") in _HOOKS
    ]


def _chain_of(rule: Mapping[str, str]) -> tuple[str, str, str]:
    return rule["family"], rule["table"], rule["chain"]
