"""The load-balancer table of a tenant: frontends with their backend pools, updated incrementally."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.desired.diff import Difference
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendKey, FrontendSources, ServiceItem, Vip

# Further backends are left out: a datapath has twelve bits for the backend number.
MAX_BACKENDS = 4095
# The maximum of timeoutSeconds in the Service API, one day.
MAX_AFFINITY_S = 86400


class Target(msgspec.Struct, frozen=True, order=True, gc=False):
    """Address and port of a backend."""

    address: Address
    port: int


class Pool(msgspec.Struct, frozen=True, gc=False):
    """The backends of a frontend, and its affinity timeout in seconds."""

    targets: tuple[Target, ...]
    affinity: int = 0
    # The sources that may connect, without overlaps; None: any source.
    sources: tuple[Range, ...] | None = None


def pool_of(targets: Iterable[Target], *, affinity: int = 0, sources: tuple[Range, ...] | None = None) -> Pool:
    """Return a pool in canonical order without duplicates, cut to the limits."""
    # Sorted, so that all nodes keep the same backends when there are too many.
    return Pool(tuple(sorted(set(targets))[:MAX_BACKENDS]), min(affinity, MAX_AFFINITY_S), sources)


class LoadBalancerTable:
    """Collects changes with `put` and `remove`; `refresh` returns their delta.

    If several services claim one frontend, the first by name gets it. Only changed frontends are recomputed.
    """

    def __init__(self, tenant: TenantName) -> None:
        self._tenant = tenant
        self._services: dict[str, Mapping[FrontendKey, Pool]] = {}
        self._claims: defaultdict[FrontendKey, dict[str, Pool]] = defaultdict(dict)
        # The state as of the last refresh.
        self._applied: dict[FrontendKey, tuple[Backend | Frontend | FrontendSources, ...]] = {}
        # How many frontends each address has; external and internal frontends share it.
        self._vips: Counter[Address] = Counter()
        self._stale: set[FrontendKey] = set()

    def put(self, service: str, pools: Mapping[FrontendKey, Pool]) -> None:
        """Set all pools of a service."""
        before = self._services.get(service, {})
        for frontend in before.keys() - pools.keys():
            self._withdraw(service, frontend)
        for frontend, pool in pools.items():
            if before.get(frontend) != pool:
                self._claims[frontend][service] = pool
                self._stale.add(frontend)
        self._services[service] = pools

    def remove(self, service: str) -> None:
        """Remove a service. Removing an absent one is not an error."""
        for frontend in self._services.pop(service, {}):
            self._withdraw(service, frontend)

    def _withdraw(self, service: str, frontend: FrontendKey) -> None:
        claims = self._claims[frontend]
        del claims[service]
        if not claims:
            del self._claims[frontend]
        self._stale.add(frontend)

    def refresh(self) -> Difference[ServiceItem]:
        """Return the delta since the last call."""
        stale, self._stale = self._stale, set()
        put: list[ServiceItem] = []
        drop: list[ServiceItem] = []
        vips = {frontend.address: self._vips[frontend.address] > 0 for frontend in stale}
        for frontend in stale:
            before, after = self._applied.pop(frontend, ()), tuple(self._items_of(frontend))
            if before and after:
                put += set(after).difference(before)
                drop += set(before).difference(after)
            else:
                # All or nothing: building sets of thousands of backends would be wasted.
                put += after
                drop += before
            if after:
                self._applied[frontend] = after
            self._vips[frontend.address] += bool(after) - bool(before)
        for address, was_present in vips.items():
            is_present = self._vips[address] > 0
            if is_present != was_present:
                (put if is_present else drop).append(Vip(self._tenant, address))
            if not is_present:
                del self._vips[address]
        return Difference(tuple(put), tuple(drop))

    def state_items(self) -> Iterator[ServiceItem]:
        """Iterate over the state as of the last refresh."""
        for items in self._applied.values():
            yield from items
        for address in self._vips:
            yield Vip(self._tenant, address)

    def port_of(self, frontend: FrontendKey, address: Address) -> int:
        """Return the port of the backend with this address; 0 if the frontend has no such backend."""
        backends = (item for item in self._applied.get(frontend, ()) if isinstance(item, Backend))
        return next((backend.port for backend in backends if backend.address == address), 0)

    def _items_of(self, frontend: FrontendKey) -> Iterator[Backend | Frontend | FrontendSources]:
        claims = self._claims.get(frontend)
        if not claims:
            return
        pool = claims[min(claims)]
        hash_slots = _hash_slots(pool.targets) if pool.affinity else [0] * len(pool.targets)
        for number, (target, hash_slot) in enumerate(zip(pool.targets, hash_slots, strict=True)):
            yield Backend(self._tenant, frontend, number, target.address, target.port, hash_slot)
        yield Frontend(self._tenant, frontend, len(pool.targets), pool.affinity)
        if pool.sources is not None:
            yield FrontendSources(self._tenant, frontend, pool.sources)


def _hash_slots(targets: Iterable[Target]) -> list[int]:
    """Return a hash slot above 0 for each target, which does not depend on the others, except for rare collisions."""
    # Backend numbers shift when a backend is removed. Slots do not, so clients keep their backend.
    taken: set[int] = set()
    hash_slots: list[int] = []
    for target in targets:
        hash_slot = zlib.crc32(f"{target.address} {target.port}".encode()) or 1
        while hash_slot in taken:
            hash_slot = hash_slot % 0xFFFFFFFF + 1
        taken.add(hash_slot)
        hash_slots.append(hash_slot)
    return hash_slots
