"""The balancing table of a tenant: fronts and their pools, kept as services come and go, and what that changes."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, ServicePart, Vip

# More of them are left out: a datapath has twelve bits for their number.
MOST_BACKENDS = 4095
LONGEST_AFFINITY_S = 86400


class Target(msgspec.Struct, frozen=True, order=True, gc=False):
    """Who answers for a service."""

    address: Address
    port: int


class Pool(msgspec.Struct, frozen=True, gc=False):
    """Those that share a front's connections, and for how long a silent client stays with one of them."""

    targets: tuple[Target, ...]
    affinity: int = 0


def pool_of(targets: Iterable[Target], *, affinity: int = 0) -> Pool:
    """A pool in its one order, without repetition."""
    return Pool(tuple(sorted(set(targets))[:MOST_BACKENDS]), min(affinity, LONGEST_AFFINITY_S))


class BalancingTable:
    """Changes are gathered by `put` and `remove`; `refresh` tells what they come to.

    Where several services claim one front, the first of them by name has it. Only what is touched is computed.
    """

    def __init__(self, tenant: TenantName) -> None:
        self._tenant = tenant
        self._services: dict[str, Mapping[FrontendKey, Pool]] = {}
        self._claims: defaultdict[FrontendKey, dict[str, Pool]] = defaultdict(dict)
        self._told: dict[FrontendKey, tuple[Backend | Frontend, ...]] = {}
        self._vips: Counter[Address] = Counter()
        self._touched: set[FrontendKey] = set()

    def put(self, service: str, pools: Mapping[FrontendKey, Pool]) -> None:
        """A service is as said here from now on."""
        before = self._services.get(service, {})
        for front in before.keys() - pools.keys():
            self._withdraw(service, front)
        for front, pool in pools.items():
            if before.get(front) != pool:
                self._claims[front][service] = pool
                self._touched.add(front)
        self._services[service] = pools

    def remove(self, service: str) -> None:
        """A service is no more; never having been is fine."""
        for front in self._services.pop(service, {}):
            self._withdraw(service, front)

    def _withdraw(self, service: str, front: FrontendKey) -> None:
        claims = self._claims[front]
        del claims[service]
        if not claims:
            del self._claims[front]
        self._touched.add(front)

    def refresh(self) -> Difference[ServicePart]:
        """What the datapath is to be told since the last time."""
        touched, self._touched = self._touched, set()
        put: list[ServicePart] = []
        drop: list[ServicePart] = []
        vips = {front.address: self._vips[front.address] > 0 for front in touched}
        for front in touched:
            before, after = self._told.pop(front, ()), tuple(self._parts_at(front))
            if before and after:
                put += set(after).difference(before)
                drop += set(before).difference(after)
            else:
                put += after
                drop += before
            if after:
                self._told[front] = after
            self._vips[front.address] += bool(after) - bool(before)
        for address, was_there in vips.items():
            is_there = self._vips[address] > 0
            if is_there != was_there:
                (put if is_there else drop).append(Vip(self._tenant, address))
            if not is_there:
                del self._vips[address]
        return Difference(tuple(put), tuple(drop))

    def parts(self) -> Iterator[ServicePart]:
        """All that the datapath has been told of."""
        for parts in self._told.values():
            yield from parts
        for address in self._vips:
            yield Vip(self._tenant, address)

    def port_of(self, front: FrontendKey, address: Address) -> int:
        """Where a backend of a front is asked; 0 when it is none, or no more."""
        backends = (part for part in self._told.get(front, ()) if isinstance(part, Backend))
        return next((backend.port for backend in backends if backend.address == address), 0)

    def _parts_at(self, front: FrontendKey) -> Iterator[Backend | Frontend]:
        claims = self._claims.get(front)
        if not claims:
            return
        pool = claims[min(claims)]
        tickets = _tickets(pool.targets) if pool.affinity else [0] * len(pool.targets)
        for number, (target, hash_slot) in enumerate(zip(pool.targets, tickets, strict=True)):
            yield Backend(self._tenant, front, number, target.address, target.port, hash_slot)
        yield Frontend(self._tenant, front, len(pool.targets), pool.affinity)


def _tickets(targets: Iterable[Target]) -> list[int]:
    """A number above 0 for each, which stays the same whoever else comes and goes, but for rare collisions."""
    taken: set[int] = set()
    tickets: list[int] = []
    for target in targets:
        hash_slot = zlib.crc32(f"{target.address} {target.port}".encode()) or 1
        while hash_slot in taken:
            hash_slot = hash_slot % 0xFFFFFFFF + 1
        taken.add(hash_slot)
        tickets.append(hash_slot)
    return tickets
