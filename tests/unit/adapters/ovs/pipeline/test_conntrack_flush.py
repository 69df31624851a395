"""Which conntrack entries are flushed, and when."""

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
REMOTE, PORT = RemoteMac(BLUE, 7, "192.0.2.2", MAC, (A,)), Port(BLUE, "wp1", MAC, (A,))


@pytest.mark.parametrize("item", [Vip(BLUE, A), Gateway(BLUE, A)])
def test_policy_exempt_addresses_are_flushed_at_once(item: StateItem) -> None:
    assert StaleConntrack().update(drop=[item], put=[]) == {(BLUE, A)}
    assert StaleConntrack().update(drop=[item], put=[item]) == set()


@pytest.mark.parametrize("removed", [ONE, REMOTE])
@pytest.mark.parametrize("added", [OTHER, REMOTE, PORT, Vip(BLUE, A)])
def test_endpoint_addresses_are_flushed_on_reuse(removed: StateItem, added: StateItem) -> None:
    stale = StaleConntrack()
    assert stale.update(drop=[removed], put=[]) == set()
    assert stale.update(drop=[], put=[IpIdentity(RED, A, 1), IpIdentity(BLUE, Address(4, A.number + 1), 1)]) == set()
    assert stale.update(drop=[], put=[added]) == {(BLUE, A)}
    assert stale.update(drop=[], put=[added]) == {(BLUE, A)}  # until it is flushed
    stale.mark_flushed({(BLUE, A)})
    assert stale.update(drop=[], put=[added]) == set()


def test_an_identity_change_keeps_connections() -> None:
    stale = StaleConntrack()
    assert stale.update(drop=[ONE], put=[OTHER]) == set()
    assert stale.update(drop=[], put=[REMOTE]) == set()


def test_deleted_tenants_are_forgotten() -> None:
    stale = StaleConntrack()
    stale.update(drop=[ONE], put=[])
    stale.forget_tenants({BLUE})
    assert stale.update(drop=[], put=[OTHER]) == set()
