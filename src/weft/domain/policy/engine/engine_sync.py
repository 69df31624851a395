"""Syncs the policy engine with the cluster state: which kinds verdicts depend on, and how each is applied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid
from weft.domain.host_access.view import host_addresses
from weft.domain.ids import GroupKey, NetworkKey, NodeName, StoreKey
from weft.domain.kinds import Kind
from weft.domain.policy.compile.contiv import PolicyKey, RuleKey
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.model.identities import Host, Namespace
from weft.domain.policy.model.netpol import PolicySpec
from weft.domain.store_keys import ObjectKey, parse_store_key

# Tenant kinds that verdicts depend on. Rules come before policies: a policy then compiles once, with all its rules.
TENANT_KINDS: tuple[Kind[Any], ...] = (kinds.NETWORK, kinds.GROUP, kinds.RULE, kinds.POLICY, kinds.ENDPOINT)

TENANT_PREFIXES = frozenset(kind.prefix for kind in TENANT_KINDS)

# Kinds outside any tenant that the verdicts of all tenants depend on.
SHARED_KINDS: tuple[Kind[Any], ...] = (kinds.NODE, kinds.KUBE_NAMESPACE, kinds.KUBE_POLICY)

SHARED_PREFIXES = frozenset(kind.prefix for kind in SHARED_KINDS)


def keys_to_sync(cluster: Cluster, kind: Kind[Any], *lead: str) -> Iterator[StoreKey]:
    """The keys of the objects of a kind whose keys start with these parts, and of unreadable ones."""
    for value in cluster.all(kind, *lead):
        yield kind.store_key(*kind.key_parts(value))
    yield from cluster.unreadable_objects(kind, *lead)


def sync_object(engine: Engine, cluster: Cluster, key: StoreKey) -> Affected:
    """Put the stored object into the engine, or remove it if it is gone.

    An unreadable one keeps its last good value. Without one it fails closed: nobody knows what it denied. `Invalid` if
    a readable object cannot be compiled.
    """
    parsed = parse_store_key(key)
    if not isinstance(parsed, ObjectKey):
        return Affected()
    if parsed.kind.prefix in SHARED_PREFIXES:
        return _sync_shared(engine, cluster, parsed)
    # A mirror passes every key of the store; verdicts do not depend on most of them.
    if parsed.kind.prefix not in TENANT_PREFIXES:
        return Affected()
    # The current state counts, not the event: several events for one key then have the same effect as the last.
    stored = cluster.get(parsed.kind, *parsed.parts)
    # Its identity would be that of an address which is another endpoint's (H3).
    if parsed.parts in cluster.uncovered and parsed.kind is kinds.ENDPOINT:
        stored = None
    affected = remove_object(engine, parsed) if stored is None else engine.put(stored.value)
    if document := governing(parsed):
        is_lost = stored is None and cluster.is_unreadable(parsed.kind, *parsed.parts)
        affected |= engine.set_unreadable(document, unreadable=is_lost)
    return affected


def governing(key: ObjectKey) -> PolicyKey | RuleKey | GroupKey | NetworkKey | None:
    """The document as the engine names it, if policy depends on it; None for an endpoint."""
    if key.kind is kinds.NETWORK:
        return key.network
    if key.kind is kinds.GROUP:
        return key.group
    if key.kind is kinds.POLICY:
        return key.policy
    return key.rule if key.kind is kinds.RULE else None


def remove_object(engine: Engine, key: ObjectKey) -> Affected:
    """Remove an object of a tenant kind from the engine."""
    if key.kind is kinds.NETWORK:
        return engine.remove_network(key.network)
    if key.kind is kinds.GROUP:
        return engine.remove_group(key.group)
    if key.kind is kinds.POLICY:
        return engine.remove_policy(key.policy)
    if key.kind is kinds.RULE:
        return engine.remove_rule(key.rule)
    return engine.remove_endpoint(key.endpoint)


def _sync_shared(engine: Engine, cluster: Cluster, key: ObjectKey) -> Affected:
    if key.kind is kinds.NODE:
        return _sync_host(engine, cluster, NodeName(key.parts[0]))
    if key.kind is kinds.KUBE_NAMESPACE:
        return _sync_namespace(engine, cluster, key.parts[0])
    return _sync_network_policy(engine, cluster, *key.parts)


def _sync_namespace(engine: Engine, cluster: Cluster, name: str) -> Affected:
    stored = cluster.get(kinds.KUBE_NAMESPACE, name)
    if stored is None:
        return engine.remove_namespace(name)
    return engine.put(Namespace(name=name, labels=stored.value.labels))


def _sync_network_policy(engine: Engine, cluster: Cluster, namespace: str, name: str) -> Affected:
    stored = cluster.get(kinds.KUBE_POLICY, namespace, name)
    if stored is None and cluster.is_unreadable(kinds.KUBE_POLICY, namespace, name):
        # Not even its selector is known: it isolates all pods of its namespace.
        isolated = PolicySpec(policy_types=("Ingress", "Egress"))
        return engine.put(KubePolicy(namespace=namespace, name=name, spec=isolated).policy)
    if stored is None:
        return engine.remove_network_policy(namespace, name)
    try:
        return engine.put(stored.value.policy)
    except Invalid:
        # Without the policy its pods would be open. netmaster reports its fault.
        return engine.fail_closed(stored.value.policy)


def _sync_host(engine: Engine, cluster: Cluster, name: NodeName) -> Affected:
    """Sync a node's host, identified by the source addresses of its traffic to workloads."""
    stored = cluster.get(kinds.NODE, name)
    if stored is None:
        return engine.remove_host(name)
    return engine.put(Host(node=name, addresses=tuple(map(str, host_addresses(stored.value)))))
