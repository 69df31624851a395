"""Released addresses rest a while, and then no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.ids import NetworkKey, NetworkName, TenantName
from weft.domain.ipam.address_cooldown import Cooldown

BLUE = NetworkKey(TenantName("default"), NetworkName("blue"))
RED = NetworkKey(TenantName("default"), NetworkName("red"))


def resting_at(resting: Cooldown, now: float) -> set[tuple[NetworkKey, int, int]]:
    return {(network, family, number) for (network, family), found in resting.at(now).items() for number in found}


def test_an_address_rests_for_its_time() -> None:
    resting = Cooldown(rest=60)
    resting.rest(BLUE, Address(4, 7), now=100)
    assert resting_at(resting, 159.9) == {(BLUE, 4, 7)}
    assert resting_at(resting, 160) == set()


def test_networks_and_families_are_apart() -> None:
    resting = Cooldown(rest=60)
    resting.rest(BLUE, Address(4, 7), now=0)
    resting.rest(BLUE, Address(6, 7), now=10)
    resting.rest(RED, Address(4, 7), now=20)
    assert resting_at(resting, 20) == {(BLUE, 4, 7), (BLUE, 6, 7), (RED, 4, 7)}
    assert resting_at(resting, 65) == {(BLUE, 6, 7), (RED, 4, 7)}


def test_an_address_that_is_released_again_rests_anew() -> None:
    resting = Cooldown(rest=60)
    resting.rest(BLUE, Address(4, 7), now=0)
    resting.rest(BLUE, Address(4, 7), now=30)
    assert resting_at(resting, 60) == {(BLUE, 4, 7)}
    assert resting_at(resting, 90) == set()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20)), max_size=40))
def test_what_rests_is_what_was_released_within_the_time(steps: list[tuple[int, float]]) -> None:
    """Against the obvious: the last release of a number decides."""
    resting = Cooldown(rest=10)
    last: dict[int, float] = {}
    now = 0.0
    for number, pause in steps:
        now += pause
        resting.rest(BLUE, Address(4, number), now=now)
        last[number] = now
        expected = {each for each, since in last.items() if since + 10 > now}
        assert {number for _, _, number in resting_at(resting, now)} == expected
    assert resting_at(resting, now + 10) == set()
