"""Whose connections are to be forgotten, and when."""

from __future__ import annotations

import pytest

from weft.adapters.ovs.pipeline.conntrack_flush import StaleConntrack
from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Port, StateItem
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Vip
from weft.domain.policy.policymap.policy_state import WORKLOAD, IpIdentity

BLUE, RED = TenantName("blue"), TenantName("red")
A = Address(4, 0x0A010001)
MAC = "02:02:0a:01:00:01"
ONE, OTHER = IpIdentity(BLUE, A, WORKLOAD | 1), IpIdentity(BLUE, A, WORKLOAD | 2)
STATION, PORT = RemoteMac(BLUE, 7, "192.0.2.2", MAC, (A,)), Port(BLUE, "wp1", MAC, (A,))


@pytest.mark.parametrize("part", [Vip(BLUE, A), Gateway(BLUE, A)])
def test_what_nobody_judges_is_forgotten_with_its_address(part: StateItem) -> None:
    assert StaleConntrack().change(drop=[part], put=[]) == {(BLUE, A)}
    assert StaleConntrack().change(drop=[part], put=[part]) == set()


@pytest.mark.parametrize("gone", [ONE, STATION])
@pytest.mark.parametrize("come", [OTHER, STATION, PORT, Vip(BLUE, A)])
def test_a_workload_that_has_left_is_forgotten_when_somebody_comes(gone: StateItem, come: StateItem) -> None:
    leavers = StaleConntrack()
    assert leavers.change(drop=[gone], put=[]) == set()
    assert leavers.change(drop=[], put=[IpIdentity(RED, A, 1), IpIdentity(BLUE, Address(4, A.number + 1), 1)]) == set()
    assert leavers.change(drop=[], put=[come]) == {(BLUE, A)}
    assert leavers.change(drop=[], put=[come]) == {(BLUE, A)}  # it was not done yet
    leavers.settle({(BLUE, A)})
    assert leavers.change(drop=[], put=[come]) == set()


def test_who_only_gets_another_number_keeps_its_connections() -> None:
    leavers = StaleConntrack()
    assert leavers.change(drop=[ONE], put=[OTHER]) == set()
    assert leavers.change(drop=[], put=[STATION]) == set()


def test_of_tenants_that_are_gone_nothing_is_left() -> None:
    leavers = StaleConntrack()
    leavers.change(drop=[ONE], put=[])
    leavers.forget({BLUE})
    assert leavers.change(drop=[], put=[OTHER]) == set()
