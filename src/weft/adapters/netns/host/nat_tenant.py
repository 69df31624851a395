"""Host access inside a tenant netns: NAT chains and their entries, routes and neighbours (docs/design/host.md).

A host's address has two roles in a tenant netns: local workloads connect to it, and it connects to workloads of other
nodes. The default route leads to it. Replies to the host of another node must take the path of the request, mostly
through the overlay: they are marked after policy evaluation and redirected at the egress of the link to the host
(`NETDEV_BASE`), so that no other packet pays for the check. Connections that entered through the link, to a port of
the local host, have a conntrack label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.netns.devices import HOST_HOPS, HOST_MAC, OVERLAY_PREFIX, TENANT_HOST_LINK
from weft.adapters.netns.nft.commands import ADDRESS_TYPES, IP, replace_table, table_commands
from weft.adapters.netns.nft.entries import NETDEV_TABLE, Entry
from weft.domain.addresses import Address
from weft.domain.host_access.state import (
    HostLink,
    NodePortVip,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.neigh import Neighbour
from weft.kernel.netlink.nft_set import Element, interface, mark
from weft.kernel.netlink.route import Prefix, Route
from weft.kernel.uapi.rtnetlink import RTN_UNREACHABLE

CHAINS: Final = {
    "remote_host_return": "mark replies to the host of another node",
    "host_dnat": "label connections that enter through the host link; translate aliases of overlapping tenants",
    "snat_egress": "SNAT of connections that leave the tenant netns or enter through the host link",
}
SETS: Final = {
    "remote_host_ips{4,6}": "addresses of the hosts of other nodes",
    "node_ips{4,6}": "addresses that the local host uses towards the tenant",
    "node_snat{4,6}": "source address of connections that enter through the host link and go on to another node",
    "host_hairpin_snat{4,6}": "source address of connections that enter through the host link and go back to the host",
    "snat_pool{4,6}": "source address of a tenant whose subnets overlap those of another",
    "dnat_alias{4,6}": "address of the workload behind an alias, for such a tenant",
}
NETDEV_CHAINS: Final = {
    "host_link_egress": "redirect marked replies to the device that leads to the remote host",
}
NETDEV_SETS: Final = {
    "return_ifindex{4,6}": "device that leads to the host of another node",
}
# The sets and maps of the inet table that hold host-access state, and so are read back.
HOST_ACCESS_SETS: Final = tuple(
    f"{name}{family}"
    for name in ("remote_host_ips", "node_ips", "node_snat", "host_hairpin_snat", "snat_pool", "dnat_alias")
    for family in (4, 6)
)

# Packet mark of replies that go back through the overlay, from policy evaluation until they are sent.
_RETURN_MARK = 0x08000000
# Conntrack label (a bit number) of connections that entered through the host link.
_VIA_HOST_LINK = 1


def declarations() -> Iterator[str]:
    """Declare the sets and maps of host access in the inet table."""
    for family, address_type in ADDRESS_TYPES.items():
        yield f"set remote_host_ips{family} {{ type {address_type}; }}"
        yield f"set node_ips{family} {{ type {address_type}; }}"
        # At most one element each. `snat` takes a changeable address from a map only, so the interface is the key.
        for name in ("node_snat", "host_hairpin_snat", "snat_pool"):
            yield f"map {name}{family} {{ type ifname : {address_type}; }}"
        yield f"map dnat_alias{family} {{ type {address_type} : {address_type}; }}"


def chains() -> dict[str, list[str]]:
    """Return the rules of the inet table by chain."""
    return {
        "remote_host_return": [
            f"ct direction reply ct original {ip} saddr @remote_host_ips{family} ct label != {_VIA_HOST_LINK} "
            f"meta mark set {_RETURN_MARK:#x}"
            for family, ip in IP.items()
        ],
        # Before `service_dnat` (-100): a connection can only be translated once.
        "host_dnat": [
            "type nat hook prerouting priority -105; policy accept;",
            f'iifname "{TENANT_HOST_LINK}" ct label set {_VIA_HOST_LINK}',
            *(
                f'iifname "{TENANT_HOST_LINK}" dnat {ip} to {ip} daddr map @dnat_alias{family}'
                for family, ip in IP.items()
            ),
        ],
        # After `hairpin_snat` (100).
        "snat_egress": [
            "type nat hook postrouting priority 105; policy accept;",
            *(rule for family, ip in IP.items() for rule in _host_snat(family, ip)),
            *(f"meta nfproto ipv{family} snat {ip} to oifname map @snat_pool{family}" for family, ip in IP.items()),
        ],
    }


def _host_snat(family: int, ip: str) -> Iterator[str]:
    """SNAT of connections that enter through the host link, where replies would take another path.

    Another node knows the host of this node, not the client. And the host would reply to a client beyond it directly,
    past the connection in the tenant netns.
    """
    for interfaces, name in ((f"{OVERLAY_PREFIX}*", "node_snat"), (TENANT_HOST_LINK, "host_hairpin_snat")):
        yield (
            f'meta nfproto ipv{family} iifname "{TENANT_HOST_LINK}" oifname "{interfaces}" '
            f"snat {ip} to iifname map @{name}{family}"
        )


# The commands that create or update the netdev table. The link to the host must exist.
NETDEV_BASE: Final = table_commands(
    f"netdev {NETDEV_TABLE}",
    declarations=(
        f"map return_ifindex{family} {{ type {address_type} : iface_index; }}"
        for family, address_type in ADDRESS_TYPES.items()
    ),
    chains={
        "host_link_egress": [
            f'type filter hook egress device "{TENANT_HOST_LINK}" priority 0; policy accept;',
            f"meta mark != {_RETURN_MARK:#x} accept",
            # VXLAN routes its outer packet by the mark.
            "meta mark set 0",
            *(f"fwd {ip} to {ip} daddr device {ip} daddr map @return_ifindex{family}" for family, ip in IP.items()),
            "drop",
        ]
    },
)
NETDEV_REBUILD: Final = replace_table(f"netdev {NETDEV_TABLE}", NETDEV_BASE)


def link_neighbours(link: int) -> Iterator[Neighbour]:
    """Yield the neighbour entries of the host at the other end of the link."""
    for hop in HOST_HOPS.values():
        yield Neighbour(link=link, address=hop, mac=HOST_MAC)


def link_routes(link: int) -> Iterator[Route]:
    """Yield the default routes of the tenant netns."""
    for family, hop in HOST_HOPS.items():
        yield Route(to=Prefix(Address(family, 0), 0), link=link, via=hop, on_link=True)


def link_entries(item: HostLink) -> Iterator[Entry]:
    """Yield the addresses of the host, and the SNAT of connections that enter through it and go on to another node."""
    for address in item.addresses:
        yield Entry(f"node_ips{address.family}", Element(key=pack_address(address)))
        yield _snat_entry("node_snat", address)


def subnet_route(item: TenantSubnet) -> Route:
    """Return the unreachable route of a subnet: used addresses have longer prefixes, all others are rejected."""
    return Route(to=Prefix(Address(item.subnet.family, item.subnet.base), item.subnet.length), kind=RTN_UNREACHABLE)


def return_entries(item: RemoteHostReturnRoute, *, link: int) -> Iterator[Entry]:
    """Yield the entries that send replies to a remote host through a device."""
    address = pack_address(item.address)
    yield Entry(f"remote_host_ips{item.address.family}", Element(key=address))
    yield Entry(f"return_ifindex{item.address.family}", Element(key=address, value=mark(link)))


def snat_entries(item: TenantSnat) -> Iterator[Entry]:
    """Yield the SNAT of a tenant with overlapping subnets."""
    yield _snat_entry("snat_pool", item.address)


def dnat_entries(item: OverlapDnat) -> Iterator[Entry]:
    """Yield the alias of a workload of such a tenant."""
    value = pack_address(item.workload)
    yield Entry(f"dnat_alias{item.address.family}", Element(key=pack_address(item.address), value=value))


def node_port_vip_entries(item: NodePortVip) -> Iterator[Entry]:
    """Yield the SNAT of node-port connections that go back to the host."""
    yield from (_snat_entry("host_hairpin_snat", address) for address in item.addresses)


def _snat_entry(name: str, address: Address) -> Entry:
    return Entry(f"{name}{address.family}", Element(key=interface(TENANT_HOST_LINK), value=pack_address(address)))
