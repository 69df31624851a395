"""`VtepGuard` against the kernel: the table is in step with the items, whatever was there and whoever changes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from weft.adapters.netns.host.vtep_guard import VtepGuard
from weft.adapters.netns.host.vtep_ruleset import VTEP_TABLE, VtepConfig
from weft.domain.addresses import parse_address
from weft.domain.desired.state import Overlay, Prefix, RemoteRoute, StateItem, VxlanPeer
from weft.domain.ids import TenantName

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE, RED = TenantName("blue"), TenantName("red")
CONFIG = VtepConfig(parse_address("192.0.2.1", field="vtep"), 4789)
OVERLAY = Overlay(BLUE, 5001)
POD = Prefix(4, parse_address("10.1.0.5", field="pod").number, 32)
PEERS = [VxlanPeer(BLUE, 5001, f"192.0.2.{number}") for number in (2, 3)]
ROUTES = [RemoteRoute(BLUE, POD, 5001, peer.vtep) for peer in PEERS]


class Machine:
    """The host netns, read with `nft`, and guards in it."""

    def __init__(self, here: TenantNetns) -> None:
        self.here = here

    def guard(self, config: VtepConfig = CONFIG) -> closing[VtepGuard]:
        return closing(VtepGuard(self.here.namespace, config))

    def has_table(self) -> bool:
        listed = self.here.ask("nft", "-j", "list", "tables")["nftables"]
        return any(each.get("table", {}).get("name") == VTEP_TABLE for each in listed)

    def elements(self, name: str) -> list[object]:
        return next((each["set"].get("elem", []) for each in self._list("set", name) if "set" in each), [])

    def tenants(self) -> int:
        return len(next(each["map"].get("elem", []) for each in self._list("map", "vni_tenants") if "map" in each))

    def receives(self) -> bool:
        """Whether received packets are checked."""
        return any("rule" in each for each in self._list("chain", "vxlan_ingress"))

    def flush(self) -> None:
        self.here.ask("nft", "flush", "ruleset")

    def _list(self, kind: str, name: str) -> Iterable[dict[str, dict[str, list[object]]]]:
        listed = self.here.ask("nft", "-j", "list", kind, "inet", VTEP_TABLE, name)["nftables"]
        return [each for each in listed if isinstance(each, dict)]


@pytest.fixture
def machine(here: TenantNetns) -> Machine:
    return Machine(here)


@pytest.fixture
def guard(machine: Machine) -> Iterator[VtepGuard]:
    with machine.guard() as guard:
        guard.converge(frozenset())
        yield guard


def test_sent_packets_are_checked_without_an_overlay_and_received_ones_with_the_first(
    machine: Machine, guard: VtepGuard
) -> None:
    assert not machine.receives()
    guard.admit([OVERLAY, PEERS[0]])
    assert machine.receives()
    assert machine.elements("vtep_peers") == ["192.0.2.2"]
    guard.dismiss([OVERLAY, PEERS[0]])
    assert not machine.receives()
    assert not machine.elements("vtep_peers")
    assert not machine.tenants()


def test_an_entry_stays_until_its_last_item_goes(machine: Machine, guard: VtepGuard) -> None:
    """A node has one peer entry for all networks, and a workload that moves has two owners for a while."""
    other = VxlanPeer(RED, 5002, PEERS[0].vtep)
    guard.admit([OVERLAY, Overlay(RED, 5002), PEERS[0], other, ROUTES[0]])
    guard.dismiss([PEERS[0]])
    assert machine.elements("vtep_peers") == ["192.0.2.2"]
    guard.admit([ROUTES[1]])
    guard.dismiss([ROUTES[0]])
    assert len(machine.elements("inner_owners4")) == len(machine.elements("inner_known4")) == 1
    guard.dismiss([other, ROUTES[1]])
    for name in ("vtep_peers", "inner_owners4", "inner_known4"):
        assert not machine.elements(name), name


def test_items_that_come_or_go_twice_change_nothing(machine: Machine, guard: VtepGuard) -> None:
    items: list[StateItem] = [OVERLAY, *PEERS, ROUTES[0]]
    guard.admit(items)
    guard.admit(items)
    guard.dismiss([PEERS[1]])
    guard.dismiss([PEERS[1]])
    assert machine.elements("vtep_peers") == ["192.0.2.2"]
    assert not guard.converge(items[:2] + items[3:])


def test_a_vni_can_pass_to_another_tenant(machine: Machine, guard: VtepGuard) -> None:
    """The new one may come before the old one goes: a map has one value for a key."""
    guard.admit([OVERLAY])
    guard.admit([Overlay(RED, OVERLAY.vni)])
    guard.dismiss([OVERLAY])
    assert machine.tenants() == 1
    assert machine.receives()
    assert not guard.converge([Overlay(RED, OVERLAY.vni)])


def test_a_restarted_agent_keeps_the_entries_until_it_knows_what_is_needed(machine: Machine, guard: VtepGuard) -> None:
    guard.admit([OVERLAY, *PEERS])
    with machine.guard() as later:
        later.admit([Overlay(RED, OVERLAY.vni)])
        assert machine.elements("vtep_peers") == ["192.0.2.2", "192.0.2.3"]
        assert machine.tenants() == 1
        later.converge([OVERLAY, PEERS[1]])
        assert machine.elements("vtep_peers") == ["192.0.2.3"]


def test_a_deleted_table_is_noticed_and_comes_back_with_its_entries(machine: Machine, guard: VtepGuard) -> None:
    guard.admit([OVERLAY, *PEERS])
    guard.has_drifted()
    assert not guard.has_drifted()
    machine.flush()
    assert guard.has_drifted()
    assert guard.counters() == []
    assert guard.converge([OVERLAY, *PEERS])
    assert len(machine.elements("vtep_peers")) == 2
    # A change that finds no table restores all of it.
    machine.flush()
    guard.dismiss([PEERS[0]])
    assert machine.elements("vtep_peers") == ["192.0.2.3"]
    assert machine.receives()


def test_entries_that_others_changed_are_repaired(machine: Machine, guard: VtepGuard) -> None:
    guard.admit([OVERLAY, *PEERS])
    machine.here.ask("nft", "delete", "element", "inet", VTEP_TABLE, "vtep_peers", "{ 192.0.2.2 }")
    machine.here.ask("nft", "add", "element", "inet", VTEP_TABLE, "vtep_peers", "{ 192.0.2.66 }")
    assert len(guard.converge([OVERLAY, *PEERS])) == 2
    assert machine.elements("vtep_peers") == ["192.0.2.2", "192.0.2.3"]
    # Also by a change that meets them.
    machine.here.ask("nft", "delete", "element", "inet", VTEP_TABLE, "vtep_peers", "{ 192.0.2.2 }")
    guard.dismiss([PEERS[0]])
    assert machine.elements("vtep_peers") == ["192.0.2.3"]


def test_a_table_for_the_other_address_family_or_of_somebody_else_is_replaced(
    machine: Machine, guard: VtepGuard
) -> None:
    guard.admit([OVERLAY, *PEERS])
    with machine.guard(VtepConfig(parse_address("2001:db8::1", field="vtep"), 4789)) as later:
        later.converge([OVERLAY, *PEERS, VxlanPeer(BLUE, 5001, "2001:db8::2")])
        assert machine.elements("vtep_peers") == ["2001:db8::2"]
        assert machine.receives()


def test_the_table_is_removed_with_the_agent(machine: Machine, guard: VtepGuard) -> None:
    guard.admit([OVERLAY, *PEERS])
    assert guard.remove()
    assert not machine.has_table()
    assert not guard.remove()
    assert not guard.has_drifted()
    assert not guard.counters()
    assert not guard.drops()


def test_many_entries_come_and_go_in_one_change(machine: Machine, guard: VtepGuard) -> None:
    """More than one netlink attribute holds."""
    base = parse_address("10.64.0.0", field="pod").number
    routes = [RemoteRoute(BLUE, Prefix(4, base + number, 32), 5001, PEERS[0].vtep) for number in range(5000)]
    guard.admit([OVERLAY, PEERS[0], *routes])
    assert len(machine.elements("inner_owners4")) == 5000
    guard.dismiss(routes)
    assert not machine.elements("inner_owners4")
