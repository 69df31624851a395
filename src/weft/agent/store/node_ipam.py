"""What this node holds in the store: its presence, its endpoints, its address blocks; and how it stays safe (ADR 2).

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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.agent.store.store_writer import StoreWriter
from weft.domain import kinds, model
from weft.domain.addresses import Address, mac_of, parse_address
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Exhausted, Invalid, NotFound, Stale, Unavailable, WeftError
from weft.domain.ids import EndpointKey, GroupKey, GroupName, NetworkKey, NodeName
from weft.domain.ipam import ipam
from weft.domain.ipam.address_cooldown import Cooldown
from weft.domain.ipam.allocator import EMPTY, NumberSet
from weft.domain.lifecycle.changes import endpoints
from weft.domain.store_types import NEVER, Put, RevisionEquals
from weft.domain.transaction import ReadSet, Transaction, put
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff
from weft.runtime.keyed_lock import KeyedLock
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

Meanwhile = Callable[[model.Endpoint], Awaitable[None]]

ROUND_S = 1.0
# How long a workload that comes waits for touch that was lost over it.
BACK_WITHIN_S = 5.0
# When the store is told of what is attached: the answer to the runtime goes first, and those who come soon after one
# that was told of are told of together.
TELL_AFTER_S, TELL_EVERY_S = 0.002, 0.02
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


async def _nothing(_: model.Endpoint) -> None:
    """What is done meanwhile when nothing is asked for."""


class NodeIpam:
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
        journal: AttachmentStore,
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
        self._decisions = StoreWriter(store, cluster=cluster, mirror=mirror)
        self._heard = self._safe_until = float("-inf")
        self._busy: KeyedLock[EndpointKey] = KeyedLock()
        # Of many that want an address at once, one asks the store at a time: the others would only be in its way.
        self._taking: KeyedLock[NetworkKey] = KeyedLock()
        self._returning: set[tuple[NetworkKey, Address]] = set()
        self._resting = Cooldown()
        self._untold: set[EndpointKey] = set()
        # When the store was told last.
        self._told = float("-inf")
        self._news = asyncio.Event()

    @property
    def node(self) -> NodeName:
        return self._document.name

    @property
    def connected(self) -> bool:
        """Whether the store hears us and we hear the store."""
        return self._decisions.possible

    @property
    def may_allocate(self) -> bool:
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
        shown = RevisionEquals(key, present.revision if present else NEVER)
        writes = [put(kinds.NODE, self._document), Put(key, b"{}", lease)]
        revision = await self._store.commit([shown, _NO_RESTORE], writes)
        async with background(self._renew(lease), name=f"lease of {self.node}"):
            await self._mirror.wait_for(revision, within=self._ttl)
            self._learn()
            async with (
                background(self._decisions.run(RevisionEquals(key, revision)), name=f"decisions of {self.node}"),
                background(self._tell_for_ever(), name=f"news of {self.node}"),
            ):
                self._safe_until = self._heard + self._limit
                pace = Backoff(first=ROUND_S, cap=ROUND_S)
                while True:
                    await pace.pause()
                    await self._reconcile()

    async def _renew(self, lease: LeaseId) -> None:
        pace = Backoff(first=self._ttl / 3, cap=self._ttl / 3)
        while True:
            await pace.pause()
            asked = asyncio.get_running_loop().time()
            await self._store.keep_alive(lease)
            self._heard = asked
            if self.connected:
                self._safe_until = asked + self._limit

    def _learn(self) -> None:
        """The store has been read up to our coming, and nothing of ours is on its way: let go what is ours no more."""
        self._returning.clear()
        for note in self.journal:
            if note.stage is Stage.LEAVING:
                continue
            reading = ReadSet(self._cluster, self._mirror.revision)
            try:
                stored = reading.get(kinds.ENDPOINT, *note.key)
                if note.published and (stored is None or not endpoints.is_same(stored, note.endpoint)):
                    raise NotFound(f"{note.key} was taken back")
                if not note.published:
                    endpoints.plan_publish(reading, note.endpoint)
            except (NotFound, Conflict, Invalid):
                self.journal.change(note.key, stage=Stage.LEAVING)

    async def _reconcile(self) -> None:
        """Bring the store to what the journal says, and let go what the store has taken back."""
        for note in self.journal:
            if not self._is_settled(note):
                async with self._busy[note.key]:
                    await self._settle(note.key)
        ours = [endpoint.key for endpoint in self._cluster.all(kinds.ENDPOINT) if endpoint.host == self.node]
        for key in [key for key in ours if self.journal.get(key) is None]:
            async with self._busy[key]:
                if self.journal.get(key) is None:  # an attachment that was given up after an unknown outcome
                    await self._withdraw(key)
        used = {note.endpoint.network_key for note in self.journal}
        for network in self._cluster.all(kinds.NETWORK):
            if network.key not in used and self._cluster.blocks.get(network.key):
                await self.return_blocks(network)

    def _is_settled(self, note: Attachment) -> bool:
        """Whether journal and store agree, as they nearly always do: nobody is kept waiting for that."""
        return (
            note.published and note.stage is Stage.ATTACHED and self._cluster.get(kinds.ENDPOINT, *note.key) is not None
        )

    async def _settle(self, key: EndpointKey) -> None:
        note = self.journal.get(key)
        if note is None:
            return
        if note.stage is Stage.LEAVING:
            if note.wiring is None:  # else it must be taken off first: its addresses still speak
                await self._let_go(note)
        elif not note.published:
            self._note_published([await self._publish(key)])
        elif self._cluster.get(kinds.ENDPOINT, *key) is None:
            self.journal.change(key, stage=Stage.LEAVING)  # an operator or the collector wants it gone

    async def attach(self, wanted: model.Endpoint, *, meanwhile: Meanwhile | None = None) -> model.Endpoint:
        """Give an endpoint its addresses; one that has them keeps them.

        `meanwhile` is done once the addresses are certain. Those of our own blocks are so at once: the store is told
        when it is done, and is not waited for.
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

    async def relabel(self, key: EndpointKey, *, labels: Mapping[str, str]) -> None:
        """Give an endpoint of ours other labels, in the store and over a restart; one that is leaving keeps its own.

        `NotFound` while the store has not heard of the endpoint yet, `Unavailable` while it is away.
        """
        async with self._busy[key]:
            note = self.journal.get(key)
            if note is None or note.stage is Stage.LEAVING:
                return
            await self._decisions.carry_out(partial(self._plan_relabel, note.endpoint, dict(labels)))
            if (kept := self.journal.get(key)) is not None:
                endpoint = msgspec.structs.replace(kept.endpoint, labels=dict(labels))
                self.journal.put(msgspec.structs.replace(kept, endpoint=endpoint))

    def _plan_relabel(
        self, endpoint: model.Endpoint, labels: dict[str, str], reading: ReadSet
    ) -> tuple[model.Endpoint, Transaction]:
        return endpoints.plan_update(
            reading,
            endpoint.key,
            labels=labels,
            container_id=endpoint.container_id,
            container_name=endpoint.container_name,
        )

    async def return_blocks(self, network: model.Network) -> None:
        """Give back the network's blocks of which no address is in use."""
        for family in (4, 6):
            for first, last in ipam.owned_blocks(self._cluster, network, self.node, family=family):
                block = Address(family, first)
                if (network.key, block) not in self._returning and not self._is_used(network.key, family, first, last):
                    await self._return_block(network, block)

    def _is_used(self, network: NetworkKey, family: int, first: int, last: int) -> bool:
        numbers = self._cluster.numbers_in_use(network, family), self.journal.numbers_in_use(network, family)
        return any(each.next_taken(first, last) is not None for each in numbers)

    async def _return_block(self, network: model.Network, block: Address) -> None:
        self._returning.add((network.key, block))
        try:
            await self._decisions.carry_out(partial(self._plan_return, network, block))
        except WeftError:
            if self.connected:  # the outcome is known
                self._returning.discard((network.key, block))
            raise
        self._returning.discard((network.key, block))

    def _refuse_beyond_limit(self) -> None:
        if not self.may_allocate:
            raise Unavailable(f"node {self.node} has been cut off for too long")

    def held(self) -> Iterator[tuple[NetworkKey, str, EndpointKey]]:
        """The addresses this node holds for its own at this moment."""
        if self.may_allocate:
            for note in self.journal:
                if note.stage is not Stage.LEAVING:
                    for text in (note.endpoint.ip_address, note.endpoint.ipv6_address):
                        if text:
                            yield note.endpoint.network_key, text, note.key

    async def _attach_by_claims(self, wanted: model.Endpoint) -> model.Endpoint:
        async with self._taking[wanted.network_key]:
            endpoint = await self._decisions.carry_out(
                partial(endpoints.plan_create, wanted=wanted, busy=endpoints.Busy())
            )
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
                    await self._take_blocks_in_touch(network)
        endpoint = msgspec.structs.replace(
            wanted,
            ip_address=str(chosen[4]),
            ipv6_address=str(chosen[6]) if 6 in chosen else "",
            mac_address=wanted.mac_address or mac_of(chosen[4]),
        )
        note = Attachment(endpoint=endpoint, published=False, stage=Stage.HELD)
        self.journal.put(note)
        await meanwhile(endpoint)
        self._publish_soon(note.key)
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
                address = self._choose_one(network, family, resting=resting.get((network.key, family), EMPTY))
                if address is None:
                    return None
                chosen[family] = address
        return chosen

    def _choose_one(self, network: model.Network, family: int, *, resting: NumberSet = EMPTY) -> Address | None:
        return ipam.choose_from_blocks(
            self._cluster,
            network,
            self.node,
            family=family,
            held=self.journal.numbers_in_use(network.key, family),
            resting=resting,
            returning={block for key, block in self._returning if key == network.key},
        )

    async def _take_blocks_in_touch(self, network: model.Network) -> None:
        """Take blocks; where touch is lost over it, as on a machine that stalls, once more when it is soon back."""
        was_in_touch = self.connected
        try:
            await self._take_blocks(network)
        except Unavailable as lost:
            if not was_in_touch:
                raise
            backoff = Backoff(first=0.05, cap=0.25, within=BACK_WITHIN_S)
            while not self.connected:
                try:
                    await backoff.pause()
                except TimeoutError:
                    raise lost from None
            await self._take_blocks(network)

    async def _take_blocks(self, network: model.Network) -> None:
        """One more block of each family in which no address is left."""
        for family in (4, 6):
            if ipam.subnet_of(network, family) is not None and self._choose_one(network, family) is None:
                await self._decisions.carry_out(partial(self._plan_take, network, family))

    def _plan_take(self, network: model.Network, family: int, reading: ReadSet) -> tuple[Address, Transaction]:
        block, writes = ipam.take_block(reading, network, self.node, family=family)
        return block, reading.plan(writes)

    def _plan_return(self, network: model.Network, block: Address, reading: ReadSet) -> tuple[None, Transaction]:
        return None, reading.plan(ipam.return_block(reading, network, self.node, block))

    def _publish_soon(self, key: EndpointKey) -> None:
        if not self._untold:
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + TELL_AFTER_S, self._told + TELL_EVERY_S), self._news.set)
        self._untold.add(key)

    async def _tell_for_ever(self) -> None:
        """Publish what is attached as soon as it has its addresses; what comes meanwhile goes together in the next."""
        while True:
            await self._news.wait()
            self._news.clear()
            keys, self._untold = self._untold, set()
            self._told = asyncio.get_running_loop().time()
            told = await asyncio.gather(*map(self._tell, keys))
            with suppress(Unavailable):  # what is not noted is told once more
                self._note_published(told)

    async def _tell(self, key: EndpointKey) -> model.Endpoint | None:
        """Publish now, or later when the store is back."""
        with suppress(Unavailable):
            return await self._publish(key)
        return None

    async def _publish(self, key: EndpointKey) -> model.Endpoint | None:
        """What the store has been told of, which is to be noted."""
        note = self.journal.get(key)
        if note is None:
            return None
        try:
            is_told = await self._decisions.carry_out(partial(self._plan_publish, note.endpoint))
        except (Conflict, Invalid):
            if self._is_here(note.endpoint):
                self.journal.change(key, stage=Stage.LEAVING)
            return None
        return note.endpoint if is_told else None

    def _note_published(self, told: Iterable[model.Endpoint | None]) -> None:
        self.journal.note_published([each.key for each in told if each is not None and self._is_here(each)])

    def _plan_publish(self, endpoint: model.Endpoint, reading: ReadSet) -> tuple[bool, Transaction]:
        """The store must not hear of an endpoint that has left since somebody wanted to tell of it."""
        return (True, endpoints.plan_publish(reading, endpoint)) if self._is_here(endpoint) else (False, Transaction())

    def _is_here(self, endpoint: model.Endpoint) -> bool:
        note = self.journal.get(endpoint.key)
        return note is not None and note.endpoint == endpoint and note.stage is not Stage.LEAVING

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
            await self._decisions.carry_out(partial(self._plan_withdraw, key))

    def _plan_withdraw(self, key: EndpointKey, reading: ReadSet) -> tuple[None, Transaction]:
        """Only an endpoint of ours: another node may have one of the same key by now."""
        endpoint, plan = endpoints.plan_delete(reading, key)
        return None, plan if endpoint.host == self.node else Transaction()
