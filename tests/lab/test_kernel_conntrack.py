"""Conntrack entries, checked against `/proc/net/nf_conntrack`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import BITS, Address, parse_address
from weft.kernel.netlink import conntrack
from weft.kernel.netlink.conntrack import Direction, Pattern, flush_addresses, flush_matching, read_connections
from weft.kernel.netlink.link import LOOPBACK_IFINDEX
from weft.kernel.netlink.route import LinkAddress, Prefix, Route, local_route, put_address, put_route
from weft.kernel.nftables import open_nftables

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

RULES = """
add table inet weft
add chain inet weft zones { type filter hook output priority -300; }
add rule inet weft zones udp dport 7777 ct zone set 5
add chain inet weft services { type nat hook output priority -100; }
add rule inet weft services ip daddr 10.96.0.1 udp dport 53 dnat ip to 10.0.0.1:5353
add rule inet weft services ip6 daddr fd96::1 udp dport 53 dnat ip6 to [fd00::1]:5353
"""


def at(text: str) -> Address:
    return parse_address(text, field="address")


POD = {4: at("10.0.0.1"), 6: at("fd00::1")}
PEER = {4: at("10.0.0.2"), 6: at("fd00::2")}
SERVICE = {4: at("10.96.0.1"), 6: at("fd96::1")}


@pytest.fixture(autouse=True)
def network(here: TenantNetns) -> None:
    """Addresses of a pod and its peer, and a service in front of the pod, all on loopback."""
    with open_nftables(here.namespace) as nft:
        nft.run(RULES)
    for family in (4, 6):
        pod, peer, service = (Prefix(each[family], BITS[family]) for each in (POD, PEER, SERVICE))
        addresses = [LinkAddress(link=LOOPBACK_IFINDEX, prefix=prefix) for prefix in (pod, peer)]
        here.send(*map(put_address, addresses), *map(put_route, map(local_route, addresses)))
        here.send(put_route(Route(to=service, link=LOOPBACK_IFINDEX)))


def send_datagram(source: Address, destination: Address, port: int) -> None:
    """Send one datagram that gets no reply."""
    family = socket.AF_INET if source.family == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as speaker:
        speaker.bind((str(source), 0))
        speaker.sendto(b"hello", (str(destination), port))


def tracked_ports() -> set[int]:
    """The destination ports in the conntrack table."""
    lines = Path("/proc/thread-self/net/nf_conntrack").read_text().splitlines()
    return {int(next(word for word in line.split() if word.startswith("dport="))[6:]) for line in lines}


def send_datagrams(family: int) -> None:
    send_datagram(POD[family], PEER[family], 1001)
    send_datagram(PEER[family], POD[family], 1002)
    send_datagram(PEER[family], SERVICE[family], 53)
    send_datagram(PEER[family], POD[family], 7777)
    send_datagram(PEER[family], PEER[family], 1003)
    assert tracked_ports() >= {1001, 1002, 53, 7777, 1003}


@pytest.mark.parametrize("family", [4, 6])
def test_entries_of_an_endpoint_are_deleted_as_source_and_as_destination(here: TenantNetns, family: int) -> None:
    """Also behind a VIP and in another zone; entries of other endpoints stay."""
    send_datagrams(family)
    flush_addresses(here.netfilter, {POD[family]})
    assert tracked_ports() == {1003}
    flush_addresses(here.netfilter, {POD[family]})
    assert tracked_ports() == {1003}


@pytest.mark.parametrize("family", [4, 6])
def test_entries_of_the_other_family_are_kept(here: TenantNetns, family: int) -> None:
    other = 10 - family
    send_datagram(PEER[other], PEER[other], 2001)
    send_datagram(POD[family], PEER[family], 2002)
    flush_addresses(here.netfilter, {POD[family]})
    assert tracked_ports() == {2001}


@pytest.mark.parametrize("family", [4, 6])
def test_entries_of_a_service_are_deleted_by_port_and_backend(here: TenantNetns, family: int) -> None:
    """After a backend of a UDP service is removed, only its entries for that service are deleted."""
    send_datagrams(family)
    to_service = Direction(destination=SERVICE[family], protocol=socket.IPPROTO_UDP, destination_port=53)
    flush_matching(here.netfilter, [Pattern(original=to_service, reply=Direction(source=PEER[family]))], family=family)
    assert 53 in tracked_ports()
    flush_matching(here.netfilter, [Pattern(original=to_service, reply=Direction(source=POD[family]))], family=family)
    assert tracked_ports() == {1001, 1002, 7777, 1003}


def test_deletion_works_without_kernel_side_filters(here: TenantNetns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without filters rejects the incomplete tuple; then entries are read and deleted one by one."""
    monkeypatch.setattr(conntrack, "CTA_FILTER", 24)
    send_datagram(POD[4], PEER[4], 1001)
    send_datagram(PEER[4], PEER[4], 1003)
    flush_addresses(here.netfilter, {POD[4]})
    assert tracked_ports() == {1003}


@pytest.mark.parametrize("family", [4, 6])
def test_connections_are_read(here: TenantNetns, family: int) -> None:
    send_datagram(PEER[family], SERVICE[family], 53)
    (connection,) = read_connections(here.netfilter, family=family)
    source_port = connection.reply.destination_port
    assert source_port
    assert connection.original == Direction(
        source=PEER[family],
        destination=SERVICE[family],
        protocol=socket.IPPROTO_UDP,
        source_port=source_port,
        destination_port=53,
    )
    assert (connection.reply.source, connection.reply.destination) == (POD[family], PEER[family])


def test_deleting_from_an_empty_table(here: TenantNetns) -> None:
    flush_addresses(here.netfilter, {POD[4]})
    flush_addresses(here.netfilter, {POD[6]})
    assert read_connections(here.netfilter, family=4) == []
