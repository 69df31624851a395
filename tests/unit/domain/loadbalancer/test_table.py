"""The load-balancer table: its state depends on the services alone, not on the order of changes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServiceItem, Vip
from weft.domain.loadbalancer.table import MAX_AFFINITY_S, MAX_BACKENDS, LoadBalancerTable, Pool, Target, pool_of
from weft.domain.policy.model.protocols import TCP, UDP

BLUE = TenantName("blue")
VIP = Address(4, 0x0A000909)
FRONTEND = FrontendKey(VIP, TCP, 80)

TARGETS = st.builds(Target, st.integers(1, 4).map(lambda number: Address(4, number)), st.integers(8080, 8081))
FRONTENDS = st.builds(
    FrontendKey, st.integers(1, 2).map(lambda number: Address(4, number)), st.sampled_from((TCP, UDP)), st.just(80)
)
POOLS = st.builds(
    lambda targets, affinity: pool_of(targets, affinity=affinity),
    st.lists(TARGETS, max_size=4),
    st.sampled_from((0, 60)),
)
SERVICES = st.dictionaries(FRONTENDS, POOLS, max_size=3)
CHANGES = st.lists(st.tuples(st.sampled_from("abc"), SERVICES | st.none(), st.booleans()), max_size=12)


def target(number: int, port: int = 8080) -> Target:
    return Target(Address(4, number), port)


def applied(table: LoadBalancerTable, before: set[ServiceItem]) -> set[ServiceItem]:
    """The state of a datapath after the next delta; nothing is put twice or dropped without being applied_items."""
    delta = table.refresh()
    put, drop = set(delta.put), set(delta.drop)
    assert len(put) == len(delta.put)
    assert drop <= before
    assert not put & (before - drop)
    return (before - drop) | put


@given(CHANGES)
def test_incremental_changes_give_the_same_state_as_a_new_table(
    changes: list[tuple[str, dict[FrontendKey, Pool] | None, bool]],
) -> None:
    table = LoadBalancerTable(BLUE)
    desired: dict[str, dict[FrontendKey, Pool]] = {}
    applied_items: set[ServiceItem] = set()
    for name, pools, refresh in changes:
        if pools is None:
            table.remove(name)
            desired.pop(name, None)
        else:
            table.put(name, pools)
            desired[name] = pools
        if refresh:
            applied_items = applied(table, applied_items)
    applied_items = applied(table, applied_items)
    fresh = LoadBalancerTable(BLUE)
    names = list(desired)
    random.Random(len(names)).shuffle(names)
    for name in names:
        fresh.put(name, desired[name])
    assert applied_items == applied(fresh, set()) == set(table.state_items())


@given(SERVICES)
def test_backends_of_a_frontend_are_numbered_without_gaps(pools: dict[FrontendKey, Pool]) -> None:
    table = LoadBalancerTable(BLUE)
    table.put("web", pools)
    items = applied(table, set())
    for frontend, pool in pools.items():
        backends = sorted(
            (item for item in items if isinstance(item, Backend) and item.frontend == frontend),
            key=lambda item: item.number,
        )
        assert [item.number for item in backends] == list(range(len(pool.targets)))
        assert [Target(item.address, item.port) for item in backends] == list(pool.targets)
        assert Frontend(BLUE, frontend, len(backends), pool.affinity) in items
        hash_slots = [item.hash_slot for item in backends]
        assert len(set(hash_slots)) == len(hash_slots) and all(hash_slots) if pool.affinity else not any(hash_slots)
    assert {item.address for item in items if isinstance(item, Vip)} == {frontend.address for frontend in pools}


def test_a_hash_slot_does_not_depend_on_other_backends() -> None:
    table = LoadBalancerTable(BLUE)
    hash_slots: dict[Address, set[int]] = {}
    for numbers in ((1, 2), (1, 2, 3), (2, 3), (3,)):
        table.put("web", {FRONTEND: pool_of(map(target, numbers), affinity=60)})
        table.refresh()
        for item in table.state_items():
            if isinstance(item, Backend):
                hash_slots.setdefault(item.address, set()).add(item.hash_slot)
    assert all(len(each) == 1 for each in hash_slots.values())


def test_one_service_gets_a_frontend_that_several_claim() -> None:
    """CVE-2020-8554: a later service cannot take over a frontend while the first by name has it."""
    table = LoadBalancerTable(BLUE)
    table.put("b", {FRONTEND: pool_of([target(2)])})
    table.put("a", {FRONTEND: pool_of([target(1)])})
    table.put("c", {FRONTEND: pool_of([target(3)])})
    table.refresh()
    assert table.port_of(FRONTEND, target(1).address) == 8080
    table.remove("a")
    table.refresh()
    assert table.port_of(FRONTEND, target(1).address) == 0
    assert table.port_of(FRONTEND, target(2).address) == 8080


def test_a_change_of_one_backend_leaves_the_others_alone() -> None:
    table = LoadBalancerTable(BLUE)
    for number in range(100):
        table.put(f"web-{number}", {FRONTEND._replace(port=number + 1): pool_of([target(1), target(2)])})
    table.refresh()
    table.put("web-7", {FRONTEND._replace(port=8): pool_of([target(1), target(3)])})
    delta = table.refresh()
    assert delta.put == (Backend(BLUE, FRONTEND._replace(port=8), 1, target(3).address, 8080),)
    assert delta.drop == (Backend(BLUE, FRONTEND._replace(port=8), 1, target(2).address, 8080),)


def test_pools_are_cut_to_the_limits_of_a_datapath() -> None:
    pool = pool_of((target(number) for number in range(MAX_BACKENDS + 5)), affinity=10**6)
    assert (len(pool.targets), pool.affinity) == (MAX_BACKENDS, MAX_AFFINITY_S)
    assert pool_of([target(2), target(1), target(2)]).targets == (target(1), target(2))
