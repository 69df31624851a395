"""Plans of changes: what may be created, changed and deleted, and the writes for it; one module per kind (contiv 2.3).

`plan_put` creates or changes an object, `plan_delete` deletes it. Both read the cluster through a `ReadSet`, so that
their commit succeeds only if what they read is unchanged. A request for the present state is a plan without writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from weft.domain import kinds, model
from weft.domain.errors import NotFound
from weft.domain.kinds import Kind
from weft.domain.lifecycle.changes import globals as global_changes
from weft.domain.lifecycle.changes import groups, networks, policies, profiles, services, tenants
from weft.domain.store_types import Delete, Write
from weft.domain.transaction import ReadSet, Transaction, put
from weft.domain.validation import check

T = TypeVar("T", bound=model.Value)

# (reading, desired, present) -> writes. Handlers take objects of their own kind, which a common table cannot express.
Put = Callable[[ReadSet, Any, Any], list[Write]]
Remove = Callable[[ReadSet, Any], list[Write]]


def _put_bgp(_: ReadSet, wanted: model.BgpPeer, present: model.BgpPeer | None) -> list[Write]:
    return [] if wanted == present else [put(kinds.BGP, wanted)]


def _delete_bgp(_: ReadSet, present: model.BgpPeer) -> list[Write]:
    return [Delete(kinds.BGP.store_key(present.hostname))]


_PUT: dict[str, Put] = {
    kinds.TENANT.name: tenants.put_tenant,
    kinds.NETWORK.name: networks.put_network,
    kinds.GROUP.name: groups.put_group,
    kinds.POLICY.name: policies.put_policy,
    kinds.RULE.name: policies.put_rule,
    kinds.PROFILE.name: profiles.put_profile,
    kinds.SERVICE.name: services.put_service,
    kinds.BGP.name: _put_bgp,
    kinds.GLOBAL.name: global_changes.put_global,
}

_DELETE: dict[str, Remove] = {
    kinds.TENANT.name: tenants.delete_tenant,
    kinds.NETWORK.name: networks.delete_network,
    kinds.GROUP.name: groups.delete_group,
    kinds.POLICY.name: policies.delete_policy,
    kinds.RULE.name: policies.delete_rule,
    kinds.PROFILE.name: profiles.delete_profile,
    kinds.SERVICE.name: services.delete_service,
    kinds.BGP.name: _delete_bgp,
    kinds.GLOBAL.name: global_changes.delete_global,
}


def plan_put(reading: ReadSet, kind: Kind[T], wanted: T) -> Transaction:
    """Create the object, or change the present one."""
    wanted = check(wanted)
    present = reading.get(kind, *kind.key_parts(wanted))
    return reading.plan(_PUT[kind.name](reading, wanted, present))


def plan_delete(reading: ReadSet, kind: Kind[T], *parts: str) -> Transaction:
    """Delete the object and free its allocations; `NotFound` if it does not exist, `Conflict` while it is in use."""
    present = reading.get(kind, *parts)
    if present is None and reading.cluster.is_unreadable(kind, *parts):
        # Garbage refers to nothing, so there is nothing to free with it.
        return reading.plan([Delete(kind.store_key(*parts))])
    if present is None:
        raise NotFound(f"{kind.name} {':'.join(parts)!r} does not exist")
    return reading.plan(_DELETE[kind.name](reading, present))
