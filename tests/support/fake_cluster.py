"""An in-memory cluster that applies transactions, without a store, an event loop or a clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Stale, WeftError
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, StoreKey, TenantName
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.lifecycle.changes import endpoints
from weft.domain.lifecycle.changes.endpoints import Busy
from weft.domain.store_types import NEVER, Change, Compare, Delete, Event, Put, RevisionEquals
from weft.domain.transaction import ReadSet, Transaction

T = TypeVar("T", bound=model.Value)

DEFAULT = TenantName("default")


class FakeCluster:
    """Keys with values and revisions, and the `Cluster` built from them. It has the tenant `default`."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.entries: dict[StoreKey, bytes] = {}
        self.revision = 1
        self._put_at: dict[StoreKey, int] = {}
        self.put(model.Tenant(name=DEFAULT))

    def reading(self) -> ReadSet:
        """The read set of a transaction that starts now."""
        return ReadSet(self.cluster, self.revision)

    def carry_out(self, plan: Transaction) -> None:
        """Commit as a store does: raise `Stale` and change nothing if a compare fails."""
        for compare in plan.compares:
            if not self._holds(compare):
                raise Stale(f"{compare} does not hold")
        events: list[Event] = []
        for write in plan.writes:
            if isinstance(write, Put):
                events.append(Event(write.key, write.value))
            elif isinstance(write, Delete):
                events.append(Event(write.key, None))
            else:
                events += [Event(key, None) for key in self.entries if key.startswith(write.prefix)]
        if events:
            self.revision += 1
            for event in events:
                self.put_entry(event.key, event.value)
            self.cluster.apply(Change(self.revision, tuple(events)))

    def put_entry(self, key: StoreKey, value: bytes | None) -> None:
        if value is None:
            self.entries.pop(key, None)
            self._put_at.pop(key, None)
        else:
            self.entries[key] = value
            self._put_at[key] = self.revision

    def _holds(self, compare: Compare) -> bool:
        if isinstance(compare, RevisionEquals):
            return self._put_at.get(compare.key, NEVER) == compare.revision
        return all(
            revision <= compare.since for key, revision in self._put_at.items() if key.startswith(compare.prefix)
        )

    def put(self, value: T) -> T:
        """Create or change an object; return the stored value."""
        kind = kind_of(value)
        self.carry_out(changes.plan_put(self.reading(), kind, value))
        stored = self.cluster.get(kind, *kind.key_parts(value))
        assert stored is not None
        return stored.value

    def delete(self, value: model.Value) -> None:
        """Delete an object."""
        kind = kind_of(value)
        self.carry_out(changes.plan_delete(self.reading(), kind, *kind.key_parts(value)))

    def attach(
        self, name: str, *, network: str = "blue", group: str = "", address: str = "", address_v6: str = ""
    ) -> model.Endpoint:
        """Create an endpoint of the tenant `default`."""
        wanted = endpoint(name, network=network, group=group, address=address, address_v6=address_v6)
        made, plan = endpoints.plan_create(self.reading(), wanted, busy=Busy())
        self.carry_out(plan)
        return made

    def detach(self, name: str, *, network: str = "blue") -> None:
        """Delete an endpoint of the tenant `default`."""
        key = EndpointKey(DEFAULT, NetworkName(network), EndpointId(name))
        _, plan = endpoints.plan_delete(self.reading(), key)
        self.carry_out(plan)

    @contextmanager
    def refuses(self, kind: type[WeftError], *, field: str = "") -> Iterator[None]:
        """The block must raise this kind of error for this field, and change nothing."""
        before = dict(self.entries)
        with pytest.raises(kind) as caught:
            yield
        assert type(caught.value) is kind
        assert caught.value.field == field
        assert self.entries == before


def kind_of(value: T) -> Kind[T]:
    """The kind of an object."""
    return next(kind for kind in kinds.ALL if kind.type is type(value))


def network(name: str = "blue", /, subnet: str = "10.1.1.0/24", **members: object) -> model.Network:
    """A vxlan network of the tenant `default` by default."""
    fields = {"tenant": DEFAULT, "name": name, "encap": "vxlan", "subnet": subnet} | members
    return model.Network(**fields)  # type: ignore[arg-type]


def group(name: str = "web", /, **members: object) -> model.Group:
    """A group on the network `blue` of the tenant `default` by default."""
    return model.Group(**({"tenant": DEFAULT, "name": name, "network": "blue"} | members))  # type: ignore[arg-type]


def policy(name: str = "p", /, **members: object) -> model.Policy:
    return model.Policy(**({"tenant": DEFAULT, "name": name} | members))  # type: ignore[arg-type]


def rule(rule_id: str = "1", /, **members: object) -> model.Rule:
    """A rule of the policy `p` that allows everything in by default."""
    fields = {"tenant": DEFAULT, "policy": "p", "rule_id": rule_id, "direction": "in", "action": "allow"} | members
    return model.Rule(**fields)  # type: ignore[arg-type]


def profile(name: str = "gold", /, **members: object) -> model.Profile:
    return model.Profile(**({"tenant": DEFAULT, "name": name} | members))  # type: ignore[arg-type]


def service(name: str = "s", /, **members: object) -> model.Service:
    """A service on the network `blue` by default."""
    fields = {"tenant": DEFAULT, "name": name, "network": "blue", "selectors": ("app=web",), "ports": ("80:8080:TCP",)}
    return model.Service(**(fields | members))  # type: ignore[arg-type]


def endpoint(
    name: str, *, network: str = "blue", group: str = "", address: str = "", address_v6: str = ""
) -> model.Endpoint:
    """An endpoint of the tenant `default`, as requested."""
    return model.Endpoint(
        tenant=DEFAULT,
        network=NetworkName(network),
        endpoint_id=EndpointId(name),
        group=group,
        ip_address=address,
        ipv6_address=address_v6,
    )
