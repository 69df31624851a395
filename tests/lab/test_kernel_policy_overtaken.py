"""Policy that changes while packets are being judged: none of them meets a half of the change."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from weft.domain.diff import Difference
from weft.domain.policy.parts import REFUSES, WORKLOAD, PolicyPart
from weft.domain.policy.protocols import UDP
from weft.domain.policy.rules import Direction
from weft.testing.floods import Flood, Shot, Tap
from weft.testing.judged import Pod, Ward, row, tallies_of
from weft.testing.waiting import until

ALLOW, DENY = 0x111, REFUSES | 0x222
CHANGES = 6000
OPEN, SHUT = 7000, 5000


def policy(pod: Pod, friend: Pod, number: int) -> tuple[PolicyPart, ...]:
    """The pod under a number; a friend may speak to it on one port."""
    renumbered = pod._replace(number=WORKLOAD | number)
    return (
        *renumbered.who(),
        row(Direction.INGRESS, renumbered, None, DENY),
        row(Direction.INGRESS, renumbered, friend, ALLOW, protocol=UDP, ports=(OPEN, OPEN)),
    )


async def test_a_pod_under_a_new_number_is_never_without_its_rules(ward: Ward) -> None:
    """The number and its rows go together; who has seen the old number must not find that it has no rows."""
    one, two = ward.pod(1), ward.pod(2)
    now, then = policy(two, one, 100), policy(two, one, 200)
    ward.datapath.apply(Difference((*tallies_of(now), *now), two.who()))
    with ExitStack() as stack:
        tap = stack.enter_context(Tap(two.namespace))
        mouths = [stack.enter_context(one.open_socket(4, 2)) for _ in range(4)]
        flood = stack.enter_context(Flood())
        flood.shots = tuple(Shot(mouth, str(two.address(4)), SHUT) for mouth in mouths * 8)
        for _ in range(CHANGES):
            ward.datapath.apply(Difference(then, now))
            now, then = then, now
        waves = flood.waves
        await until(lambda: flood.waves > waves + 1)
        assert [packet for packet in tap.seen() if packet.target_port == SHUT] == []
    assert ward.count(DENY) > CHANGES
    assert ward.ask(one, two, UDP, OPEN) == 0


@pytest.mark.parametrize("family", [4, 6])
def test_what_comes_from_a_port_that_is_nobodys_goes_nowhere(ward: Ward, family: int) -> None:
    """Such as a packet that had left its pod just before the pod was taken off."""
    nobody, one = ward.pod(1, ready=False), ward.pod(2)
    assert ward.ask(nobody, one, UDP, OPEN, family=family) == "weft/not-ready"
