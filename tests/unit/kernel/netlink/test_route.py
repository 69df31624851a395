"""Addresses, routes and rules as messages, checked with pyroute2; what was packed is read back, whatever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from weft.domain import addresses
from weft.domain.addresses import BITS, Address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.route import (
    RTPROT_WEFT,
    LinkAddress,
    Prefix,
    Route,
    Rule,
    drop_route,
    local_route,
    parse_address,
    parse_route,
    parse_rule,
    put_address,
    put_route,
    put_rule,
)
from weft.kernel.uapi.rtnetlink import (
    RT_TABLE_LOCAL,
    RTN_BLACKHOLE,
    RTN_LOCAL,
    RTN_PROHIBIT,
    RTN_UNICAST,
    RTN_UNREACHABLE,
)

if TYPE_CHECKING:
    from tests.unit.kernel.conftest import Decoder


def at(text: str) -> Address:
    return addresses.parse_address(text, field="address")


def prefix(text: str) -> Prefix:
    address, _, length = text.partition("/")
    return Prefix(at(address), int(length))


def test_an_address(decode: Decoder) -> None:
    fields, attributes = decode(put_address(LinkAddress(link=3, prefix=prefix("10.1.0.1/16"))))
    assert (fields["family"], fields["prefixlen"], fields["index"]) == (2, 16, 3)
    assert attributes == {"IFA_LOCAL": "10.1.0.1", "IFA_ADDRESS": "10.1.0.1", "IFA_FLAGS": 0}


def test_a_v6_address_serves_without_being_asked_for_on_the_link(decode: Decoder) -> None:
    fields, attributes = decode(put_address(LinkAddress(link=3, prefix=prefix("fd00::1/64"), prefix_route=False)))
    assert (fields["family"], fields["prefixlen"]) == (10, 64)
    assert attributes["IFA_FLAGS"] == 0x2 | 0x200


def test_a_route_on_the_link(decode: Decoder) -> None:
    fields, attributes = decode(put_route(Route(to=prefix("10.0.0.2/32"), link=3)))
    assert (fields["dst_len"], fields["proto"], fields["scope"], fields["type"]) == (32, RTPROT_WEFT, 253, 1)
    assert attributes == {"RTA_DST": "10.0.0.2", "RTA_TABLE": 254, "RTA_OIF": 3}


def test_a_default_route(decode: Decoder) -> None:
    fields, attributes = decode(put_route(Route(to=prefix("::/0"), via=at("fe80::1"), link=3)))
    assert (fields["family"], fields["dst_len"], fields["scope"]) == (10, 0, 0)
    assert attributes == {"RTA_TABLE": 254, "RTA_OIF": 3, "RTA_GATEWAY": "fe80::1"}


def test_a_route_with_everything(decode: Decoder) -> None:
    route = Route(
        to=prefix("10.9.0.0/16"),
        via=at("192.0.2.1"),
        on_link=True,
        link=3,
        source=at("10.0.0.1"),
        table=70_000,
        metric=5,
        mtu=1400,
    )
    fields, attributes = decode(put_route(route))
    assert (fields["flags"], fields["table"]) == (4, 0)
    assert attributes == {
        "RTA_DST": "10.9.0.0",
        "RTA_TABLE": 70_000,
        "RTA_OIF": 3,
        "RTA_GATEWAY": "192.0.2.1",
        "RTA_PREFSRC": "10.0.0.1",
        "RTA_PRIORITY": 5,
        "RTA_METRICS": {"RTAX_MTU": 1400},
    }


def test_a_next_hop_of_the_other_family(decode: Decoder) -> None:
    _, attributes = decode(put_route(Route(to=prefix("10.9.0.0/16"), via=at("fe80::1"), link=3)))
    assert attributes["RTA_VIA"] == {"family": 10, "addr": "fe80::1"}


def test_the_route_that_lets_an_address_serve_at_once() -> None:
    address = LinkAddress(link=3, prefix=prefix("fd00::1/64"))
    assert local_route(address) == Route(to=prefix("fd00::1/128"), link=3, table=RT_TABLE_LOCAL, kind=RTN_LOCAL)


def test_a_rule(decode: Decoder) -> None:
    rule = Rule(family=4, priority=100, table=5000, input_link="wp1", mark=1, mask=255, to=prefix("10.0.0.0/8"))
    fields, attributes = decode(put_rule(rule))
    assert (fields["family"], fields["dst_len"], fields["src_len"], fields["action"]) == (2, 8, 0, 1)
    assert attributes == {
        "FRA_PRIORITY": 100,
        "FRA_TABLE": 5000,
        "FRA_PROTOCOL": RTPROT_WEFT,
        "FRA_IIFNAME": "wp1",
        "FRA_FWMARK": 1,
        "FRA_FWMASK": 255,
        "FRA_DST": "10.0.0.0",
    }


def test_refusals_are_about_something() -> None:
    route = Route(to=prefix("10.9.0.0/16"), via=at("192.0.2.1"), link=3)
    assert str(drop_route(route)) == "delete route to 10.9.0.0/16 via 192.0.2.1 on link 3, table 254"
    assert str(put_address(LinkAddress(link=3, prefix=prefix("fd00::1/64")))) == "add address fd00::1/64 of link 3"
    assert str(put_rule(Rule(family=6, priority=1, table=2))) == "add rule 1 for table 2, IPv6"


def addresses_of(family: int) -> st.SearchStrategy[Address]:
    return st.builds(Address, st.just(family), st.integers(0, (1 << BITS[family]) - 1))


def prefixes_of(family: int, *, shortest: int = 0) -> st.SearchStrategy[Prefix]:
    def cut(address: Address, length: int) -> Prefix:
        spare = BITS[family] - length
        return Prefix(Address(family, address.number >> spare << spare), length)

    return st.builds(cut, addresses_of(family), st.integers(shortest, BITS[family]))


LINKS = st.integers(1, 0x7FFFFFFF)
NUMBERS = st.integers(1, 0xFFFFFFFF)
FAMILIES = st.sampled_from([4, 6])


@st.composite
def routes(draw: st.DrawFn) -> Route:
    family = draw(FAMILIES)
    kind = draw(st.sampled_from([RTN_UNICAST, RTN_LOCAL, RTN_BLACKHOLE, RTN_UNREACHABLE, RTN_PROHIBIT]))
    leads = kind in (RTN_UNICAST, RTN_LOCAL)
    return Route(
        to=draw(prefixes_of(family)),
        link=draw(LINKS) if leads else 0,
        via=draw(st.none() | addresses_of(family) | addresses_of(6)) if leads else None,
        on_link=draw(st.booleans()) if leads else False,
        source=draw(st.none() | addresses_of(family)),
        table=draw(NUMBERS),
        metric=draw(st.integers(0, 1000)),
        mtu=draw(st.integers(0, 65535)),
        kind=kind,
    )


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    family = draw(FAMILIES)
    mask = draw(st.just(0) | NUMBERS)
    return Rule(
        family=family,
        priority=draw(st.integers(0, 32765)),
        table=draw(NUMBERS),
        input_link=draw(st.sampled_from(["", "wp1", "a-name-of-15-ch"])),
        mark=draw(NUMBERS) if mask else 0,
        mask=mask,
        source=draw(st.none() | prefixes_of(family)),
        to=draw(st.none() | prefixes_of(family)),
    )


@given(routes())
def test_routes_there_and_back(route: Route) -> None:
    assert parse_route(put_route(route).payload) == route


@given(rules())
def test_rules_there_and_back(rule: Rule) -> None:
    assert parse_rule(put_rule(rule).payload) == rule


@given(FAMILIES.flatmap(prefixes_of), LINKS, st.booleans())
def test_addresses_there_and_back(there: Prefix, link: int, prefix_route: bool) -> None:
    address = LinkAddress(link=link, prefix=there, prefix_route=prefix_route)
    assert parse_address(put_address(address).payload) == address


@given(st.binary(max_size=120) | st.binary(max_size=80).map(lambda data: bytes([2, 0, 0, 0]) + data))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    for parse in (parse_address, parse_route, parse_rule):
        try:
            parse(payload)
        except DatapathFault:
            continue
