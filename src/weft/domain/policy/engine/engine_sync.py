"""Keeps an engine in step with the cluster: which kinds of objects verdicts follow from, and how each is told."""

from __future__ import annotations

from typing import Any

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.host_access.view import host_addresses
from weft.domain.ids import EndpointKey, GroupKey, NetworkKey, NodeName, StoreKey
from weft.domain.kinds import Kind
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.model.identities import Host, Namespace

# Kinds of tenants' objects that verdicts follow from, in the order that costs least: rules before their policies.
CONCERNED: tuple[Kind[Any], ...] = (kinds.NETWORK, kinds.GROUP, kinds.RULE, kinds.POLICY, kinds.ENDPOINT)

CONCERNED_FOLDERS = frozenset(kind.prefix for kind in CONCERNED)

# Kinds of objects that belong to no tenant, and concern the verdicts of all of them.
SHARED: tuple[Kind[Any], ...] = (kinds.NODE, kinds.KUBE_NAMESPACE, kinds.KUBE_POLICY)

SHARED_FOLDERS = frozenset(kind.prefix for kind in SHARED)


def follow(engine: Engine, cluster: Cluster, key: StoreKey) -> Affected:
    """Bring one object of the cluster into the engine, or out of it; `Invalid` when the engine cannot read it."""
    folder, *parts = key.split("/")
    if folder == kinds.NODE.prefix:
        return _follow_host(engine, cluster, NodeName(parts[0]))
    if folder == kinds.KUBE_NAMESPACE.prefix:
        return _follow_namespace(engine, cluster, parts[0])
    if folder == kinds.KUBE_POLICY.prefix:
        return _follow_network_policy(engine, cluster, *parts)
    kind = next((each for each in CONCERNED if each.prefix == folder), None)
    if kind is None:
        return Affected()
    stored = cluster.get(kind, *parts)
    if stored is not None:
        return engine.put(stored.value)
    if kind is kinds.NETWORK:
        return engine.remove_network(NetworkKey(*parts))  # type: ignore[arg-type]
    if kind is kinds.GROUP:
        return engine.remove_group(GroupKey(*parts))  # type: ignore[arg-type]
    if kind is kinds.POLICY:
        return engine.remove_policy(tuple(parts))  # type: ignore[arg-type]
    if kind is kinds.RULE:
        return engine.remove_rule(tuple(parts))  # type: ignore[arg-type]
    return engine.remove_endpoint(EndpointKey(*parts))  # type: ignore[arg-type]


def _follow_namespace(engine: Engine, cluster: Cluster, name: str) -> Affected:
    stored = cluster.get(kinds.KUBE_NAMESPACE, name)
    if stored is None:
        return engine.remove_namespace(name)
    return engine.put(Namespace(name=name, labels=stored.value.labels))


def _follow_network_policy(engine: Engine, cluster: Cluster, namespace: str, name: str) -> Affected:
    stored = cluster.get(kinds.KUBE_POLICY, namespace, name)
    if stored is None:
        return engine.remove_network_policy(namespace, name)
    return engine.put(stored.value.policy)


def _follow_host(engine: Engine, cluster: Cluster, name: NodeName) -> Affected:
    """A node's host, by the addresses as which it speaks to workloads."""
    stored = cluster.get(kinds.NODE, name)
    if stored is None:
        return engine.remove_host(name)
    return engine.put(Host(node=name, addresses=tuple(map(str, host_addresses(stored.value)))))
