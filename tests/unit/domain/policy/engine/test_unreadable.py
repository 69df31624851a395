"""A policy, rule, group or network that cannot be read never opens traffic (finding H2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.fake_cluster import DEFAULT, group, network, policy, rule

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.ids import EndpointId, NetworkName
from weft.domain.ipam import ipam
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import SHARED_KINDS, TENANT_KINDS, keys_to_sync, sync_object
from weft.domain.policy.explain.diff import diff
from weft.domain.policy.explain.opening import engines_of
from weft.domain.policy.model.netpol import PolicySpec
from weft.domain.store_types import Change, Entry, Event, Listing, Put, Write
from weft.domain.transaction import ReadSet, holder_of, put_claim

WEB, OTHER, POD = "default:blue:web", "default:blue:other", "default:blue:pod"


def workload(name: str, address: str, *, of: str = "", pod: model.PodIdentity | None = None) -> model.Endpoint:
    return model.Endpoint(
        tenant=DEFAULT, network=NetworkName("blue"), endpoint_id=EndpointId(name), group=of, ip_address=address, pod=pod
    )


def objects() -> list[tuple[Kind[Any], model.Value]]:
    """The group `web` may not be reached from network `blue`; namespace `shop` has a policy that allows everything."""
    spec = PolicySpec(policy_types=("Ingress",), ingress=())
    return [
        (kinds.NETWORK, network()),
        (kinds.GROUP, group(policies=("p",))),
        (kinds.POLICY, policy()),
        (kinds.RULE, rule("1", direction="in", action="deny", from_network="blue")),
        (kinds.KUBE_NAMESPACE, KubeNamespace(name="shop")),
        (kinds.KUBE_POLICY, KubePolicy(namespace="shop", name="np", spec=spec)),
        (kinds.ENDPOINT, workload("web", "10.1.1.5", of="web")),
        (kinds.ENDPOINT, workload("other", "10.1.1.6")),
        (kinds.ENDPOINT, workload("pod", "10.1.1.7", pod=model.PodIdentity(namespace="shop", name="pod"))),
    ]


def key(kind: Kind[Any], value: model.Value) -> Any:
    return kind.store_key(*kind.key_parts(value))


def entries() -> list[Entry]:
    endpoints = [value for _, value in objects() if isinstance(value, model.Endpoint)]
    # Without a claim of its address an endpoint is ignored.
    claims = [
        Entry(put.key, put.value, 1)
        for each in endpoints
        for put in (put_claim(ipam.claim_key(network(), *each.addresses), holder_of(kinds.ENDPOINT, each)),)
    ]
    return [*claims, *(Entry(key(kind, value), codec.encode(value), 1) for kind, value in objects())]


def engine_of(cluster: Cluster) -> Engine:
    engine = Engine()
    for kind in (*SHARED_KINDS, *TENANT_KINDS):
        for each in keys_to_sync(cluster, kind):
            sync_object(engine, cluster, each)
    return engine


def allowed(engine: Engine, target: str, source: str = OTHER) -> bool:
    return engine.verdict(engine.directory.flow(source, target, protocol=6, port=80)).allowed


GOVERNING = [(kind, value) for kind, value in objects() if kind not in (kinds.ENDPOINT, kinds.KUBE_NAMESPACE)]


@pytest.mark.parametrize(("kind", "value"), GOVERNING, ids=lambda each: getattr(each, "name", ""))
def test_H2_at_start_what_an_unreadable_document_governs_is_closed(kind: Kind[Any], value: model.Value) -> None:
    bad = key(kind, value)
    target = POD if kind is kinds.KUBE_POLICY else WEB
    cluster = Cluster()
    cluster.replace(Listing(tuple(Entry(e.key, b"garbage", 1) if e.key == bad else e for e in entries()), 1))
    engine = engine_of(cluster)
    assert not allowed(engine, target)
    assert not allowed(engine, OTHER, source=target) or kind is kinds.NETWORK
    # Others are not concerned.
    assert allowed(engine, "192.0.2.1")
    # A good document opens again exactly what it allows, and so does its deletion.
    cluster.apply(Change(2, (Event(bad, codec.encode(value)),)))
    sync_object(engine, cluster, bad)
    good = Cluster()
    good.replace(Listing(tuple(entries()), 1))
    assert engine.policies == engine_of(good).policies
    cluster.apply(Change(3, (Event(bad, b"garbage"),)))
    cluster.apply(Change(4, (Event(bad, None),)))
    sync_object(engine, cluster, bad)
    good.apply(Change(2, (Event(bad, None),)))
    assert engine.policies == engine_of(good).policies


@pytest.mark.parametrize(("kind", "value"), GOVERNING, ids=lambda each: getattr(each, "name", ""))
def test_H2_while_running_the_last_good_document_goes_on_deciding(kind: Kind[Any], value: model.Value) -> None:
    cluster = Cluster()
    cluster.replace(Listing(tuple(entries()), 1))
    engine = engine_of(cluster)
    before = dict(engine.policies)
    cluster.apply(Change(2, (Event(key(kind, value), b"garbage"),)))
    sync_object(engine, cluster, key(kind, value))
    assert engine.policies == before
    assert not allowed(engine, WEB)


@pytest.mark.parametrize("kind", [kinds.POLICY, kinds.RULE, kinds.GROUP], ids=lambda kind: kind.name)
@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "replaced"])
def test_UX1_a_write_over_garbage_says_what_it_opens(kind: Kind[Any], *, is_deleted: bool) -> None:
    """The garbage denies everything; whoever replaces or deletes it has to be told that it does so no longer."""
    value = next(value for each, value in objects() if each is kind)
    cluster = Cluster()
    cluster.replace(Listing(tuple(Entry(e.key, b"x", 1) if e.key == key(kind, value) else e for e in entries()), 1))
    writes: Sequence[Write] = [Put(key(kind, value), codec.encode(value))]
    if is_deleted:
        writes = changes.plan_delete(ReadSet(cluster, 1), kind, *kind.key_parts(value)).writes
    before, after = engines_of(engine_of(cluster), cluster, writes, tenant=DEFAULT)
    assert not allowed(before, WEB, source="198.51.100.7")
    assert allowed(after, WEB, source="198.51.100.7")
    assert any(change.allowed for change in diff(before, after))
