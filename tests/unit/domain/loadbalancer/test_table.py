"""The balancing table: what fronts and pools come to, however they came about."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServicePart, Vip
from weft.domain.loadbalancer.table import LONGEST_AFFINITY_S, MOST_BACKENDS, BalancingTable, Pool, Target, pool_of
from weft.domain.policy.model.protocols import TCP, UDP

BLUE = TenantName("blue")
VIP = Address(4, 0x0A000909)
FRONT = FrontendKey(VIP, TCP, 80)

TARGETS = st.builds(Target, st.integers(1, 4).map(lambda number: Address(4, number)), st.integers(8080, 8081))
FRONTS = st.builds(
    FrontendKey, st.integers(1, 2).map(lambda number: Address(4, number)), st.sampled_from((TCP, UDP)), st.just(80)
)
POOLS = st.builds(
    lambda targets, affinity: pool_of(targets, affinity=affinity),
    st.lists(TARGETS, max_size=4),
    st.sampled_from((0, 60)),
)
SERVICES = st.dictionaries(FRONTS, POOLS, max_size=3)
CHANGES = st.lists(st.tuples(st.sampled_from("abc"), SERVICES | st.none(), st.booleans()), max_size=12)


def target(number: int, port: int = 8080) -> Target:
    return Target(Address(4, number), port)


def told(table: BalancingTable, so_far: set[ServicePart]) -> set[ServicePart]:
    """What a datapath has that carries out the next difference; nothing is put twice or dropped in vain."""
    difference = table.refresh()
    put, drop = set(difference.put), set(difference.drop)
    assert len(put) == len(difference.put)
    assert drop <= so_far
    assert not put & (so_far - drop)
    return (so_far - drop) | put


@given(CHANGES)
def test_changes_come_to_the_same_as_starting_from_nothing(
    changes: list[tuple[str, dict[FrontendKey, Pool] | None, bool]],
) -> None:
    table = BalancingTable(BLUE)
    wanted: dict[str, dict[FrontendKey, Pool]] = {}
    there: set[ServicePart] = set()
    for name, pools, tell in changes:
        if pools is None:
            table.remove(name)
            wanted.pop(name, None)
        else:
            table.put(name, pools)
            wanted[name] = pools
        if tell:
            there = told(table, there)
    there = told(table, there)
    fresh = BalancingTable(BLUE)
    names = list(wanted)
    random.Random(len(names)).shuffle(names)
    for name in names:
        fresh.put(name, wanted[name])
    assert there == told(fresh, set()) == set(table.parts())


@given(SERVICES)
def test_every_front_has_its_backends_in_a_row(pools: dict[FrontendKey, Pool]) -> None:
    table = BalancingTable(BLUE)
    table.put("web", pools)
    parts = told(table, set())
    for front, pool in pools.items():
        backends = sorted(
            (part for part in parts if isinstance(part, Backend) and part.front == front), key=lambda part: part.number
        )
        assert [part.number for part in backends] == list(range(len(pool.targets)))
        assert [Target(part.address, part.port) for part in backends] == list(pool.targets)
        assert Frontend(BLUE, front, len(backends), pool.affinity) in parts
        tickets = [part.hash_slot for part in backends]
        assert len(set(tickets)) == len(tickets) and all(tickets) if pool.affinity else not any(tickets)
    assert {part.address for part in parts if isinstance(part, Vip)} == {front.address for front in pools}


def test_a_ticket_stays_whoever_comes_and_goes() -> None:
    table = BalancingTable(BLUE)
    tickets: dict[Address, set[int]] = {}
    for numbers in ((1, 2), (1, 2, 3), (2, 3), (3,)):
        table.put("web", {FRONT: pool_of(map(target, numbers), affinity=60)})
        table.refresh()
        for part in table.parts():
            if isinstance(part, Backend):
                tickets.setdefault(part.address, set()).add(part.hash_slot)
    assert all(len(each) == 1 for each in tickets.values())


def test_one_service_has_a_front_that_several_claim() -> None:
    """CVE-2020-8554 in small: who comes later takes nothing away from who has it, while that one is there."""
    table = BalancingTable(BLUE)
    table.put("b", {FRONT: pool_of([target(2)])})
    table.put("a", {FRONT: pool_of([target(1)])})
    table.put("c", {FRONT: pool_of([target(3)])})
    table.refresh()
    assert table.port_of(FRONT, target(1).address) == 8080
    table.remove("a")
    table.refresh()
    assert table.port_of(FRONT, target(1).address) == 0
    assert table.port_of(FRONT, target(2).address) == 8080


def test_a_change_of_one_backend_leaves_the_others_alone() -> None:
    table = BalancingTable(BLUE)
    for number in range(100):
        table.put(f"web-{number}", {FRONT._replace(port=number + 1): pool_of([target(1), target(2)])})
    table.refresh()
    table.put("web-7", {FRONT._replace(port=8): pool_of([target(1), target(3)])})
    difference = table.refresh()
    assert difference.put == (Backend(BLUE, FRONT._replace(port=8), 1, target(3).address, 8080),)
    assert difference.drop == (Backend(BLUE, FRONT._replace(port=8), 1, target(2).address, 8080),)


def test_pools_are_kept_to_what_a_datapath_can_do() -> None:
    pool = pool_of((target(number) for number in range(MOST_BACKENDS + 5)), affinity=10**6)
    assert (len(pool.targets), pool.affinity) == (MOST_BACKENDS, LONGEST_AFFINITY_S)
    assert pool_of([target(2), target(1), target(2)]).targets == (target(1), target(2))
