"""Policy in packets: which row decides, in both families and for every kind of protocol."""

from __future__ import annotations

import pytest
from tests.support.modes import BOTH_MODES
from tests.support.policy_testbed import PolicyTestbed, row

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
def test_without_rules_everything_passes(ward: PolicyTestbed, family: int, protocol: int) -> None:
    one, two = ward.pod(1), ward.pod(2)
    assert ward.ask(one, two, protocol, 80, family=family) == 0


# Of a pair or of anyone, protocol, ports: in the order in which they are asked.
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
def test_rows_are_asked_in_their_order(ward: PolicyTestbed, direction: Direction, family: int) -> None:
    """Each decides as long as it is there, and the next one when it is gone."""
    one, two = ward.pod(1), ward.pod(2)
    local, remote = (one, two) if direction is Direction.EGRESS else (two, one)
    rows = [
        row(direction, local, remote if paired else None, VERDICT_DENY | level, protocol=protocol, ports=ports)
        for level, (paired, protocol, ports) in enumerate(LEVELS, start=1)
    ]
    ward.put(*rows)
    for each in rows:
        assert ward.ask(one, two, TCP, 80, family=family) == each.outcome
        assert ward.ask(two, one, TCP, 80, family=family) == 0
        assert ward.count(each.outcome) == 1
        ward.drop(each)
    assert ward.ask(one, two, TCP, 80, family=family) == 0


@pytest.mark.parametrize(("family", "protocol"), PROTOCOLS)
@pytest.mark.parametrize("paired", [True, False])
def test_each_protocol_meets_its_own_row(ward: PolicyTestbed, family: int, protocol: int, paired: bool) -> None:
    one, two = ward.pod(1), ward.pod(2)
    other = UDP if protocol == TCP else TCP
    remote = two if paired else None
    ward.put(
        row(Direction.EGRESS, one, None, ALLOW),
        row(Direction.EGRESS, one, remote, DENY, protocol=protocol),
    )
    assert ward.ask(one, two, protocol, 80, family=family) == DENY
    assert ward.ask(one, two, other, 80, family=family) == 0


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP])
@pytest.mark.parametrize("paired", [True, False])
def test_ports_at_the_edges(ward: PolicyTestbed, protocol: int, paired: bool) -> None:
    one, two = ward.pod(1), ward.pod(2)
    remote = one if paired else None
    ward.put(
        row(Direction.INGRESS, two, None, ALLOW),
        row(Direction.INGRESS, two, remote, DENY, protocol=protocol, ports=(1000, 1999)),
        row(Direction.INGRESS, two, remote, DENY, protocol=protocol, ports=(3000, 3000)),
    )
    fates = {port: ward.ask(one, two, protocol, port) for port in (999, 1000, 1500, 1999, 2000, 2999, 3000, 3001)}
    assert {port for port, fate in fates.items() if fate == DENY} == {1000, 1500, 1999, 3000}
    assert {port for port, fate in fates.items() if fate == 0} == {999, 2000, 2999, 3001}


def test_both_ends_have_a_say(ward: PolicyTestbed) -> None:
    """A packet passes when its source may say it and its target may hear it; the source is asked first."""
    one, two = ward.pod(1), ward.pod(2)
    leave, arrive, stay, away = 0x11, 0x12, VERDICT_DENY | 0x13, VERDICT_DENY | 0x14
    for first, second, fate in (
        (leave, arrive, 0),
        (leave, away, away),
        (stay, arrive, stay),
        (stay, away, stay),
    ):
        rows = (row(Direction.EGRESS, one, None, first), row(Direction.INGRESS, two, one, second))
        guard = row(Direction.INGRESS, two, None, 0x15)
        ward.put(*rows, guard)
        assert ward.ask(one, two, UDP, 53) == fate
        ward.drop(*rows, guard)
    assert (ward.count(leave), ward.count(stay)) == (2, 2)
    assert (ward.count(arrive), ward.count(away)) == (1, 1)
