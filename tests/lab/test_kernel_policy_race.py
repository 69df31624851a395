"""Policy changes while packets are evaluated: no packet sees half of a transaction."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tests.support.flood import Flood, FloodDatagram, Tap
from tests.support.policy_testbed import TENANT, Pod, PolicyTestbed, counters_of, policy_entry

from weft.domain.addresses import Range
from weft.domain.desired.diff import Difference
from weft.domain.policy.model.protocols import UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, WORKLOAD, CidrIdentity, PolicyEntry, PolicyItem
from weft.lab.waiting import until

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222
CHANGES, RANGE_CHANGES = 6000, 4000
OPEN, SHUT = 7000, 5000


def policy(pod: Pod, friend: Pod, number: int) -> tuple[PolicyItem, ...]:
    """The pod with an identity; another pod may connect to one port."""
    renumbered = pod._replace(number=WORKLOAD | number)
    return (
        *renumbered.ip_identities(),
        policy_entry(Direction.INGRESS, renumbered, None, DENY),
        policy_entry(Direction.INGRESS, renumbered, friend, ALLOW, protocol=UDP, ports=(OPEN, OPEN)),
    )


async def test_a_new_identity_is_never_without_its_rules(testbed: PolicyTestbed) -> None:
    """Identity and entries change together: a packet with the old identity must not see that it has no entries."""
    one, two = testbed.pod(1), testbed.pod(2)
    now, then = policy(two, one, 100), policy(two, one, 200)
    testbed.datapath.apply(Difference((*counters_of(now), *now), two.ip_identities()))
    await nothing_passes(testbed, one, two, now, then, changes=CHANGES)
    assert testbed.probe(one, two, UDP, OPEN) == 0


async def test_a_range_changes_with_the_rest_of_the_transaction(testbed: PolicyTestbed) -> None:
    """It moves from an allowed to a denied identity: a packet with the old range must not see the new entries."""
    one, two = testbed.pod(1, ready=False), testbed.pod(2)
    now, then = turned(one, shut=5, open_=6), turned(one, shut=6, open_=5)
    testbed.put(*now, *counters_of(then))
    await nothing_passes(testbed, one, two, now, then, changes=RANGE_CHANGES)


async def test_a_range_of_ports_is_replaced_by_another(testbed: PolicyTestbed) -> None:
    """A port that both ranges deny is never allowed."""
    one, two = testbed.pod(1), testbed.pod(2)
    testbed.put(policy_entry(Direction.INGRESS, two, None, ALLOW))
    now, then = (
        (policy_entry(Direction.INGRESS, two, None, DENY, protocol=UDP, ports=ports),)
        for ports in ((SHUT - 700, SHUT + 30), (SHUT - 20, SHUT + 900))
    )
    testbed.put(*now)
    await nothing_passes(testbed, one, two, now, then, changes=RANGE_CHANGES)


def turned(pod: Pod, *, shut: int, open_: int) -> tuple[PolicyItem, ...]:
    """A range that contains the pod has a denied identity; another identity is allowed."""
    address = pod.address(4)
    span = Range(4, address.number - 1, address.number + 6)
    return (
        CidrIdentity(TENANT, span, WORKLOAD | shut),
        PolicyEntry(TENANT, Direction.EGRESS, WORKLOAD | shut, None, DENY),
        PolicyEntry(TENANT, Direction.EGRESS, WORKLOAD | open_, None, ALLOW),
    )


async def nothing_passes(
    testbed: PolicyTestbed,
    one: Pod,
    two: Pod,
    now: tuple[PolicyItem, ...],
    then: tuple[PolicyItem, ...],
    *,
    changes: int,
) -> None:
    """Alternate between two states under a flood to a closed port."""
    with ExitStack() as stack:
        tap = stack.enter_context(Tap(two.namespace))
        senders = [stack.enter_context(one.open_socket(4, 2)) for _ in range(4)]
        flood = stack.enter_context(Flood())
        flood.datagrams = tuple(FloodDatagram(sender, str(two.address(4)), SHUT) for sender in senders * 8)
        for _ in range(changes):
            testbed.datapath.apply(Difference(then, now))
            now, then = then, now
        rounds = flood.rounds
        await until(lambda: flood.rounds > rounds + 1)
        assert [packet for packet in tap.packets() if packet.target_port == SHUT] == []
    assert testbed.count(DENY) > changes


@pytest.mark.parametrize("family", [4, 6])
def test_a_port_without_endpoint_cannot_send(testbed: PolicyTestbed, family: int) -> None:
    """For example a packet in flight when its pod is detached."""
    not_ready, one = testbed.pod(1, ready=False), testbed.pod(2)
    assert testbed.probe(not_ready, one, UDP, OPEN, family=family) == "weft/endpoint-not-ready"
