"""A decision holds only if what it saw is still so."""

from __future__ import annotations

import pytest
from tests.support.fake_cluster import FakeCluster, network, service

from weft.domain import codec, kinds, model
from weft.domain.errors import Invalid
from weft.domain.ids import TenantName
from weft.domain.store_types import NEVER, PrefixUnchangedSince, Put, RevisionEquals
from weft.domain.transaction import Transaction, holder_of, put, put_claim


def test_what_was_looked_at_is_compared() -> None:
    world = FakeCluster()
    reading = world.reading()
    assert reading.get(kinds.TENANT, "default") is not None
    assert reading.get(kinds.TENANT, "none") is None
    assert list(reading.all(kinds.NETWORK, "default")) == []
    plan = reading.plan([put(kinds.TENANT, model.Tenant(name=TenantName("t1")))])
    assert set(plan.compares) == {
        RevisionEquals(kinds.TENANT.store_key("default"), world.revision),
        RevisionEquals(kinds.TENANT.store_key("none"), NEVER),
        PrefixUnchangedSince(kinds.NETWORK.store_prefix("default"), world.revision),
    }


def test_a_reference_must_exist() -> None:
    reading = FakeCluster().reading()
    assert reading.require(kinds.TENANT, "default", field="tenantName").name == "default"
    with pytest.raises(Invalid, match="'none' does not exist") as caught:
        reading.require(kinds.TENANT, "none", field="tenantName")
    assert caught.value.field == "tenantName"


def test_looking_twice_compares_once() -> None:
    world = FakeCluster()
    reading = world.reading()
    for _ in range(2):
        reading.get(kinds.TENANT, "default")
    assert len(reading.plan([]).compares) == 1


def test_holders_are_named_by_kind_and_key() -> None:
    assert holder_of(kinds.NETWORK, network()) == "network:default:blue"
    assert holder_of(kinds.SERVICE, service()) == "serviceLB:default:s"
    claim = put_claim(kinds.TENANT.store_key("x"), "network:default:blue")
    assert isinstance(claim, Put)
    assert codec.decode(model.Claim, claim.value).holder == "network:default:blue"


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert Transaction() == Transaction((), ())


def test_what_is_written_again_keeps_the_members_of_a_newer_weft() -> None:
    """Until the object goes: one that is created again under its key has no unknown members."""
    world = FakeCluster()
    key = kinds.TENANT.store_key("default")
    newer = codec.with_unknown(codec.encode(model.Tenant(name=TenantName("default"))), {"colour": "red"})
    world.cluster.put(key, newer, world.revision + 1)
    assert world.cluster.faults == {}
    ours = put(kinds.TENANT, model.Tenant(name=TenantName("default"), default_network="n"))
    (written,) = world.reading().plan([ours]).writes
    assert isinstance(written, Put)
    assert codec.read(model.Tenant, written.value).unknown == {"colour": "red"}
    world.cluster.drop(key)
    assert world.reading().plan([ours]).writes == (ours,)
