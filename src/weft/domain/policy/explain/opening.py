"""What a write newly allows: the guard behind `netctl … create` and the answer of every dry run.

A group without endpoints has no verdicts that could change, but its next endpoint would be open. So each group and
network of the tenant counts as if it had one more endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, Range, parse_prefix_or_range
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointId, NetworkKey, StoreKey, TenantName
from weft.domain.ipam import ipam
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import TENANT_PREFIXES, governing, remove_object
from weft.domain.policy.explain.diff import FlowChange
from weft.domain.policy.model.ranges import address_set, range_text
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.domain.store_types import Delete, DeleteAll, Put, Write

# How many sources, destinations and services a line names.
_LISTED = 5


def engines_of(
    engine: Engine, cluster: Cluster, writes: Iterable[Write], *, tenant: TenantName
) -> tuple[Engine, Engine]:
    """Return copies of the engine before and after the writes, both with the endpoints that may come."""
    before = engine.copy()
    for endpoint in _endpoints_to_come(cluster, tenant):
        before.put(endpoint)
    after = before.copy()
    for write in writes:
        _apply(after, cluster, write)
    return before, after


def _apply(engine: Engine, cluster: Cluster, write: Write) -> None:
    match write:
        case Put(key=key, value=value):
            parsed = _policy_object(key)
            if parsed is not None:
                # What cannot be compiled is ignored, as on the nodes: the plan has validated the object.
                with suppress(Invalid):
                    engine.put(codec.decode(parsed.kind.type, value))
                _clear_unreadable(engine, parsed)
        case Delete(key=key):
            parsed = _policy_object(key)
            if parsed is not None:
                remove_object(engine, parsed)
                _clear_unreadable(engine, parsed)
        case DeleteAll(prefix=prefix):
            for key in cluster.keys_under(prefix):
                _apply(engine, cluster, Delete(key))


def _clear_unreadable(engine: Engine, key: ObjectKey) -> None:
    """What was denied because the document could not be read is denied no longer."""
    if document := governing(key):
        engine.set_unreadable(document, unreadable=False)


def _policy_object(key: StoreKey) -> ObjectKey | None:
    parsed = parse_store_key(key)
    return parsed if isinstance(parsed, ObjectKey) and parsed.kind.prefix in TENANT_PREFIXES else None


def _endpoints_to_come(cluster: Cluster, tenant: TenantName) -> Iterator[model.Endpoint]:
    """Yield one more endpoint of each group, and one without a group of each network."""
    networks = {network.key: network for network in cluster.networks(tenant)}
    for network in networks.values():
        yield _endpoint(network, "", f"new-endpoints-of-{network.name}")
    for group in cluster.all(kinds.GROUP, tenant):
        if (own := networks.get(NetworkKey(tenant, group.network))) is not None:
            yield _endpoint(own, group.name, f"new-endpoints-of-group-{group.name}", pool=ipam.pool_of(group))


def _endpoint(network: model.Network, group: str, name: str, *, pool: Range | None = None) -> model.Endpoint:
    addresses = {4: pool.first if pool else None}
    texts = {}
    for family in (4, 6):
        subnet = ipam.subnet_of(network, family)
        number = addresses.get(family) or (subnet.usable.first if subnet else None)
        texts[family] = str(Address(family, number)) if number is not None else ""
    return model.Endpoint(
        tenant=network.tenant,
        network=network.name,
        endpoint_id=EndpointId(name),
        group=group,
        ip_address=texts[4],
        ipv6_address=texts[6],
    )


def describe_opening(change: FlowChange) -> str:
    """A newly allowed flow as one line."""
    return f"{_listed(change.services)} from {_listed(change.sources)} to {_listed(change.targets)}"


def opened_ranges(before: model.Tenant | None, after: model.Tenant | None) -> Iterator[str]:
    """Yield, as lines, the external addresses that services of a tenant may newly have."""
    if after is None:
        return
    new, old = (_ranges(tenant) for tenant in (after, before))
    for span in address_set(new, without=old).ranges:
        yield f"external address {range_text(span)} to services of tenant {after.name}"


def _ranges(tenant: model.Tenant | None) -> list[Range]:
    texts = tenant.external_ranges if tenant else ()
    return [parse_prefix_or_range(text, field="externalRanges") for text in texts]


def _listed(names: Iterable[str]) -> str:
    names = tuple(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
