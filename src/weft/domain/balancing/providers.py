"""Contiv's services and their providers: who provides what, kept as services and endpoints come and go.

The rule is that of `weft.domain.services`: an endpoint provides for every service of its tenant whose selectors its
labels contain, whichever of the two came first (W22). Here it is asked the other way round too, by an index of labels,
so that a change costs what it touches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeVar

from weft.domain import model
from weft.domain.balancing.parts import Front
from weft.domain.balancing.table import Pool, Target, pool_of
from weft.domain.ids import EndpointKey
from weft.domain.policy.protocols import protocol_number
from weft.domain.validation import check

T = TypeVar("T")
Label = tuple[str, str]


class _Known(NamedTuple):
    """A service, the labels that it selects, and the one of them by which it is found."""

    service: model.Service
    labels: frozenset[Label]
    handle: Label


class Providers:
    """The services and the endpoints of one tenant. `take` tells which services have changed."""

    def __init__(self) -> None:
        self._services: dict[str, _Known] = {}
        self._by_handle: defaultdict[Label, set[str]] = defaultdict(set)
        self._endpoints: dict[EndpointKey, model.Endpoint] = {}
        self._by_label: defaultdict[Label, set[EndpointKey]] = defaultdict(set)
        self._touched: set[str] = set()

    def put_service(self, service: model.Service) -> None:
        """A service as it is now; `Invalid` when it is not as a master lets it be, and then there is none."""
        self.remove_service(service.name)
        checked = check(service)
        pairs = (pair.partition("=") for pair in checked.selectors)
        labels = frozenset((key, value) for key, _, value in pairs)
        handle = min(labels, key=lambda label: (len(self._by_handle.get(label, ())), label))
        self._services[service.name] = _Known(checked, labels, handle)
        self._by_handle[handle].add(service.name)

    def remove_service(self, name: str) -> None:
        """A service is no more; never having been is fine."""
        self._touched.add(name)
        if known := self._services.pop(name, None):
            _discard(self._by_handle, known.handle, name)

    def put_endpoint(self, endpoint: model.Endpoint) -> None:
        """An endpoint as it is now."""
        before = self._endpoints.get(endpoint.key)
        if before == endpoint:
            return
        self.remove_endpoint(endpoint.key)
        self._endpoints[endpoint.key] = endpoint
        for label in endpoint.labels.items():
            self._by_label[label].add(endpoint.key)
        self._touched |= self._provided_by(endpoint)

    def remove_endpoint(self, key: EndpointKey) -> None:
        """An endpoint is no more, and nothing of it is left (W15); never having been is fine."""
        endpoint = self._endpoints.pop(key, None)
        if endpoint is None:
            return
        for label in endpoint.labels.items():
            _discard(self._by_label, label, key)
        self._touched |= self._provided_by(endpoint)

    def take(self) -> Iterator[tuple[str, dict[Front, Pool] | None]]:
        """The services that have changed since the last time, with their pools; None for one that is no more."""
        touched, self._touched = self._touched, set()
        for name in touched:
            known = self._services.get(name)
            yield name, None if known is None else pools_of(known.service, self._providing(known.labels))

    def _provided_by(self, endpoint: model.Endpoint) -> set[str]:
        labels = endpoint.labels.items()
        candidates = (name for label in labels for name in self._by_handle.get(label, ()))
        return {name for name in candidates if self._services[name].labels <= labels}

    def _providing(self, labels: frozenset[Label]) -> list[model.Endpoint]:
        nobody: Set[EndpointKey] = frozenset()
        fewest = min((self._by_label.get(label, nobody) for label in labels), key=len)
        found = (self._endpoints[key] for key in fewest)
        return [endpoint for endpoint in found if labels <= endpoint.labels.items()]


def pools_of(service: model.Service, providers: Sequence[model.Endpoint]) -> dict[Front, Pool]:
    """The fronts of a service that has been checked: one for each port at each address that it has.

    Only those that have an address of the same family answer there.
    """
    pools = {}
    for vip in service.addresses:
        addresses = [each for provider in providers for each in provider.addresses if each.family == vip.family]
        for entry in service.ports:
            port, target_port, protocol = entry.split(":")
            targets = (Target(address, int(target_port)) for address in addresses)
            pools[Front(vip, protocol_number(protocol), int(port))] = pool_of(targets)
    return pools


def _discard(index: defaultdict[Label, set[T]], label: Label, item: T) -> None:
    index[label].discard(item)
    if not index[label]:
        del index[label]
