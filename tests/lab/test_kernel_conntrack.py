"""Remembered connections, judged by the kernel's own list in `/proc/net/nf_conntrack`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import BITS, Address, parse_address
from weft.kernel.netlink import conntrack
from weft.kernel.netlink.conntrack import Direction, Pattern, forget_connections, forget_endpoints, read_connections
from weft.kernel.netlink.link import LOOPBACK
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
        addresses = [LinkAddress(link=LOOPBACK, prefix=prefix) for prefix in (pod, peer)]
        here.send(*map(put_address, addresses), *map(put_route, map(local_route, addresses)))
        here.send(put_route(Route(to=service, link=LOOPBACK)))


def talk(source: Address, destination: Address, port: int) -> None:
    """One datagram that nobody answers."""
    family = socket.AF_INET if source.family == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as speaker:
        speaker.bind((str(source), 0))
        speaker.sendto(b"hello", (str(destination), port))


def remembered() -> set[int]:
    """The ports that were talked to."""
    lines = Path("/proc/thread-self/net/nf_conntrack").read_text().splitlines()
    return {int(next(word for word in line.split() if word.startswith("dport="))[6:]) for line in lines}


def talk_all(family: int) -> None:
    talk(POD[family], PEER[family], 1001)
    talk(PEER[family], POD[family], 1002)
    talk(PEER[family], SERVICE[family], 53)
    talk(PEER[family], POD[family], 7777)
    talk(PEER[family], PEER[family], 1003)
    assert remembered() >= {1001, 1002, 53, 7777, 1003}


@pytest.mark.parametrize("family", [4, 6])
def test_an_endpoint_is_forgotten_as_asker_and_as_answerer(here: TenantNetns, family: int) -> None:
    """Also behind a service address and in another zone; the connections of others stay."""
    talk_all(family)
    forget_endpoints(here.netfilter, {POD[family]})
    assert remembered() == {1003}
    forget_endpoints(here.netfilter, {POD[family]})
    assert remembered() == {1003}


@pytest.mark.parametrize("family", [4, 6])
def test_the_other_family_is_left_alone(here: TenantNetns, family: int) -> None:
    other = 10 - family
    talk(PEER[other], PEER[other], 2001)
    talk(POD[family], PEER[family], 2002)
    forget_endpoints(here.netfilter, {POD[family]})
    assert remembered() == {2001}


@pytest.mark.parametrize("family", [4, 6])
def test_a_service_is_forgotten_by_port_and_backend(here: TenantNetns, family: int) -> None:
    """A backend of a UDP service went away: only what it answered for that service goes."""
    talk_all(family)
    to_service = Direction(destination=SERVICE[family], protocol=socket.IPPROTO_UDP, destination_port=53)
    forget_connections(
        here.netfilter, [Pattern(original=to_service, reply=Direction(source=PEER[family]))], family=family
    )
    assert 53 in remembered()
    forget_connections(
        here.netfilter, [Pattern(original=to_service, reply=Direction(source=POD[family]))], family=family
    )
    assert remembered() == {1001, 1002, 7777, 1003}


def test_a_kernel_that_knows_no_patterns_does_not_matter(here: TenantNetns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the filter the pattern is an incomplete connection, which the kernel refuses."""
    monkeypatch.setattr(conntrack, "_FILTER", 24)
    talk(POD[4], PEER[4], 1001)
    talk(PEER[4], PEER[4], 1003)
    forget_endpoints(here.netfilter, {POD[4]})
    assert remembered() == {1003}


@pytest.mark.parametrize("family", [4, 6])
def test_connections_are_read(here: TenantNetns, family: int) -> None:
    talk(PEER[family], SERVICE[family], 53)
    (connection,) = read_connections(here.netfilter, family=family)
    caller = connection.reply.destination_port
    assert caller
    assert connection.original == Direction(
        source=PEER[family],
        destination=SERVICE[family],
        protocol=socket.IPPROTO_UDP,
        source_port=caller,
        destination_port=53,
    )
    assert (connection.reply.source, connection.reply.destination) == (POD[family], PEER[family])


def test_nothing_remembered_is_nothing_to_forget(here: TenantNetns) -> None:
    forget_endpoints(here.netfilter, {POD[4]})
    forget_endpoints(here.netfilter, {POD[6]})
    assert read_connections(here.netfilter, family=4) == []
