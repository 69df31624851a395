"""Service state as nft entries: which map, which bytes. The lab tests run them in the kernel."""

from __future__ import annotations

import itertools

import pytest

from weft.adapters.netns.nft import policy_chains
from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.service_chains import (
    EXTERNAL,
    SERVICE_SETS,
    BackendSelector,
    chains,
    declarations,
    selector_commands,
    selector_id,
)
from weft.adapters.netns.nft.service_maps import backend_selectors, service_entries
from weft.domain.addresses import parse_address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServiceItem, Vip
from weft.domain.loadbalancer.table import MAX_AFFINITY_S, MAX_BACKENDS
from weft.domain.policy.model.protocols import TCP
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol

BLUE = TenantName("blue")
VIPS = {4: parse_address("10.0.9.9", field="vip"), 6: parse_address("fd00::9:9", field="vip")}
PODS = {4: parse_address("10.0.0.1", field="pod"), 6: parse_address("fd00::1", field="pod")}
FAMILIES = pytest.mark.parametrize("family", [4, 6])


def frontend_key(family: int, *rest: bytes) -> bytes:
    return key(pack_address(VIPS[family]), protocol(TCP), port(80), *rest)


def target(family: int) -> bytes:
    return key(pack_address(PODS[family]), port(8080))


@FAMILIES
def test_a_backend_is_looked_up_by_its_index(family: int) -> None:
    item = Backend(BLUE, FrontendKey(VIPS[family], TCP, 80), 3, PODS[family], 8080)
    element = Element(key=frontend_key(family, mark(3)), value=target(family))
    assert set(service_entries(item)) == {Entry(f"backends{family}", element)}


@FAMILIES
def test_a_backend_with_affinity_is_looked_up_by_its_hash_slot(family: int) -> None:
    item = Backend(BLUE, FrontendKey(VIPS[family], TCP, 80), 3, PODS[family], 8080, 77)
    assert set(service_entries(item)) == {
        Entry(f"backend_hash{family}", Element(key=frontend_key(family, mark(3)), value=mark(77))),
        Entry(f"backend_by_hash{family}", Element(key=frontend_key(family, mark(77)), value=target(family))),
    }


@pytest.mark.parametrize("scope", ["", EXTERNAL])
@FAMILIES
def test_a_frontend_has_the_selector_of_its_backends(family: int, scope: str) -> None:
    frontend = FrontendKey(VIPS[family], TCP, 80, external=bool(scope))
    for backends, affinity, number in ((3, 0, 3), (3, 60, 60 << 12 | 3), (0, 60, 0)):
        entries = set(service_entries(Frontend(BLUE, frontend, backends, affinity)))
        assert entries == {Entry(f"services{scope}{family}", Element(key=frontend_key(family), value=mark(number)))}
        assert backend_selectors(entries) == ({BackendSelector(number, scope)} if number else set())


def test_selector_ids_are_unique() -> None:
    selectors = list(itertools.product((1, 2, MAX_BACKENDS), (0, 1, 600, MAX_AFFINITY_S)))
    assert len({selector_id(*selector) for selector in selectors}) == len(selectors)
    assert all(selector_id(*selector) < 1 << 32 for selector in selectors)


@pytest.mark.parametrize(
    "item",
    [
        Vip(BLUE, VIPS[4]),
        Frontend(BLUE, FrontendKey(VIPS[6], TCP, 80), 1),
        Backend(BLUE, FrontendKey(VIPS[4], TCP, 80), 0, PODS[4], 8080),
        Backend(BLUE, FrontendKey(VIPS[6], TCP, 80), 0, PODS[6], 8080, 5),
        Backend(BLUE, FrontendKey(VIPS[6], TCP, 80, external=True), 0, PODS[6], 8080, 5),
    ],
)
def test_every_set_is_declared_and_read_back(item: ServiceItem) -> None:
    declared = {line.split()[1] for line in declarations()}
    assert set(SERVICE_SETS) <= declared
    assert {entry.name for entry in service_entries(item)} <= set(SERVICE_SETS)


def test_every_jump_target_exists() -> None:
    made = chains()
    selectors = selector_commands([BackendSelector(1, ""), BackendSelector(selector_id(2, 60), EXTERNAL)], table="weft")
    words = " ; ".join([rule for rules in made.values() for rule in rules] + selectors.splitlines()).split()
    targets = {after for verb, after in itertools.pairwise(words) if verb in ("goto", "jump")}
    declared = {after for verb, after in itertools.pairwise(selectors.split()) if verb == "weft"}
    assert targets <= made.keys() | declared
    assert not made.keys() & policy_chains.chains().keys()
