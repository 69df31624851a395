"""Policy that changes while packets are being judged: none of them meets a half of the change."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.support.flood import Flood, Shot, Tap
from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, row, tallies_of

from weft.domain.addresses import Range
from weft.domain.desired.diff import Difference
from weft.domain.policy.model.protocols import UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, WORKLOAD, CidrIdentity, PolicyEntry, PolicyPart
from weft.lab.waiting import until

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
CHANGES, RANGE_CHANGES = 6000, 4000
OPEN, SHUT = 7000, 5000


def policy(pod: Pod, friend: Pod, number: int) -> tuple[PolicyPart, ...]:
    """The pod under a number; a friend may speak to it on one port."""
    renumbered = pod._replace(number=WORKLOAD | number)
    return (
        *renumbered.who(),
        row(Direction.INGRESS, renumbered, None, DENY),
        row(Direction.INGRESS, renumbered, friend, ALLOW, protocol=UDP, ports=(OPEN, OPEN)),
    )


async def test_a_pod_under_a_new_number_is_never_without_its_rules(ward: PolicyTestbed) -> None:
    """The number and its rows go together; who has seen the old number must not find that it has no rows."""
    one, two = ward.pod(1), ward.pod(2)
    now, then = policy(two, one, 100), policy(two, one, 200)
    ward.datapath.apply(Difference((*tallies_of(now), *now), two.who()))
    await nothing_passes(ward, one, two, now, then, changes=CHANGES)
    assert ward.ask(one, two, UDP, OPEN) == 0


async def test_a_range_goes_with_all_else(ward: PolicyTestbed) -> None:
    """It leaves a number that opens for one that closes: who has met the old range must not meet the new rows."""
    one, two = ward.pod(1, ready=False), ward.pod(2)
    now, then = turned(one, shut=5, open_=6), turned(one, shut=6, open_=5)
    ward.put(*now, *tallies_of(then))
    await nothing_passes(ward, one, two, now, then, changes=RANGE_CHANGES)


async def test_a_range_of_ports_is_replaced_by_another(ward: PolicyTestbed) -> None:
    """What both of them shut is never open."""
    one, two = ward.pod(1), ward.pod(2)
    ward.put(row(Direction.INGRESS, two, None, ALLOW))
    now, then = (
        (row(Direction.INGRESS, two, None, DENY, protocol=UDP, ports=ports),)
        for ports in ((SHUT - 700, SHUT + 30), (SHUT - 20, SHUT + 900))
    )
    ward.put(*now)
    await nothing_passes(ward, one, two, now, then, changes=RANGE_CHANGES)


def turned(pod: Pod, *, shut: int, open_: int) -> tuple[PolicyPart, ...]:
    """A range with the pod in it has a number that may say nothing; another number may say everything."""
    address = pod.address(4)
    span = Range(4, address.number - 1, address.number + 6)
    return (
        CidrIdentity(TENANT, span, WORKLOAD | shut),
        PolicyEntry(TENANT, Direction.EGRESS, WORKLOAD | shut, None, DENY),
        PolicyEntry(TENANT, Direction.EGRESS, WORKLOAD | open_, None, ALLOW),
    )


async def nothing_passes(
    ward: PolicyTestbed, one: Pod, two: Pod, now: tuple[PolicyPart, ...], then: tuple[PolicyPart, ...], *, changes: int
) -> None:
    """Under a flood to a shut port, from one state to the other and back."""
    with ExitStack() as stack:
        tap = stack.enter_context(Tap(two.namespace))
        mouths = [stack.enter_context(one.open_socket(4, 2)) for _ in range(4)]
        flood = stack.enter_context(Flood())
        flood.shots = tuple(Shot(mouth, str(two.address(4)), SHUT) for mouth in mouths * 8)
        for _ in range(changes):
            ward.datapath.apply(Difference(then, now))
            now, then = then, now
        waves = flood.waves
        await until(lambda: flood.waves > waves + 1)
        assert [packet for packet in tap.seen() if packet.target_port == SHUT] == []
    assert ward.count(DENY) > changes


@pytest.mark.parametrize("family", [4, 6])
def test_what_comes_from_a_port_that_is_nobodys_goes_nowhere(ward: PolicyTestbed, family: int) -> None:
    """Such as a packet that had left its pod just before the pod was taken off."""
    nobody, one = ward.pod(1, ready=False), ward.pod(2)
    assert ward.ask(nobody, one, UDP, OPEN, family=family) == "weft/not-ready"
