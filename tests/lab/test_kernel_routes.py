"""Addresses, routes and rules, compared with `ip`, and read back."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import Address, parse_address
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, Device, change_address_settings, change_link, create_bridge
from weft.kernel.netlink.route import (
    LinkAddress,
    Prefix,
    Route,
    Rule,
    drop_address,
    drop_route,
    drop_rule,
    local_route,
    put_address,
    put_route,
    put_rule,
    read_addresses,
    read_routes,
    read_rules,
)
from weft.kernel.uapi.rtnetlink import RTN_BLACKHOLE, RTN_LOCAL, RTN_PROHIBIT, RTN_UNREACHABLE
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BRIDGE = 50


def at(text: str) -> Address:
    return parse_address(text, field="address")


def prefix(text: str) -> Prefix:
    address, _, length = text.partition("/")
    return Prefix(at(address), int(length))


@pytest.fixture(autouse=True)
def bridge(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=BRIDGE)),
        change_address_settings(BRIDGE, link_local=False),
        change_link(BRIDGE, up=True),
    )


def routes_by_ip(netns: TenantNetns, family: int) -> dict[str, Any]:
    routes = netns.ask("ip", "-j", f"-{family}", "-d", "route", "show", "table", "all", "proto", "87")
    return {route["dst"]: route for route in routes}


ADDRESSES = [
    LinkAddress(link=BRIDGE, prefix=prefix("10.1.0.1/16")),
    LinkAddress(link=BRIDGE, prefix=prefix("10.2.0.1/32"), prefix_route=False),
    LinkAddress(link=BRIDGE, prefix=prefix("10.3.0.1/24"), prefix_route=False),
    LinkAddress(link=BRIDGE, prefix=prefix("fd01::1/64")),
    LinkAddress(link=BRIDGE, prefix=prefix("fe80::1/64"), prefix_route=False),
]

ROUTES = [
    Route(to=prefix("10.9.0.1/32"), link=BRIDGE),
    Route(to=prefix("0.0.0.0/0"), via=at("10.9.0.1"), link=BRIDGE),
    Route(to=prefix("10.10.0.0/24"), via=at("192.0.2.1"), on_link=True, link=BRIDGE, mtu=1400, metric=7),
    Route(to=prefix("10.11.0.0/24"), via=at("fe80::9"), on_link=True, link=BRIDGE),
    Route(to=prefix("10.12.0.0/16"), kind=RTN_BLACKHOLE),
    Route(to=prefix("10.13.0.0/16"), kind=RTN_UNREACHABLE, table=5000),
    Route(to=prefix("10.14.0.0/16"), kind=RTN_PROHIBIT),
    Route(to=prefix("10.15.0.1/32"), kind=RTN_LOCAL, link=LOOPBACK_IFINDEX),
    Route(to=prefix("10.16.0.0/16"), link=BRIDGE, source=at("10.1.0.1")),
    Route(to=prefix("fd09::1/128"), link=BRIDGE),
    Route(to=prefix("::/0"), via=at("fd09::1"), on_link=True, link=BRIDGE),
    Route(to=prefix("fd10::/64"), via=at("fe80::9"), link=BRIDGE, mtu=1400, metric=7, table=5000),
    Route(to=prefix("fd12::/64"), kind=RTN_BLACKHOLE),
    Route(to=prefix("fd15::1/128"), kind=RTN_LOCAL, link=LOOPBACK_IFINDEX),
]


def test_addresses_are_added_as_requested(here: TenantNetns) -> None:
    here.send(*map(put_address, ADDRESSES))
    (link,) = here.ask("ip", "-j", "-d", "address", "show", "dev", "br0")
    shown_by_ip = {f"{each['local']}/{each['prefixlen']}": each for each in link["addr_info"]}
    assert shown_by_ip.keys() == {str(each.prefix) for each in ADDRESSES}
    for each in ADDRESSES:
        assert shown_by_ip[str(each.prefix)].get("noprefixroute", False) is not each.prefix_route
        assert "tentative" not in shown_by_ip[str(each.prefix)], "an IPv6 address is usable at once"
    assert set(read_addresses(here.route, link=BRIDGE)) == set(ADDRESSES)


def test_adding_and_deleting_addresses_is_idempotent(here: TenantNetns) -> None:
    here.send(*map(put_address, ADDRESSES * 2))
    here.send(*map(drop_address, ADDRESSES * 2))
    assert here.ask("ip", "-j", "address", "show", "dev", "br0")[0]["addr_info"] == []
    assert read_addresses(here.route, link=BRIDGE) == []


def test_a_new_address_receives_the_first_packet(here: TenantNetns) -> None:
    """The kernel adds its local IPv6 route asynchronously: without ours, one packet in twenty was lost."""
    with (
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("::", 0))
        receiver.settimeout(DEADLINE)
        for number in range(1, 101):
            address = LinkAddress(link=LOOPBACK_IFINDEX, prefix=Prefix(Address(6, (0xFD << 120) + number), 128))
            here.send(put_address(address), put_route(local_route(address)))
            sender.sendto(b"hello", (str(address.prefix.address), receiver.getsockname()[1]))
            assert receiver.recv(100) == b"hello"


def test_a_missing_device_has_no_addresses(here: TenantNetns) -> None:
    here.send(drop_address(LinkAddress(link=4711, prefix=prefix("10.1.0.1/16"))))
    assert read_addresses(here.route, link=4711) == []


def test_routes_are_added_as_requested(here: TenantNetns) -> None:
    here.send(put_address(ADDRESSES[0]), *map(put_route, ROUTES))
    v4, v6 = routes_by_ip(here, 4), routes_by_ip(here, 6)
    assert len(v4) + len(v6) == len(ROUTES)
    assert (v4["default"]["gateway"], v4["default"]["dev"]) == ("10.9.0.1", "br0")
    assert v4["10.9.0.1"]["scope"] == "link"
    assert v4["10.10.0.0/24"]["metric"] == 7
    assert v4["10.10.0.0/24"]["metrics"] == [{"mtu": 1400}]
    assert v4["10.10.0.0/24"]["flags"] == ["onlink"]
    assert v4["10.11.0.0/24"]["via"] == {"family": "inet6", "host": "fe80::9"}
    assert (v4["10.12.0.0/16"]["type"], v4["10.14.0.0/16"]["type"]) == ("blackhole", "prohibit")
    assert (v4["10.13.0.0/16"]["type"], v4["10.13.0.0/16"]["table"]) == ("unreachable", "5000")
    assert v4["10.16.0.0/16"]["prefsrc"] == "10.1.0.1"
    assert (v6["default"]["gateway"], v6["fd10::/64"]["table"], v6["fd12::/64"]["type"]) == (
        "fd09::1",
        "5000",
        "blackhole",
    )
    assert set(read_routes(here.route)) == set(ROUTES)


def test_adding_and_deleting_routes_is_idempotent(here: TenantNetns) -> None:
    here.send(put_address(ADDRESSES[0]))
    for _ in range(2):
        here.send(*map(put_route, ROUTES))
    for _ in range(2):
        here.send(*map(drop_route, ROUTES))
    assert read_routes(here.route) == []
    assert routes_by_ip(here, 4) == routes_by_ip(here, 6) == {}


@pytest.mark.parametrize(
    ("to", "first", "second"), [("10.9.0.0/24", "10.1.0.2", "10.1.0.3"), ("fd09::/64", "fd01::2", "fd01::3")]
)
def test_a_route_replaces_another_to_the_same_destination(here: TenantNetns, to: str, first: str, second: str) -> None:
    here.send(*map(put_address, ADDRESSES))
    old, new = (Route(to=prefix(to), via=at(via), link=BRIDGE) for via in (first, second))
    here.send(put_route(old), put_route(new))
    assert read_routes(here.route) == [new]
    here.send(drop_route(old))
    assert read_routes(here.route) == [new], "the old route is not the one to delete"


def test_foreign_routes_are_neither_read_nor_deleted(here: TenantNetns) -> None:
    here.ask("ip", "route", "add", "10.20.0.0/16", "dev", "br0")
    here.ask("ip", "-6", "route", "add", "fd20::/64", "dev", "br0")
    ours = [Route(to=prefix("10.20.0.0/16"), link=BRIDGE), Route(to=prefix("fd20::/64"), link=BRIDGE)]
    here.send(*map(drop_route, ours))
    assert read_routes(here.route) == []
    assert set(ours) <= set(read_routes(here.route, protocol=0))


def test_deleting_a_route_of_a_deleted_device(here: TenantNetns) -> None:
    here.send(drop_route(Route(to=prefix("10.9.0.0/24"), link=4711)))
    here.send(drop_route(Route(to=prefix("fd09::/64"), link=4711)))


RULES = [
    Rule(family=4, priority=100, table=5000, mark=0x10, mask=0xFF),
    Rule(family=4, priority=101, table=100, to=prefix("10.0.0.0/8"), source=prefix("10.1.0.0/16")),
    Rule(family=6, priority=100, table=5000, input_link="br0"),
    Rule(family=6, priority=101, table=100, to=prefix("fd00::/8")),
    Rule(family=4, priority=102, table=100, mark=0, mask=0xFF),
]


def test_rules_are_added_and_foreign_rules_are_not_read(here: TenantNetns) -> None:
    here.send(*map(put_rule, RULES * 2))
    v4 = {rule["priority"]: rule for rule in here.ask("ip", "-j", "-4", "rule")}
    v6 = {rule["priority"]: rule for rule in here.ask("ip", "-j", "-6", "rule")}
    assert (v4[100]["fwmark"], v4[100]["fwmask"], v4[100]["table"]) == ("0x10", "0xff", "5000")
    assert (v4[101]["src"], v4[101]["srclen"], v4[101]["dst"], v4[101]["dstlen"]) == ("10.1.0.0", 16, "10.0.0.0", 8)
    assert (v6[100]["iif"], v6[101]["dst"]) == ("br0", "fd00::")
    assert sorted(read_rules(here.route), key=str) == sorted(RULES, key=str)
    here.send(*map(drop_rule, RULES * 2))
    assert read_rules(here.route) == []
    assert {rule["priority"] for rule in here.ask("ip", "-j", "-4", "rule")} == {0, 32766, 32767}
