"""What a person on call wants to know of the kernel: whether it can do what we need, and what it has of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weft.adapters.linux.links import Device, Vxlan, create_veth, create_vxlan
from weft.adapters.linux.netlink import ROUTE, NetlinkSocket
from weft.adapters.linux.netns import Namespace
from weft.adapters.linux.nftables import open_nftables
from weft.adapters.linux.ruleset import BASE, LIST_SETS, PORT_PREFIX, TABLE
from weft.adapters.linux.space import SYSCTLS, TenantSpace
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.ports.datapath import SpaceSurvey

_SYSCTL_ROOT = Path("/proc/sys")
_HOOKS = frozenset({"input", "forward", "output"})
_VERDICT_MAP = f"""\
add map inet {TABLE} verdicts {{ type ipv4_addr . inet_service : verdict; }}
add element inet {TABLE} verdicts {{ 192.0.2.1 . 80 : drop }}
"""


def survey_space(tenant: TenantName, space: TenantSpace) -> SpaceSurvey:
    """The devices of a space, and what is not as `prepare` made it."""
    faults = [f"{name} is {found}, not {SYSCTLS[name]}" for name, found in _deviating_sysctls(space).items()]
    faults += [f"device {link.name} is down" for link in space.links() if not link.up]
    try:
        space.nftables.read(LIST_SETS)
    except DatapathFault:
        faults.append(f"the table inet {TABLE} is missing: workloads may speak for others")
    names = sorted(link.name for link in space.links())
    return SpaceSurvey(
        tenant=tenant,
        ports=tuple(name for name in names if name.startswith(PORT_PREFIX)),
        devices=tuple(name for name in names if not name.startswith(PORT_PREFIX)),
        faults=tuple(faults),
    )


def _deviating_sysctls(space: TenantSpace) -> Mapping[str, str]:
    def read() -> dict[str, str]:
        return {name: (_SYSCTL_ROOT / name).read_text().strip() for name in SYSCTLS}

    return {name: found for name, found in space.namespace.run(read).items() if found != SYSCTLS[name]}


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
        lacking += _probe_nftables(namespace)
    return lacking


def _probe_nftables(namespace: Namespace) -> list[str]:
    try:
        with open_nftables(namespace) as nftables:
            nftables.run(BASE + _VERDICT_MAP)
    except DatapathFault as error:
        return [f"nftables does not do what we need: {error.message}"]
    return []


def foreign_drops() -> list[str]:
    """The chains of others in the calling thread's namespace that drop what no rule of theirs accepts."""
    with Namespace.current() as here, open_nftables(here) as nftables:
        chains = [item["chain"] for item in nftables.read("list chains") if "chain" in item]
    return [
        f"chain {chain['name']} of table {chain['family']} {chain['table']} drops what it does not know"
        for chain in chains
        if chain.get("policy") == "drop" and chain.get("hook") in _HOOKS
    ]
