"""Policies and rules: what they refer to, and that rules go with their policy (O13, O14, W4)."""

from __future__ import annotations

import pytest
from tests.support.fake_cluster import FakeCluster, group, network, policy, rule

from weft.domain import kinds
from weft.domain.errors import Conflict, Invalid, NotFound
from weft.domain.ids import TenantName


@pytest.fixture
def world() -> FakeCluster:
    world = FakeCluster()
    for value in (network(), policy(), group(), group("db", policies=("p",))):
        world.put(value)
    return world


def test_w4_the_rules_of_a_policy_go_in_the_same_commit(world: FakeCluster) -> None:
    """The original left orphans, and a policy in use for ever."""
    for number in ("1", "2"):
        world.put(rule(number))
    world.put(policy("other"))
    kept = world.put(rule("1", policy="other"))
    with world.refuses(Conflict):
        world.delete(policy())
    world.put(group("db"))
    revision = world.revision
    world.delete(policy())
    assert world.revision == revision + 1
    assert list(world.cluster.all(kinds.RULE)) == [kept]


def test_a_rule_never_changes(world: FakeCluster) -> None:
    stored = world.put(rule(protocol="tcp", port=80))
    assert world.put(rule(protocol="tcp", port=80)) == stored
    with world.refuses(Conflict, field="ruleId"):
        world.put(rule(protocol="tcp", port=81))
    world.delete(stored)
    with world.refuses(NotFound):
        world.delete(stored)


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"tenant": TenantName("none")}, "tenantName"),
        ({"policy": "none"}, "policyName"),
        ({"from_endpoint_group": "none"}, "fromEndpointGroup"),
        ({"from_network": "none"}, "fromNetwork"),
        ({"direction": "out", "to_endpoint_group": "none"}, "toEndpointGroup"),
        ({"direction": "out", "to_network": "none"}, "toNetwork"),
    ],
)
def test_references_must_exist(world: FakeCluster, members: dict[str, object], field: str) -> None:
    with world.refuses(Invalid, field=field):
        world.put(rule(**members))


@pytest.mark.parametrize("reach", ["10.1.1.1", "10.1.1.0/24", "10.1.1.1-9"])
def test_an_own_address_is_one_of_the_one_group(world: FakeCluster, reach: str) -> None:
    with world.refuses(Invalid, field="toIpAddress"):
        world.put(rule(to_ip_address=reach))
    world.attach("e1", group="db")
    world.put(rule(to_ip_address=reach))
    with world.refuses(Invalid, field="toIpAddress"):
        world.put(rule("2", to_ip_address="10.1.2.0/24"))
    world.put(group(policies=("p",)))
    with world.refuses(Invalid, field="toIpAddress"):
        world.put(rule("2", to_ip_address=reach))


def test_a_policy_changes_between_dry_and_real(world: FakeCluster) -> None:
    assert world.put(policy(mode="audit")).audit
    assert not world.put(policy()).audit
