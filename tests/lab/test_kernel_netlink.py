"""Netlink batches and dumps on a real socket: failed requests are named, later ones run, replies are matched."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import Address, parse_address
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, create_bridge, read_link, read_links
from weft.kernel.netlink.route import Prefix, Route, drop_route, put_route, read_routes
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.uapi.netlink import NETLINK_NETFILTER

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns


def loopback_route(number: int) -> Route:
    return Route(to=Prefix(Address(4, (10 << 24) + number), 32), link=LOOPBACK_IFINDEX)


def lost_route(number: int) -> Route:
    """A route that the kernel rejects: its next hop is unreachable."""
    return Route(
        to=Prefix(Address(4, (11 << 24) + number), 32),
        via=parse_address("192.0.2.1", field="via"),
        link=LOOPBACK_IFINDEX,
    )


def test_the_first_failed_request_is_named_with_the_extack_message(here: TenantNetns) -> None:
    with pytest.raises(NetlinkError) as refused:
        here.send(put_route(loopback_route(0)), put_route(lost_route(1)), put_route(lost_route(2)))
    assert refused.value.position == 1
    assert refused.value.errno == errno.ENETUNREACH
    assert refused.value.message == (
        "add route to 11.0.0.1/32 via 192.0.2.1 on link 1, table 254: Nexthop has invalid gateway (ENETUNREACH)"
    )
    assert refused.value.details == {"errno": "ENETUNREACH", "position": 1}


def test_requests_after_a_failed_one_are_executed(here: TenantNetns) -> None:
    with pytest.raises(NetlinkError):
        here.send(put_route(lost_route(0)), put_route(loopback_route(1)))
    assert read_routes(here.route) == [loopback_route(1)]


def test_a_long_batch_is_executed_completely(here: TenantNetns) -> None:
    routes = [loopback_route(number) for number in range(3000)]
    here.send(*map(put_route, routes))
    assert set(read_routes(here.route)) == set(routes)
    here.send(*map(drop_route, routes))
    assert read_routes(here.route) == []


def test_a_long_batch_reports_the_first_of_many_errors_and_executes_the_rest(here: TenantNetns) -> None:
    routes = [lost_route(n) if n % 2 else loopback_route(n) for n in range(2000)]
    with pytest.raises(NetlinkError) as refused:
        here.send(*map(put_route, routes))
    assert refused.value.position == 1
    assert set(read_routes(here.route)) == set(routes[::2])


def test_unread_replies_do_not_affect_later_requests(here: TenantNetns) -> None:
    """After an error the final ACK of that batch is still in the socket."""
    for number in range(20):
        with pytest.raises(NetlinkError) as refused:
            here.send(put_route(lost_route(number)), put_route(loopback_route(number)))
        assert refused.value.position == 0
        here.send(put_route(loopback_route(1000 + number)))
        assert read_link(here.route, "lo") is not None
    assert len(read_routes(here.route)) == 40


def test_an_empty_batch(here: TenantNetns) -> None:
    here.send()


def test_an_empty_dump(here: TenantNetns) -> None:
    assert read_link(here.route, "nowhere0") is None


def test_many_devices_are_read_in_several_datagrams(here: TenantNetns) -> None:
    names = {f"br{number}" for number in range(200)}
    here.send(*(create_bridge(Device(name=name)) for name in names))
    assert names <= {link.name for link in read_links(here.route)}


def test_a_request_to_the_wrong_netlink_family_fails_at_once(here: TenantNetns) -> None:
    with NetlinkSocket(NETLINK_NETFILTER, namespace=here.namespace) as wrong, pytest.raises(NetlinkError):
        wrong.send_batch([put_route(loopback_route(1))])
