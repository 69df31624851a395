"""Policy lookup with packets: which entry decides, in both families and for every protocol."""

from __future__ import annotations

import pytest
from tests.support.modes import BOTH_MODES
from tests.support.policy_testbed import PolicyTestbed, policy_entry

from weft.domain.policy.model.protocols import ICMP, ICMPV6, SCTP, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import VERDICT_DENY

pytestmark = BOTH_MODES

ALLOW, DENY = 0x111, VERDICT_DENY | 0x222


PROTOCOLS = [
    *((family, protocol) for family in (4, 6) for protocol in (TCP, UDP, SCTP, 253)),
    (4, ICMP),
    (6, ICMPV6),
]


@pytest.mark.parametrize(("family", "protocol"), PROTOCOLS)
def test_without_rules_everything_passes(testbed: PolicyTestbed, family: int, protocol: int) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    assert testbed.probe(one, two, protocol, 80, family=family) == 0


# By identity pair or by local identity, protocol, ports: in the order of the lookup.
LEVELS: list[tuple[bool, int | None, tuple[int, int] | None]] = [
    (True, TCP, (80, 80)),
    (True, TCP, (70, 90)),
    (True, TCP, None),
    (True, None, None),
    (False, TCP, (80, 80)),
    (False, TCP, (70, 90)),
    (False, TCP, None),
    (False, None, None),
]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("family", [4, 6])
def test_the_most_specific_entry_wins(testbed: PolicyTestbed, direction: Direction, family: int) -> None:
    """Each entry decides until it is deleted, then the next one does."""
    one, two = testbed.pod(1), testbed.pod(2)
    local, remote = (one, two) if direction is Direction.EGRESS else (two, one)
    rows = [
        policy_entry(direction, local, remote if paired else None, VERDICT_DENY | level, protocol=protocol, ports=ports)
        for level, (paired, protocol, ports) in enumerate(LEVELS, start=1)
    ]
    testbed.put(*rows)
    for each in rows:
        assert testbed.probe(one, two, TCP, 80, family=family) == each.verdict_id
        assert testbed.probe(two, one, TCP, 80, family=family) == 0
        assert testbed.count(each.verdict_id) == 1
        testbed.drop(each)
    assert testbed.probe(one, two, TCP, 80, family=family) == 0


@pytest.mark.parametrize(("family", "protocol"), PROTOCOLS)
@pytest.mark.parametrize("paired", [True, False])
def test_each_protocol_matches_its_own_entry(testbed: PolicyTestbed, family: int, protocol: int, paired: bool) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    other = UDP if protocol == TCP else TCP
    remote = two if paired else None
    testbed.put(
        policy_entry(Direction.EGRESS, one, None, ALLOW),
        policy_entry(Direction.EGRESS, one, remote, DENY, protocol=protocol),
    )
    assert testbed.probe(one, two, protocol, 80, family=family) == DENY
    assert testbed.probe(one, two, other, 80, family=family) == 0


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP])
@pytest.mark.parametrize("paired", [True, False])
def test_ports_at_the_edges(testbed: PolicyTestbed, protocol: int, paired: bool) -> None:
    one, two = testbed.pod(1), testbed.pod(2)
    remote = one if paired else None
    testbed.put(
        policy_entry(Direction.INGRESS, two, None, ALLOW),
        policy_entry(Direction.INGRESS, two, remote, DENY, protocol=protocol, ports=(1000, 1999)),
        policy_entry(Direction.INGRESS, two, remote, DENY, protocol=protocol, ports=(3000, 3000)),
    )
    results = {
        port: testbed.probe(one, two, protocol, port) for port in (999, 1000, 1500, 1999, 2000, 2999, 3000, 3001)
    }
    assert {port for port, packet_result in results.items() if packet_result == DENY} == {1000, 1500, 1999, 3000}
    assert {port for port, packet_result in results.items() if packet_result == 0} == {999, 2000, 2999, 3001}


def test_egress_and_ingress_are_both_evaluated(testbed: PolicyTestbed) -> None:
    """A packet passes if egress of its source and ingress of its destination allow it; egress is evaluated first."""
    one, two = testbed.pod(1), testbed.pod(2)
    leave, arrive, stay, away = 0x11, 0x12, VERDICT_DENY | 0x13, VERDICT_DENY | 0x14
    for first, second, packet_result in (
        (leave, arrive, 0),
        (leave, away, away),
        (stay, arrive, stay),
        (stay, away, stay),
    ):
        rows = (policy_entry(Direction.EGRESS, one, None, first), policy_entry(Direction.INGRESS, two, one, second))
        guard = policy_entry(Direction.INGRESS, two, None, 0x15)
        testbed.put(*rows, guard)
        assert testbed.probe(one, two, UDP, 53) == packet_result
        testbed.drop(*rows, guard)
    assert (testbed.count(leave), testbed.count(stay)) == (2, 2)
    assert (testbed.count(arrive), testbed.count(away)) == (1, 1)
