"""Service parts as entries: which map, which bytes. The lab has the kernel for a judge."""

from __future__ import annotations

import itertools

import pytest

from weft.adapters.netns.nft import policy_chains
from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.service_chains import (
    OUTSIDE,
    SERVICE_SETS,
    BackendSelector,
    chains,
    declarations,
    spread_commands,
    spread_number,
)
from weft.adapters.netns.nft.service_maps import service_entries, spreads_of
from weft.domain.addresses import parse_address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServicePart, Vip
from weft.domain.loadbalancer.table import LONGEST_AFFINITY_S, MOST_BACKENDS
from weft.domain.policy.model.protocols import TCP
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol

BLUE = TenantName("blue")
VIPS = {4: parse_address("10.0.9.9", field="vip"), 6: parse_address("fd00::9:9", field="vip")}
PODS = {4: parse_address("10.0.0.1", field="pod"), 6: parse_address("fd00::1", field="pod")}
FAMILIES = pytest.mark.parametrize("family", [4, 6])


def front_key(family: int, *rest: bytes) -> bytes:
    return key(pack_address(VIPS[family]), protocol(TCP), port(80), *rest)


def target(family: int) -> bytes:
    return key(pack_address(PODS[family]), port(8080))


@FAMILIES
def test_a_backend_is_found_by_its_number(family: int) -> None:
    part = Backend(BLUE, FrontendKey(VIPS[family], TCP, 80), 3, PODS[family], 8080)
    element = Element(key=front_key(family, mark(3)), value=target(family))
    assert set(service_entries(part)) == {Entry(f"backends{family}", element)}


@FAMILIES
def test_a_backend_with_a_ticket_is_found_by_that(family: int) -> None:
    part = Backend(BLUE, FrontendKey(VIPS[family], TCP, 80), 3, PODS[family], 8080, 77)
    assert set(service_entries(part)) == {
        Entry(f"tickets{family}", Element(key=front_key(family, mark(3)), value=mark(77))),
        Entry(f"ticketed{family}", Element(key=front_key(family, mark(77)), value=target(family))),
    }


@pytest.mark.parametrize("side", ["", OUTSIDE])
@FAMILIES
def test_a_front_says_how_its_connections_are_spread(family: int, side: str) -> None:
    front = FrontendKey(VIPS[family], TCP, 80, outside=bool(side))
    for backends, affinity, number in ((3, 0, 3), (3, 60, 60 << 12 | 3), (0, 60, 0)):
        entries = set(service_entries(Frontend(BLUE, front, backends, affinity)))
        assert entries == {Entry(f"services{side}{family}", Element(key=front_key(family), value=mark(number)))}
        assert spreads_of(entries) == ({BackendSelector(number, side)} if number else set())


def test_no_two_ways_to_spread_have_one_number() -> None:
    ways = list(itertools.product((1, 2, MOST_BACKENDS), (0, 1, 600, LONGEST_AFFINITY_S)))
    assert len({spread_number(*way) for way in ways}) == len(ways)
    assert all(spread_number(*way) < 1 << 32 for way in ways)


@pytest.mark.parametrize(
    "part",
    [
        Vip(BLUE, VIPS[4]),
        Frontend(BLUE, FrontendKey(VIPS[6], TCP, 80), 1),
        Backend(BLUE, FrontendKey(VIPS[4], TCP, 80), 0, PODS[4], 8080),
        Backend(BLUE, FrontendKey(VIPS[6], TCP, 80), 0, PODS[6], 8080, 5),
        Backend(BLUE, FrontendKey(VIPS[6], TCP, 80, outside=True), 0, PODS[6], 8080, 5),
    ],
)
def test_every_set_is_declared_and_read_back(part: ServicePart) -> None:
    declared = {line.split()[1] for line in declarations()}
    assert set(SERVICE_SETS) <= declared
    assert {entry.name for entry in service_entries(part)} <= set(SERVICE_SETS)


def test_every_chain_that_is_gone_to_is_there() -> None:
    made = chains()
    spreads = spread_commands([BackendSelector(1, ""), BackendSelector(spread_number(2, 60), OUTSIDE)], table="weft")
    words = " ; ".join([rule for rules in made.values() for rule in rules] + spreads.splitlines()).split()
    targets = {after for verb, after in itertools.pairwise(words) if verb in ("goto", "jump")}
    declared = {after for verb, after in itertools.pairwise(spreads.split()) if verb == "weft"}
    assert targets <= made.keys() | declared
    assert not made.keys() & policy_chains.chains().keys()
