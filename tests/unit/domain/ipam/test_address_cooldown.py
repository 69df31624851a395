"""Released addresses cool down for a while before they are reused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address
from weft.domain.ids import NetworkKey, NetworkName, TenantName
from weft.domain.ipam.address_cooldown import Cooldown

BLUE = NetworkKey(TenantName("default"), NetworkName("blue"))
RED = NetworkKey(TenantName("default"), NetworkName("red"))


def cooling_at(cooldown: Cooldown, now: float) -> set[tuple[NetworkKey, int, int]]:
    return {(network, family, number) for (network, family), found in cooldown.active(now).items() for number in found}


def test_an_address_cools_down_for_the_given_time() -> None:
    cooldown = Cooldown(duration=60)
    cooldown.add(BLUE, Address(4, 7), now=100)
    assert cooling_at(cooldown, 159.9) == {(BLUE, 4, 7)}
    assert cooling_at(cooldown, 160) == set()


def test_networks_and_families_are_independent() -> None:
    cooldown = Cooldown(duration=60)
    cooldown.add(BLUE, Address(4, 7), now=0)
    cooldown.add(BLUE, Address(6, 7), now=10)
    cooldown.add(RED, Address(4, 7), now=20)
    assert cooling_at(cooldown, 20) == {(BLUE, 4, 7), (BLUE, 6, 7), (RED, 4, 7)}
    assert cooling_at(cooldown, 65) == {(BLUE, 6, 7), (RED, 4, 7)}


def test_a_second_release_restarts_the_cooldown() -> None:
    cooldown = Cooldown(duration=60)
    cooldown.add(BLUE, Address(4, 7), now=0)
    cooldown.add(BLUE, Address(4, 7), now=30)
    assert cooling_at(cooldown, 60) == {(BLUE, 4, 7)}
    assert cooling_at(cooldown, 90) == set()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20)), max_size=40))
def test_exactly_the_recently_released_addresses_cool_down(steps: list[tuple[int, float]]) -> None:
    """Against a simple model: the last release of an address counts."""
    cooldown = Cooldown(duration=10)
    last: dict[int, float] = {}
    now = 0.0
    for number, pause in steps:
        now += pause
        cooldown.add(BLUE, Address(4, number), now=now)
        last[number] = now
        expected = {each for each, since in last.items() if since + 10 > now}
        assert {number for _, _, number in cooling_at(cooldown, now)} == expected
    assert cooling_at(cooldown, now + 10) == set()
