"""A reference agent: how a node gives out addresses and stays safe (design 4), with nothing of containers or packets.

What keeps it safe, whatever the store, the masters and the network between do:

- It shows itself by a leased key, put together with its document. All its commits compare that very key, so none
  happens once its lease has ended, and the collector takes nothing back before.
- A commit whose outcome is unknown ends the *stay*: the key is put anew before anything else is committed, which ends
  all that may still be on its way, and what the store then says is certain.
- It counts itself heard from before its last answered keep-alive. Once that is longer ago than the limit, its addresses
  may be taken back, so it gives out none and holds none for its own.
- While the store is away it goes on from its own blocks, and publishes when the store is back. An address that was
  let go is given out again only when the store knows that it was.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from weft.domain import ipam, kinds, model
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.changes import endpoints
from weft.domain.cluster import Cluster
from weft.domain.commits import NEVER, At, Event, Put
from weft.domain.errors import Conflict, Exhausted, Invalid, NotFound, Stale, Unavailable, WeftError
from weft.domain.ids import EndpointKey, GroupKey, GroupName, NetworkKey, NodeName
from weft.domain.planning import Plan, Reading, put
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff, happens
from weft.runtime.mirror import Mirror
from weft.runtime.tasks import beside

R = TypeVar("R")

TRIES = 20
CATCH_UP_S = 0.25
ROUND_S = 1.0
_NO_RESTORE = At(kinds.RESTORE_KEY, NEVER)


@dataclass(slots=True)
class Journal:
    """What an agent must not forget: it is written down before the deed."""

    attached: dict[EndpointKey, model.Endpoint] = field(default_factory=dict)
    unpublished: set[EndpointKey] = field(default_factory=set)
    """Attached, and not known to be in the store."""
    detached: dict[EndpointKey, model.Endpoint] = field(default_factory=dict)
    """Not attached any more, and not known to be gone from the store."""
    returning: set[tuple[NetworkKey, Address]] = field(default_factory=set)
    """Blocks that were given back, and are not known to be gone from the store."""


class ReferenceAgent:
    """One node. `run` keeps it in touch with the store; `attach` and `detach` may be called at any time."""

    def __init__(self, store: Store, *, node: NodeName, ttl: float, limit: float) -> None:
        self.node = node
        self.journal = Journal()
        self._store = store
        self._ttl = ttl
        self._limit = limit
        self._cluster = Cluster()
        self._mirror = Mirror(store, self._cluster)
        self._fence: At | None = None
        self._doubt = asyncio.Event()
        self._heard = self._safe_until = float("-inf")
        self._busy: defaultdict[EndpointKey, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> None:
        """Be there for ever."""
        backoff = Backoff()
        async with beside(self._mirror.run(), name=f"mirror of {self.node}"):
            while True:
                with suppress(Unavailable, NotFound, Stale):
                    await self._stay()
                await backoff.pause()

    async def _stay(self) -> None:
        """Show ourselves, learn what became of our own, and keep in touch until a lease or a certainty is lost."""
        self._heard = asyncio.get_running_loop().time()
        lease = await self._store.grant(self._ttl)
        key = kinds.alive_node(self.node)
        present = await self._store.read(key)
        shown = At(key, present.revision if present else NEVER)
        node = put(kinds.NODE, model.Node(name=self.node))
        revision = await self._store.commit([shown, _NO_RESTORE], [node, Put(key, b"{}", lease)])
        try:
            async with beside(self._renew(lease), name=f"lease of {self.node}"):
                await self._mirror.wait_for(revision, within=self._ttl)
                self._learn()
                self._doubt = asyncio.Event()
                self._fence = At(key, revision)
                self._safe_until = self._heard + self._limit
                while not await happens(self._doubt, within=ROUND_S):
                    await self._reconcile()
        finally:
            self._fence = None

    async def _renew(self, lease: LeaseId) -> None:
        pace = Backoff(first=self._ttl / 3, cap=self._ttl / 3)
        while True:
            await pace.pause()
            asked = asyncio.get_running_loop().time()
            await self._store.keep_alive(lease)
            self._heard = asked
            if self._fence is not None:
                self._safe_until = asked + self._limit

    def _learn(self) -> None:
        """The store has been read up to our coming, and nothing of ours is on its way: drop what is ours no more."""
        journal = self.journal
        journal.returning.clear()
        for key, endpoint in list(journal.attached.items()):
            reading = Reading(self._cluster, self._mirror.revision)
            try:
                if key not in journal.unpublished and reading.get(kinds.ENDPOINT, *key) != endpoint:
                    raise NotFound(f"{key} was taken back")
                if key in journal.unpublished:
                    endpoints.plan_publish(reading, endpoint)
            except WeftError:
                self._forget(key)

    def _forget(self, key: EndpointKey) -> None:
        self.journal.attached.pop(key, None)
        self.journal.unpublished.discard(key)

    async def _reconcile(self) -> None:
        """Bring the store to what the journal says."""
        for key in list(self.journal.detached):
            async with self._busy[key]:
                await self._withdraw(key)
        for key in list(self.journal.unpublished):
            async with self._busy[key]:
                await self._publish(key)
        ours = [endpoint.key for endpoint in self._cluster.all(kinds.ENDPOINT) if endpoint.host == self.node]
        for key in ours:
            async with self._busy[key]:
                if key not in self.journal.attached:  # an attachment that was given up after an unknown outcome
                    await self._withdraw(key)

    async def attach(self, key: EndpointKey, *, group: str = "", address: str = "") -> model.Endpoint:
        """Attach an endpoint; attached already is fine. `Unavailable` when that needs the store and it is away."""
        async with self._busy[key]:
            endpoint = self.journal.attached.get(key) or await self._attach(key, group, address)
            self._refuse_beyond_limit()
            return endpoint

    async def _attach(self, key: EndpointKey, group: str, address: str) -> model.Endpoint:
        if key in self.journal.detached:
            raise Unavailable(f"{key} is not gone from the store yet")
        network = self._cluster.get(kinds.NETWORK, key.tenant, key.network)
        members = self._cluster.group(GroupKey(key.tenant, GroupName(group))) if group else None
        if network is None or (group and members is None):
            raise Invalid(f"{key}: its network or group does not exist")
        wanted = model.Endpoint(
            tenant=key.tenant,
            network=key.network,
            endpoint_id=key.endpoint,
            group=group,
            ip_address=address,
            host=self.node,
        )
        if not address and ipam.gives_blocks(network.value, members):
            with suppress(Exhausted):
                return await self._attach_from_blocks(wanted, network.value)
        return await self._attach_by_claims(wanted)

    async def detach(self, key: EndpointKey) -> None:
        """Detach an endpoint, whether the store is there or not; the unknown is detached already."""
        async with self._busy[key]:
            endpoint = self.journal.attached.get(key)
            if endpoint is not None:
                self.journal.detached[key] = endpoint
                self._forget(key)
                with suppress(Unavailable):
                    await self._withdraw(key)

    async def return_blocks(self, network: model.Network) -> None:
        """Give back the network's blocks of which no address is in use."""
        for family in (4, 6):
            used = self._used(network, family)
            for first, last in list(ipam.owned_blocks(self._cluster, network, self.node, family=family)):
                block = Address(family, first)
                if used.isdisjoint(range(first, last + 1)):
                    await self._return_block(network, block)

    async def _return_block(self, network: model.Network, block: Address) -> None:
        self.journal.returning.add((network.key, block))
        try:
            await self._carry_out(partial(self._plan_return, network, block))
        finally:
            if self._fence is not None:  # the outcome is known
                self.journal.returning.discard((network.key, block))

    def _refuse_beyond_limit(self) -> None:
        if not self._is_within_limit:
            raise Unavailable(f"node {self.node} has been cut off for too long")

    @property
    def _is_within_limit(self) -> bool:
        return asyncio.get_running_loop().time() < self._safe_until

    def held(self) -> Iterator[tuple[NetworkKey, str, EndpointKey]]:
        """The addresses this node holds for its own at this moment."""
        if self._is_within_limit:
            for key, endpoint in self.journal.attached.items():
                for text in (endpoint.ip_address, endpoint.ipv6_address):
                    if text:
                        yield endpoint.network_key, text, key

    async def _attach_by_claims(self, wanted: model.Endpoint) -> model.Endpoint:
        endpoint = await self._carry_out(partial(endpoints.plan_create, wanted=wanted, busy=endpoints.Busy()))
        if endpoint.host != self.node:
            raise Conflict(f"{wanted.key} is on node {endpoint.host!r}")
        self.journal.attached[wanted.key] = endpoint
        return endpoint

    async def _attach_from_blocks(self, wanted: model.Endpoint, network: model.Network) -> model.Endpoint:
        while (chosen := self._choose(network)) is None:
            await self._take_blocks(network)
        endpoint = msgspec.structs.replace(
            wanted,
            ip_address=str(chosen[4]),
            ipv6_address=str(chosen[6]) if 6 in chosen else "",
            mac_address=mac_of(chosen[4]),
        )
        self.journal.attached[wanted.key] = endpoint
        self.journal.unpublished.add(wanted.key)
        with suppress(Unavailable):
            await self._publish(wanted.key)
        if wanted.key not in self.journal.attached:
            raise Unavailable(f"{wanted.key} could not be published")
        return endpoint

    def _choose(self, network: model.Network) -> dict[int, Address] | None:
        """An address of each family from our own blocks; None when there is not one of each."""
        self._refuse_beyond_limit()
        chosen: dict[int, Address] = {}
        for family in (4, 6):
            if ipam.subnet_of(network, family) is not None:
                used = self._used(network, family)
                address = ipam.choose_from_blocks(self._cluster, network, self.node, family=family, used=used)
                if address is None:
                    return None
                chosen[family] = address
        return chosen

    def _used(self, network: model.Network, family: int) -> set[int]:
        """Numbers that cannot be given out now."""
        journal = self.journal
        known = (journal.attached.values(), journal.detached.values(), self._cluster.endpoints(network.key))
        texts = (
            endpoint.ip_address if family == 4 else endpoint.ipv6_address
            for some in known
            for endpoint in some
            if endpoint.network_key == network.key
        )
        used = {parse_address(text, field="ipAddress").number for text in texts if text}
        for key, block in journal.returning:
            if key == network.key and block.family == family:
                used.update(range(block.number, block.number + ipam.BLOCK_SIZE))
        return used

    async def _take_blocks(self, network: model.Network) -> None:
        """One more block of each family in which no address is left."""
        for family in (4, 6):
            if ipam.subnet_of(network, family) is None:
                continue
            used = self._used(network, family)
            if ipam.choose_from_blocks(self._cluster, network, self.node, family=family, used=used) is None:
                await self._carry_out(partial(self._plan_take, network, family))

    def _plan_take(self, network: model.Network, family: int, reading: Reading) -> tuple[Address, Plan]:
        block, writes = ipam.take_block(reading, network, self.node, family=family)
        return block, reading.plan(writes)

    def _plan_return(self, network: model.Network, block: Address, reading: Reading) -> tuple[None, Plan]:
        return None, reading.plan(ipam.return_block(reading, network, self.node, block))

    async def _publish(self, key: EndpointKey) -> None:
        endpoint = self.journal.attached.get(key)
        if endpoint is not None and key in self.journal.unpublished:
            try:
                await self._carry_out(lambda reading: (None, endpoints.plan_publish(reading, endpoint)))
            except (Conflict, Invalid):
                self._forget(key)
            self.journal.unpublished.discard(key)

    async def _withdraw(self, key: EndpointKey) -> None:
        with suppress(NotFound):
            await self._carry_out(partial(endpoints.plan_delete, key=key))
        self.journal.detached.pop(key, None)

    async def _carry_out(self, decide: Callable[[Reading], tuple[R, Plan]]) -> R:
        """Decide and commit, again while the state moves; `Unavailable` when we are not in touch with the store."""
        for _ in range(TRIES):
            fence, seen = self._fence, self._mirror.revision
            if fence is None:
                raise Unavailable(f"node {self.node} is cut off")
            result, plan = decide(Reading(self._cluster, seen))
            if not plan.writes:
                return result
            try:
                revision = await self._store.commit((*plan.compares, fence, _NO_RESTORE), plan.writes)
            except Stale:
                if self._mirror.revision == seen:
                    with suppress(Unavailable):
                        await self._mirror.wait_for(seen + 1, within=CATCH_UP_S)
            except Unavailable:
                if self._fence is fence:
                    self._fence = None
                    self._doubt.set()
                raise
            else:
                events = [Event(write.key, getattr(write, "value", None)) for write in plan.writes]  # type: ignore[union-attr]
                self._mirror.note_own(revision, events)
                return result
        raise Unavailable("the state kept changing")
