"""One pod, wired as an agent does it, reaches another: the recipe of the hot path, with packets."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import BITS, Address, mac_of, parse_address
from weft.kernel.netlink.link import LOOPBACK, Device, alter_link, alter_protocols, create_veth
from weft.kernel.netlink.neigh import Neighbour, put_neighbour
from weft.kernel.netlink.route import LinkAddress, Prefix, Route, local_route, put_address, put_route
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import MakeSpace, TenantNetns

HOST_MAC = "ee:ee:ee:ee:ee:ee"
NEXT_HOP = {4: parse_address("169.254.1.1", field="hop"), 6: parse_address("fe80::1", field="hop")}


def wire(tenant: TenantNetns, pod: TenantNetns, *, index: int, address: Address) -> None:
    """Two batches: one in the tenant's namespace, one in the pod's."""
    family, mac = address.family, mac_of(address)
    hop, whole = NEXT_HOP[family], BITS[family]
    tenant.send(
        create_veth(
            Device(name=f"wp{index}", index=index, mac=HOST_MAC, mtu=1450),
            Device(name="eth0", index=index, mac=mac, mtu=1450),
            peer_namespace=pod.namespace.fd,
        ),
        alter_protocols(index, link_local=False),
        alter_link(index, up=True, alias="weft:test"),
        put_route(Route(to=Prefix(address, whole), link=index)),
        put_neighbour(Neighbour(link=index, address=address, mac=mac)),
    )
    own = LinkAddress(link=index, prefix=Prefix(address, whole))
    pod.send(
        alter_link(LOOPBACK, up=True),
        alter_link(index, up=True),
        put_address(own),
        put_route(local_route(own)),
        put_neighbour(Neighbour(link=index, address=hop, mac=HOST_MAC)),
        put_route(Route(to=Prefix(hop, whole), link=index)),
        put_route(Route(to=Prefix(Address(family, 0), 0), via=hop, link=index)),
    )


@pytest.mark.parametrize("family", [4, 6])
def test_two_pods_talk_at_once_and_nobody_asks_for_a_mac(make_space: MakeSpace, family: int) -> None:
    tenant, one, two = make_space("tenant"), make_space("one"), make_space("two")
    tenant.namespace.write_sysctls({"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1"})
    first, second = (
        parse_address(text, field="pod")
        for text in (("10.0.0.1", "10.0.0.2") if family == 4 else ("fd00::1", "fd00::2"))
    )
    wire(tenant, one, index=1001, address=first)
    wire(tenant, two, index=1002, address=second)
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    with (
        two.namespace.open_socket(kind, socket.SOCK_STREAM) as server,
        one.namespace.open_socket(kind, socket.SOCK_STREAM) as client,
    ):
        server.bind((str(second), 0))
        server.listen()
        client.settimeout(DEADLINE)
        client.connect(server.getsockname()[:2])
        accepted, caller = server.accept()
        with accepted:
            assert caller[0] == str(first)
            client.sendall(b"x" * 100_000)
            client.shutdown(socket.SHUT_WR)
            assert len(accepted.makefile("rb").read()) == 100_000
    for space in (tenant, one, two):
        learnt = [entry for entry in space.ask("ip", "-j", "neigh") if entry["state"] != ["PERMANENT"]]
        assert [entry for entry in learnt if not entry["dst"].startswith(("ff", "224."))] == []


def test_pods_of_different_tenants_have_the_same_address_and_never_meet(make_space: MakeSpace) -> None:
    address, peer = parse_address("10.0.0.1", field="pod"), parse_address("10.0.0.2", field="pod")
    blue, red = make_space("blue"), make_space("red")
    for tenant, pods in ((blue, ("b1", "b2")), (red, ("r1",))):
        tenant.namespace.write_sysctls({"net/ipv4/ip_forward": "1"})
        for number, name in enumerate(pods):
            wire(tenant, make_space(name), index=1001 + number, address=(address, peer)[number])
    lonely = make_space("r1")
    with lonely.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(DEADLINE)
        with pytest.raises(OSError, match=r"unreachable|No route"):
            client.connect((str(peer), 80))
