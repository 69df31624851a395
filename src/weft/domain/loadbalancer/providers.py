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
from weft.domain.addresses import Address
from weft.domain.ids import EndpointKey
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number
from weft.domain.selectors import Label
from weft.domain.validation import ServicePort, parse_selectors, parse_service_ports

T = TypeVar("T")


class Offer(NamedTuple):
    """What a service offers: each of its ports at each of its addresses."""

    addresses: tuple[Address, ...]
    ports: tuple[ServicePort, ...]


class _Known(NamedTuple):
    """What a service offers, the labels that it selects, and the one of them by which it is found."""

    offer: Offer
    labels: frozenset[Label]
    handle: Label


class _Provider(NamedTuple):
    """An endpoint, and its addresses."""

    endpoint: model.Endpoint
    addresses: tuple[Address, ...]


class Providers:
    """The services and the endpoints of one tenant. `take` tells which services have changed."""

    def __init__(self) -> None:
        self._services: dict[str, _Known] = {}
        self._by_handle: defaultdict[Label, set[str]] = defaultdict(set)
        self._endpoints: dict[EndpointKey, _Provider] = {}
        self._by_label: defaultdict[Label, set[EndpointKey]] = defaultdict(set)
        self._touched: set[str] = set()

    def put_service(self, service: model.Service) -> None:
        """A service as it is now; `Invalid` when it is not as a master lets it be, and then there is none."""
        self.remove_service(service.name)
        offer, labels = offer_of(service), parse_selectors(service.selectors)
        handle = min(labels, key=lambda label: (len(self._by_handle.get(label, ())), label))
        self._services[service.name] = _Known(offer, labels, handle)
        self._by_handle[handle].add(service.name)

    def remove_service(self, name: str) -> None:
        """A service is no more; never having been is fine."""
        self._touched.add(name)
        if known := self._services.pop(name, None):
            _discard(self._by_handle, known.handle, name)

    def put_endpoint(self, endpoint: model.Endpoint) -> None:
        """An endpoint as it is now."""
        key = endpoint.key
        if before := self._endpoints.get(key):
            if before.endpoint == endpoint:
                return
            self.remove_endpoint(key)
        self._endpoints[key] = _Provider(endpoint, endpoint.addresses)
        for label in endpoint.labels.items():
            self._by_label[label].add(key)
        self._touched |= self._provided_by(endpoint)

    def remove_endpoint(self, key: EndpointKey) -> None:
        """An endpoint is no more, and nothing of it is left (W15); never having been is fine."""
        known = self._endpoints.pop(key, None)
        if known is None:
            return
        for label in known.endpoint.labels.items():
            _discard(self._by_label, label, key)
        self._touched |= self._provided_by(known.endpoint)

    def take(self) -> Iterator[tuple[str, dict[FrontendKey, Pool] | None]]:
        """The services that have changed since the last time, with their pools; None for one that is no more."""
        touched, self._touched = self._touched, set()
        for name in touched:
            known = self._services.get(name)
            yield name, None if known is None else pools_of(known.offer, self._providing(known.labels))

    def _provided_by(self, endpoint: model.Endpoint) -> set[str]:
        labels = endpoint.labels.items()
        candidates = (name for label in labels for name in self._by_handle.get(label, ()))
        return {name for name in candidates if self._services[name].labels <= labels}

    def _providing(self, labels: frozenset[Label]) -> list[Address]:
        """The addresses of those who have all the labels."""
        nobody: Set[EndpointKey] = frozenset()
        fewest = min((self._by_label.get(label, nobody) for label in labels), key=len)
        found = (self._endpoints[key] for key in fewest)
        return [each for known in found if labels <= known.endpoint.labels.items() for each in known.addresses]


def offer_of(service: model.Service) -> Offer:
    """What a service offers; `Invalid` when it is not as a master lets it be."""
    return Offer(service.addresses, parse_service_ports(service.ports))


def pools_of(offer: Offer, providers: Sequence[Address]) -> dict[FrontendKey, Pool]:
    """The fronts of a service. Only those that have an address of the same family answer at one."""
    pools = {}
    for vip in offer.addresses:
        addresses = [each for each in providers if each.family == vip.family]
        for port, target_port, protocol in offer.ports:
            targets = (Target(address, target_port) for address in addresses)
            pools[FrontendKey(vip, protocol_number(protocol), port)] = pool_of(targets)
    return pools


def _discard(index: defaultdict[Label, set[T]], label: Label, item: T) -> None:
    index[label].discard(item)
    if not index[label]:
        del index[label]
