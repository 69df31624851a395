"""What this node holds in the store: its presence, its endpoints, its address blocks; and how it stays safe (design 4).

Whatever the store, the masters and the network between do:

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
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from weft.agent.journal import Attachment, Journal, Stage
from weft.domain import ipam, kinds, model
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.changes import endpoints
from weft.domain.cluster import Cluster
from weft.domain.commits import NEVER, At, Event, Put
from weft.domain.errors import Conflict, Exhausted, Invalid, NotFound, Stale, Unavailable
from weft.domain.ids import EndpointKey, GroupKey, GroupName, NetworkKey, NodeName
from weft.domain.planning import Plan, Reading, put
from weft.domain.resting import Resting
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff, happens
from weft.runtime.mirror import Mirror
from weft.runtime.tasks import beside

R = TypeVar("R")

Meanwhile = Callable[[model.Endpoint], Awaitable[None]]

TRIES = 20
CATCH_UP_S = 0.25
ROUND_S = 1.0
_NO_RESTORE = At(kinds.RESTORE_KEY, NEVER)


async def _nothing(_: model.Endpoint) -> None:
    """What is done meanwhile when nothing is asked for."""


class _Any:
    """Whatever is in any of some containers."""

    def __init__(self, *places: Container[int]) -> None:
        self._places = places

    def __contains__(self, number: object) -> bool:
        return any(number in place for place in self._places)


class Holdings:
    """One node in the store. `run` keeps in touch with it; `attach` and `detach` may be called at any time.

    The cluster is fed by the mirror, which someone else runs.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: model.Node,
        cluster: Cluster,
        mirror: Mirror,
        journal: Journal,
        ttl: float,
        limit: float,
    ) -> None:
        self.journal = journal
        self._store = store
        self._document = node
        self._cluster = cluster
        self._mirror = mirror
        self._ttl = ttl
        self._limit = limit
        self._fence: At | None = None
        self._doubt = asyncio.Event()
        self._heard = self._safe_until = float("-inf")
        self._busy: defaultdict[EndpointKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._taking: defaultdict[NetworkKey, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of many that want an address at once, one asks the store at a time: the others would only be in its way."""
        self._returning: set[tuple[NetworkKey, Address]] = set()
        self._resting = Resting()

    @property
    def node(self) -> NodeName:
        return self._document.name

    @property
    def in_touch(self) -> bool:
        """Whether the store hears us and we hear the store."""
        return self._fence is not None

    @property
    def can_give(self) -> bool:
        """Whether addresses may be given out: we are in touch, or have not been cut off for too long."""
        return asyncio.get_running_loop().time() < self._safe_until

    async def run(self) -> None:
        """Be there for ever."""
        backoff = Backoff()
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
        writes = [put(kinds.NODE, self._document), Put(key, b"{}", lease)]
        revision = await self._store.commit([shown, _NO_RESTORE], writes)
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
        """The store has been read up to our coming, and nothing of ours is on its way: let go what is ours no more."""
        self._returning.clear()
        for note in self.journal:
            if note.stage is Stage.LEAVING:
                continue
            reading = Reading(self._cluster, self._mirror.revision)
            try:
                if note.published and reading.get(kinds.ENDPOINT, *note.key) != note.endpoint:
                    raise NotFound(f"{note.key} was taken back")
                if not note.published:
                    endpoints.plan_publish(reading, note.endpoint)
            except (NotFound, Conflict, Invalid):
                self.journal.change(note.key, stage=Stage.LEAVING)

    async def _reconcile(self) -> None:
        """Bring the store to what the journal says, and let go what the store has taken back."""
        for note in self.journal:
            async with self._busy[note.key]:
                await self._settle(note.key)
        ours = [endpoint.key for endpoint in self._cluster.all(kinds.ENDPOINT) if endpoint.host == self.node]
        for key in ours:
            async with self._busy[key]:
                if self.journal.get(key) is None:  # an attachment that was given up after an unknown outcome
                    await self._withdraw(key)
        used = {note.endpoint.network_key for note in self.journal}
        for network in self._cluster.all(kinds.NETWORK):
            if network.key not in used and self._cluster.blocks.get(network.key):
                await self.return_blocks(network)

    async def _settle(self, key: EndpointKey) -> None:
        note = self.journal.get(key)
        if note is None:
            return
        if note.stage is Stage.LEAVING:
            if note.wiring is None:  # else it must be taken off first: its addresses still speak
                await self._let_go(note)
        elif not note.published:
            await self._publish(note)
        elif self._cluster.get(kinds.ENDPOINT, *key) is None:
            self.journal.change(key, stage=Stage.LEAVING)  # an operator or the collector wants it gone

    async def attach(self, wanted: model.Endpoint, *, meanwhile: Meanwhile | None = None) -> model.Endpoint:
        """Give an endpoint its addresses; one that has them keeps them.

        `meanwhile` is done once the addresses are certain: beside telling the store, where they are from our blocks.
        `Unavailable` when that needs the store and it is away, or when we have been cut off for too long.
        """
        async with self._busy[wanted.key]:
            note = self.journal.get(wanted.key)
            if note is not None and note.stage is Stage.LEAVING:
                raise Unavailable(f"{wanted.key} is not gone from the store yet")
            endpoint = note.endpoint if note is not None else await self._attach(wanted, meanwhile or _nothing)
            self._refuse_beyond_limit()
            return endpoint

    async def _attach(self, wanted: model.Endpoint, meanwhile: Meanwhile) -> model.Endpoint:
        tenant, name, _ = wanted.key
        network = self._cluster.get(kinds.NETWORK, tenant, name)
        if network is None:
            raise Invalid(f"network {tenant}:{name} does not exist", field="networkName")
        group = self._cluster.group(GroupKey(tenant, GroupName(wanted.group))) if wanted.group else None
        if wanted.group and (group is None or group.network != name):
            raise Invalid(f"network {name!r} has no group {wanted.group!r}", field="serviceName")
        if not wanted.ip_address and not wanted.ipv6_address and ipam.gives_blocks(network.value, group):
            with suppress(Exhausted):
                return await self._attach_from_blocks(wanted, network.value, meanwhile)
        endpoint = await self._attach_by_claims(wanted)
        await meanwhile(endpoint)
        return endpoint

    async def detach(self, key: EndpointKey) -> None:
        """Let an endpoint go that is off, whether the store is there or not; one that is unknown is gone already."""
        async with self._busy[key]:
            note = self.journal.get(key)
            if note is not None:
                self.journal.change(key, stage=Stage.LEAVING, unwired=True)
                with suppress(Unavailable):
                    await self._let_go(note)

    async def return_blocks(self, network: model.Network) -> None:
        """Give back the network's blocks of which no address is in use."""
        for family in (4, 6):
            used = self._used(network, family)
            for first, last in list(ipam.owned_blocks(self._cluster, network, self.node, family=family)):
                if not any(number in used for number in range(first, last + 1)):
                    await self._return_block(network, Address(family, first))

    async def _return_block(self, network: model.Network, block: Address) -> None:
        self._returning.add((network.key, block))
        try:
            await self._carry_out(partial(self._plan_return, network, block))
        finally:
            if self.in_touch:  # the outcome is known
                self._returning.discard((network.key, block))

    def _refuse_beyond_limit(self) -> None:
        if not self.can_give:
            raise Unavailable(f"node {self.node} has been cut off for too long")

    def held(self) -> Iterator[tuple[NetworkKey, str, EndpointKey]]:
        """The addresses this node holds for its own at this moment."""
        if self.can_give:
            for note in self.journal:
                if note.stage is not Stage.LEAVING:
                    for text in (note.endpoint.ip_address, note.endpoint.ipv6_address):
                        if text:
                            yield note.endpoint.network_key, text, note.key

    async def _attach_by_claims(self, wanted: model.Endpoint) -> model.Endpoint:
        async with self._taking[wanted.network_key]:
            endpoint = await self._carry_out(partial(endpoints.plan_create, wanted=wanted, busy=endpoints.Busy()))
        if endpoint.host != self.node:
            raise Conflict(f"{wanted.key} is on node {endpoint.host!r}")
        self.journal.put(Attachment(endpoint=endpoint, published=True, stage=Stage.HELD))
        return endpoint

    async def _attach_from_blocks(
        self, wanted: model.Endpoint, network: model.Network, meanwhile: Meanwhile
    ) -> model.Endpoint:
        while (chosen := self._choose(network)) is None:
            async with self._taking[network.key]:
                if self._choose(network) is None:
                    await self._take_blocks(network)
        endpoint = msgspec.structs.replace(
            wanted,
            ip_address=str(chosen[4]),
            ipv6_address=str(chosen[6]) if 6 in chosen else "",
            mac_address=wanted.mac_address or mac_of(chosen[4]),
        )
        note = Attachment(endpoint=endpoint, published=False, stage=Stage.HELD)
        self.journal.put(note)
        outcomes = await asyncio.gather(self._tell(note), meanwhile(endpoint), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        kept = self.journal.get(wanted.key)
        if kept is None or kept.stage is Stage.LEAVING:
            raise Unavailable(f"{wanted.key} could not be published: try again")
        return endpoint

    def _choose(self, network: model.Network) -> dict[int, Address] | None:
        """An address of each family from our own blocks; None when there is not one of each."""
        self._refuse_beyond_limit()
        resting = self._resting.at(asyncio.get_running_loop().time())
        chosen: dict[int, Address] = {}
        for family in (4, 6):
            if ipam.subnet_of(network, family) is not None:
                address = ipam.choose_from_blocks(
                    self._cluster,
                    network,
                    self.node,
                    family=family,
                    used=self._used(network, family),
                    resting=resting.get((network.key, family), ()),
                )
                if address is None:
                    return None
                chosen[family] = address
        return chosen

    def _used(self, network: model.Network, family: int) -> Container[int]:
        """Numbers that cannot be given out now."""
        returning = (
            range(block.number, block.number + ipam.BLOCK_SIZE)
            for key, block in self._returning
            if key == network.key and block.family == family
        )
        where = (network.key, family)
        return _Any(self._cluster.numbers_in_use(*where), self.journal.numbers_in_use(*where), *returning)

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

    async def _tell(self, note: Attachment) -> None:
        """Publish now, or later when the store is back."""
        with suppress(Unavailable):
            await self._publish(note)

    async def _publish(self, note: Attachment) -> None:
        try:
            await self._carry_out(lambda reading: (None, endpoints.plan_publish(reading, note.endpoint)))
        except (Conflict, Invalid):
            self.journal.change(note.key, stage=Stage.LEAVING)
        else:
            self.journal.change(note.key, published=True)

    async def _let_go(self, note: Attachment) -> None:
        """The store forgets the endpoint, then we do; its addresses rest a while."""
        await self._withdraw(note.key)
        now = asyncio.get_running_loop().time()
        for text in (note.endpoint.ip_address, note.endpoint.ipv6_address):
            if text:
                self._resting.rest(note.endpoint.network_key, parse_address(text, field="ipAddress"), now=now)
        self.journal.forget(note.key)

    async def _withdraw(self, key: EndpointKey) -> None:
        with suppress(NotFound):
            await self._carry_out(partial(self._plan_withdraw, key))

    def _plan_withdraw(self, key: EndpointKey, reading: Reading) -> tuple[None, Plan]:
        """Only an endpoint of ours: another node may have one of the same key by now."""
        endpoint, plan = endpoints.plan_delete(reading, key)
        return None, plan if endpoint.host == self.node else Plan()

    async def _carry_out(self, decide: Callable[[Reading], tuple[R, Plan]]) -> R:
        """Decide and commit, again while the state moves; `Unavailable` when we are not in touch with the store."""
        for _ in range(TRIES):
            fence, seen = self._fence, self._mirror.revision
            if fence is None:
                raise Unavailable(f"node {self.node} is cut off from the store: try again")
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
        raise Unavailable("the state kept changing: try again")
