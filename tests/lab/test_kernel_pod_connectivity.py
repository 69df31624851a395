"""Two pods, configured with the netlink batches of an ADD, connect to each other."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import BITS, Address, mac_of, parse_address
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, change_address_settings, change_link, create_veth
from weft.kernel.netlink.neigh import Neighbour, put_neighbour
from weft.kernel.netlink.route import LinkAddress, Prefix, Route, local_route, put_address, put_route
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import MakeNetns, TenantNetns

HOST_MAC = "ee:ee:ee:ee:ee:ee"
NEXT_HOP = {4: parse_address("169.254.1.1", field="hop"), 6: parse_address("fe80::1", field="hop")}


def configure(tenant: TenantNetns, pod: TenantNetns, *, index: int, address: Address) -> None:
    """Two batches: one in the tenant netns, one in the pod netns."""
    family, mac = address.family, mac_of(address)
    hop, host_length = NEXT_HOP[family], BITS[family]
    tenant.send(
        create_veth(
            Device(name=f"wp{index}", index=index, mac=HOST_MAC, mtu=1450),
            Device(name="eth0", index=index, mac=mac, mtu=1450),
            peer_namespace=pod.namespace.fd,
        ),
        change_address_settings(index, link_local=False),
        change_link(index, up=True, alias="weft:test"),
        put_route(Route(to=Prefix(address, host_length), link=index)),
        put_neighbour(Neighbour(link=index, address=address, mac=mac)),
    )
    own = LinkAddress(link=index, prefix=Prefix(address, host_length))
    pod.send(
        change_link(LOOPBACK_IFINDEX, up=True),
        change_link(index, up=True),
        put_address(own),
        put_route(local_route(own)),
        put_neighbour(Neighbour(link=index, address=hop, mac=HOST_MAC)),
        put_route(Route(to=Prefix(hop, host_length), link=index)),
        put_route(Route(to=Prefix(Address(family, 0), 0), via=hop, link=index)),
    )


@pytest.mark.parametrize("family", [4, 6])
def test_two_pods_connect_at_once_without_arp_or_nd(make_netns: MakeNetns, family: int) -> None:
    tenant, one, two = make_netns("tenant"), make_netns("one"), make_netns("two")
    tenant.namespace.write_sysctls({"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"})
    first, second = (
        parse_address(text, field="pod")
        for text in (("10.0.0.1", "10.0.0.2") if family == 4 else ("fd00::1", "fd00::2"))
    )
    configure(tenant, one, index=1001, address=first)
    configure(tenant, two, index=1002, address=second)
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    with (
        two.namespace.open_socket(kind, socket.SOCK_STREAM) as server,
        one.namespace.open_socket(kind, socket.SOCK_STREAM) as client,
    ):
        server.bind((str(second), 0))
        server.listen()
        client.settimeout(DEADLINE)
        client.connect(server.getsockname()[:2])
        accepted, client_address = server.accept()
        with accepted:
            assert client_address[0] == str(first)
            client.sendall(b"x" * 100_000)
            client.shutdown(socket.SHUT_WR)
            assert len(accepted.makefile("rb").read()) == 100_000
    for netns in (tenant, one, two):
        learned = [entry for entry in netns.ask("ip", "-j", "neigh") if entry["state"] != ["PERMANENT"]]
        assert [entry for entry in learned if not entry["dst"].startswith(("ff", "224."))] == []


def test_pods_of_two_tenants_with_the_same_address_are_isolated(make_netns: MakeNetns) -> None:
    address, peer = parse_address("10.0.0.1", field="pod"), parse_address("10.0.0.2", field="pod")
    blue, red = make_netns("blue"), make_netns("red")
    for tenant, pods in ((blue, ("b1", "b2")), (red, ("r1",))):
        tenant.namespace.write_sysctls({"net/ipv4/ip_forward": "1"})
        for number, name in enumerate(pods):
            configure(tenant, make_netns(name), index=1001 + number, address=(address, peer)[number])
    unpeered = make_netns("r1")
    with unpeered.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(DEADLINE)
        with pytest.raises(OSError, match=r"unreachable|No route"):
            client.connect((str(peer), 80))
