"""Batches and readings over a real socket: what fails is named, what follows is done, nothing is mixed up."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import Address, parse_address
from weft.kernel.netlink.link import LOOPBACK, Device, create_bridge, read_link, read_links
from weft.kernel.netlink.route import Prefix, Route, drop_route, put_route, read_routes
from weft.kernel.netlink.socket import NETFILTER, NetlinkError, NetlinkSocket

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns


def loopback_route(number: int) -> Route:
    return Route(to=Prefix(Address(4, (10 << 24) + number), 32), link=LOOPBACK)


def lost_route(number: int) -> Route:
    """One that the kernel refuses: nobody knows the way to its next hop."""
    return Route(
        to=Prefix(Address(4, (11 << 24) + number), 32), via=parse_address("192.0.2.1", field="via"), link=LOOPBACK
    )


def test_the_first_refused_request_is_named_with_the_kernels_words(here: TenantNetns) -> None:
    with pytest.raises(NetlinkError) as refused:
        here.send(put_route(loopback_route(0)), put_route(lost_route(1)), put_route(lost_route(2)))
    assert refused.value.position == 1
    assert refused.value.errno == errno.ENETUNREACH
    assert refused.value.message == (
        "add route to 11.0.0.1/32 via 192.0.2.1 on link 1, table 254: Nexthop has invalid gateway (ENETUNREACH)"
    )
    assert refused.value.details == {"errno": "ENETUNREACH", "position": 1}


def test_what_follows_a_refused_request_is_carried_out(here: TenantNetns) -> None:
    with pytest.raises(NetlinkError):
        here.send(put_route(lost_route(0)), put_route(loopback_route(1)))
    assert read_routes(here.route) == [loopback_route(1)]


def test_a_long_batch_is_carried_out_whole(here: TenantNetns) -> None:
    routes = [loopback_route(number) for number in range(3000)]
    here.send(*map(put_route, routes))
    assert set(read_routes(here.route)) == set(routes)
    here.send(*map(drop_route, routes))
    assert read_routes(here.route) == []


def test_a_long_batch_tells_the_first_of_many_refusals_and_does_the_rest(here: TenantNetns) -> None:
    routes = [lost_route(n) if n % 2 else loopback_route(n) for n in range(2000)]
    with pytest.raises(NetlinkError) as refused:
        here.send(*map(put_route, routes))
    assert refused.value.position == 1
    assert set(read_routes(here.route)) == set(routes[::2])


def test_answers_that_were_left_unread_confuse_nobody(here: TenantNetns) -> None:
    """After a refusal the confirmation of that batch still waits in the socket."""
    for number in range(20):
        with pytest.raises(NetlinkError) as refused:
            here.send(put_route(lost_route(number)), put_route(loopback_route(number)))
        assert refused.value.position == 0
        here.send(put_route(loopback_route(1000 + number)))
        assert read_link(here.route, "lo") is not None
    assert len(read_routes(here.route)) == 40


def test_an_empty_batch_is_nothing(here: TenantNetns) -> None:
    here.send()


def test_a_question_about_nothing_is_answered_with_nothing(here: TenantNetns) -> None:
    assert read_link(here.route, "nowhere0") is None


def test_many_devices_are_read_in_several_datagrams(here: TenantNetns) -> None:
    names = {f"br{number}" for number in range(200)}
    here.send(*(create_bridge(Device(name=name)) for name in names))
    assert names <= {link.name for link in read_links(here.route)}


def test_a_request_to_the_wrong_part_of_the_kernel_is_refused_not_waited_for(here: TenantNetns) -> None:
    with NetlinkSocket(NETFILTER, namespace=here.namespace) as wrong, pytest.raises(NetlinkError):
        wrong.send_batch([put_route(loopback_route(1))])
