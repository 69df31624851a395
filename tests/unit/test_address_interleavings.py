"""Addresses, tags and ids under any interleaving: never twice, never lost, all released (ADR 2; W6, W17, W19).

Two masters (one leads, the leader changes, the old one goes on trying) and three agents, one of them disconnected for a
while, work on one store. The scheduler decides every turn; after each the stored state is audited and compared with
what the nodes believe and what clients were answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.address_audit import audit
from tests.support.agents import ReferenceAgent
from tests.support.interleaving import FaultProfile, ScheduledStore, Scheduler, run_sync

from weft.adapters.stores.memory import MemoryStore
from weft.domain import codec, kinds, model
from weft.domain.addresses import format_address
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, NotFound, Unavailable, WeftError
from weft.domain.ids import (
    EndpointId,
    EndpointKey,
    GroupName,
    NetworkKey,
    NetworkName,
    NodeName,
    ServiceName,
    StoreKey,
    TenantName,
)
from weft.domain.kinds import Kind
from weft.domain.lifecycle.node_gc import Silence
from weft.domain.store_types import NEVER, Compare, RevisionEquals
from weft.master.control.control import Condition, ControlPlane
from weft.master.control.node_gc import collect_dead_nodes
from weft.ports.store import Store
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.store.election import Leadership, lead
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

TTL = 3.0
LIMIT = 12.0
PAUSES = (0.0, 0.0, 0.0, 0.5, TTL, LIMIT / 2)
TENANT = TenantName("t")
CLIENTS = ("c1", "c2", "c3")
EVERYTHING = StoreKey("")
ALWAYS = RevisionEquals(StoreKey("absent"), NEVER)


def network(name: str, subnet: str, gateway: str, ipv6_subnet: str = "", ipv6_gateway: str = "") -> model.Network:
    return model.Network(
        tenant=TENANT,
        name=NetworkName(name),
        encap="vxlan",
        subnet=subnet,
        gateway=gateway,
        ipv6_subnet=ipv6_subnet,
        ipv6_gateway=ipv6_gateway,
    )


def group(name: str, of: str, pool: str = "") -> model.Group:
    return model.Group(tenant=TENANT, name=GroupName(name), network=NetworkName(of), ip_pool=pool)


def _virtual_time() -> float:
    """The loop's clock, which these tests turn."""
    return asyncio.get_running_loop().time()


class Scene(NamedTuple):
    """A network with its groups, and addresses that someone may ask for: free ones, gateways, in pools, in blocks."""

    network: model.Network
    groups: tuple[model.Group, ...]
    asked: tuple[str, ...]


SCENES = (
    Scene(
        network("small", "10.0.0.0/28", "10.0.0.1", "fd00::/124", "fd00::1"),
        (group("tiny", "small", "10.0.0.8-10.0.0.9"),),
        ("10.0.0.1", "10.0.0.5", "10.0.0.8"),
    ),
    Scene(  # the pool leaves only few blocks for nodes and claims to meet in
        network("large", "10.1.0.0/21", "10.1.0.1", "fd01::/117", "fd01::1"),
        (group("wide", "large", "10.1.0.130-10.1.7.63"), group("open", "large")),
        ("10.1.0.2", "10.1.0.64", "10.1.7.70", "10.1.7.200"),
    ),
    Scene(network("mixed", "10.2.0.0/28", "10.2.0.14", "fd02::/117"), (), ("10.2.0.3",)),
    Scene(
        network("plain", "10.3.0.0/21", ""),
        (group("most", "plain", "10.3.0.192-10.3.7.127"),),
        ("10.3.0.1", "10.3.0.130", "10.3.7.130", "10.3.7.254"),
    ),
    Scene(
        network("free", "10.4.0.0/21", ""), (group("few", "free"), group("late", "free", "10.4.7.190-10.4.7.200")), ()
    ),
    Scene(network("bare", "10.5.0.0/21", ""), (), ()),
)


class Master:
    """What decides in a netmaster: mirror, leadership, control plane and collector."""

    def __init__(self, store: Store, name: str, *, truth: Store, fenced: bool) -> None:
        self._store = store
        self._truth = truth
        self._name = name
        self._fenced = fenced
        self._cluster = Cluster()
        self._mirror = Mirror(store, self._cluster)
        self._leadership: Leadership | None = None
        self.control = ControlPlane(
            store=store, cluster=self._cluster, mirror=self._mirror, fence=self._fence, step_down=self._step_down
        )

    async def run(self) -> None:
        async with background(self._mirror.run(), name=f"mirror of {self._name}"):
            while True:
                if self._fenced:
                    await self._lead_once()
                else:
                    await self._collect(asyncio.Event())

    async def _lead_once(self) -> None:
        async with lead(self._store, key=kinds.LEADER_KEY, name=self._name.encode(), ttl=TTL) as leadership:
            try:
                await self._mirror.wait_for(leadership.fence.revision, within=TTL)
            except Unavailable:
                return
            self._leadership = leadership
            await self._collect(leadership.lost)

    async def _collect(self, until: asyncio.Event) -> None:
        silence = Silence()
        clock = asyncio.get_running_loop().time
        while not await wait_event(until, within=1.0):
            try:
                await collect_dead_nodes(self.control, silence, clock=clock, limit=LIMIT)
            except WeftError:
                continue

    def _fence(self) -> Compare:
        if not self._fenced:
            return ALWAYS
        # It does not ask whether its lease still lives: a leader that was stopped and goes on does not know either.
        if self._leadership is None:
            raise Unavailable("not the leader")
        return self._leadership.fence

    def leads(self) -> bool:
        """Whether it truly leads, as the store knows."""
        present = run_sync(self._truth.read(kinds.LEADER_KEY))
        fence = self._leadership.fence if self._leadership else None
        return present is not None and fence == RevisionEquals(kinds.LEADER_KEY, present.revision)

    def _step_down(self) -> None:
        if self._leadership is not None:
            self._leadership.lose("the outcome of a commit is unknown")
            self._leadership = None


class Simulation:
    """The store, everyone who works on it, and what must hold between them."""

    def __init__(self, scheduler: Scheduler, store: MemoryStore, *, nodes: Sequence[str], fenced: bool) -> None:
        self.scheduler = scheduler
        self.rng = scheduler.rng
        self.store = store
        self.fenced = fenced
        self.masters = [Master(self.seen_by(name), name, truth=store, fenced=fenced) for name in ("m1", "m2")]
        self.links = {node: self.seen_by(node) for node in nodes}
        self.agents = [
            ReferenceAgent(link, node=NodeName(node), ttl=TTL, limit=LIMIT, clock=_virtual_time)
            for node, link in self.links.items()
        ]
        self.scenes = self.rng.sample(SCENES, self.rng.randint(1, 2))
        self.acts = self.rng.sample(ACTS, self.rng.randint(1, 3))
        self.rounds = self.rng.choice((1, 1, 2, 2, 4, 16))
        self.pauses = self.rng.choice((PAUSES, (0.0,)))
        self.leaving = self.rng.choice((0.2, 0.4, 0.6))
        self.shaking = self.rng.choice((0.0, 0.2, 0.8))
        self.answered: dict[EndpointKey, bool] = {}
        self._audited = NEVER
        self._holders: dict[tuple[NetworkKey, str], EndpointKey] = {}

    def seen_by(self, actor: str) -> ScheduledStore:
        return ScheduledStore(self.store, self.scheduler, actor)

    def note(self, what: str) -> None:
        self.scheduler.history.append(f"{self.scheduler.now:9.3f} {what}")

    def state(self) -> Cluster:
        """What is stored now."""
        cluster = Cluster()
        cluster.replace(run_sync(self.store.list(EVERYTHING)))
        assert not cluster.faults
        return cluster

    def check(self) -> None:
        """The stored state is sound, clients were answered correctly, and no node holds what is another's."""
        revision = run_sync(self.store.commit([], []))
        if revision != self._audited:
            self._audited = revision
            listing = run_sync(self.store.list(EVERYTHING))
            faults = audit({str(entry.key): entry.value for entry in listing.entries})
            assert not faults, faults
            stored = [entry.value for entry in listing.entries if entry.key.startswith("endpoints/")]
            endpoints = {endpoint.key: endpoint for endpoint in map(partial(codec.decode, model.Endpoint), stored)}
            self._holders = {}
            for key, endpoint in endpoints.items():
                self._holders[endpoint.network_key, endpoint.ip_address] = key
                self._holders[endpoint.network_key, endpoint.ipv6_address] = key
            for key, there in self.answered.items():
                assert (key in endpoints) == there, f"{key} is there: {not there}"
        believed: dict[tuple[NetworkKey, str], EndpointKey] = {}
        for agent in self.agents:
            for where, text, key in agent.allocated():
                assert believed.setdefault((where, text), key) == key, f"{text} of {where} is with {key} too"
                stored_for = self._holders.get((where, text), key)
                assert stored_for == key, f"{text} of {where} is with {key} on {agent.node}, stored for {stored_for}"


async def use_master(world: Simulation, client: str) -> None:
    """A client of the masters: endpoints, services, reserved addresses, groups and networks come and go."""
    rng = world.rng
    for number in range(world.rounds):
        await asyncio.sleep(rng.choice(world.pauses))
        await world.scheduler.turn(client, f"round {number}")
        master = next(filter(Master.leads, world.masters), None) if rng.random() < 0.7 else None
        try:
            await rng.choice(world.acts)(world, client, master or rng.choice(world.masters))
        except WeftError as error:
            world.note(f"{client}: {error}")


async def endpoint_round(world: Simulation, client: str, master: Master) -> None:
    rng = world.rng
    scene = rng.choice(world.scenes)
    key = EndpointKey(TENANT, scene.network.name, EndpointId(f"{client}-{rng.randrange(3)}"))
    before = world.answered.pop(key, None)
    if before or rng.random() < world.leaving:
        try:
            await master.control.delete_endpoint(key)
        except NotFound:
            assert not before or not master.leads()
        there = False
    else:
        wanted = model.Endpoint(
            tenant=TENANT,
            network=key.network,
            endpoint_id=key.endpoint,
            group=rng.choice(("", *(members.name for members in scene.groups))),
            ip_address=rng.choice(("", "", *scene.asked)),
        )
        await master.control.create_endpoint(wanted)
        there = True
    if master.leads():  # what an old leader says without a commit may be old news
        world.answered[key] = there


async def service_round(world: Simulation, client: str, master: Master) -> None:
    rng = world.rng
    scene = rng.choice(world.scenes)
    service = model.Service(
        tenant=TENANT,
        name=ServiceName(f"{client}-{scene.network.name}"),
        network=scene.network.name,
        ip_address=rng.choice(("", *scene.asked)),
        ports=("80:80:TCP",),
        selectors=(f"key={rng.randrange(3)}",),
    )
    if rng.random() < world.leaving:
        await master.control.delete(kinds.SERVICE, (TENANT, service.name), Condition())
    else:
        await master.control.put(kinds.SERVICE, service, Condition())


async def reserve_round(world: Simulation, client: str, master: Master) -> None:
    scene = world.rng.choice(world.scenes)
    stored = master.control.cluster.get(kinds.NETWORK, *scene.network.key)
    if stored is not None:
        asked = world.rng.choice(("", *scene.asked))
        address = await master.control.reserve_address(stored.value, None, asked=asked)
        await world.scheduler.turn(client, f"has {address}")
        await master.control.release_address(stored.value, str(address))


def spare_of(client: str) -> model.Network:
    return msgspec.structs.replace(network("spare", "10.100.0.0/24", ""), tenant=TenantName(client))


async def object_round(world: Simulation, client: str, master: Master) -> None:
    """Networks and groups are deleted and created again while others are about to use them.

    Every client also has a tenant of its own, whose network and group compete with others only for tags and ids.
    """
    rng = world.rng
    scene = rng.choice(world.scenes)
    spare = spare_of(client)
    team = model.Group(tenant=spare.tenant, name=GroupName("team"), network=spare.name)
    value = scene.network if rng.random() < world.shaking else rng.choice((spare, team, *scene.groups))
    kind: Kind[Any] = kinds.NETWORK if isinstance(value, model.Network) else kinds.GROUP
    if rng.random() < 0.5:
        await master.control.delete(kind, kind.key_parts(value), Condition())
    else:
        await master.control.put(kind, value, Condition())


ACTS = (endpoint_round, service_round, reserve_round, object_round)


async def use_agent(world: Simulation, agent: ReferenceAgent) -> None:
    """A container runtime on a node."""
    for number in range(world.rounds):
        await asyncio.sleep(world.rng.choice(world.pauses))
        await world.scheduler.turn(f"runtime {agent.node}", f"round {number}")
        await runtime_round(world, agent)


async def runtime_round(world: Simulation, agent: ReferenceAgent) -> None:
    rng = world.rng
    scene = rng.choice(world.scenes)
    key = EndpointKey(TENANT, scene.network.name, EndpointId(f"{agent.node}-{rng.randrange(3)}"))
    try:
        if rng.random() >= world.leaving:
            members = rng.choice(("", "", *(members.name for members in scene.groups)))
            asked = rng.choice(("", "", rng.choice(("", *scene.asked))))
            endpoint = await agent.attach(key, group=members, address=asked)
            assert (endpoint.network_key, endpoint.ip_address, key) in agent.allocated()
        elif rng.random() < 0.6:
            await agent.detach(key)
        else:
            await agent.return_blocks(scene.network)
    except WeftError as error:
        world.note(f"{agent.node} fails: {error}")


async def disconnect(world: Simulation) -> None:
    """One node loses the store now and then, sometimes for longer than the limit, while its runtime goes on."""
    rng, agent = world.rng, world.agents[-1]
    link = world.links[agent.node]
    for _ in range(rng.choice((0, 0, 1, 2))):
        await asyncio.sleep(rng.choice((0.0, 1.0, TTL, LIMIT)))
        world.note(f"{agent.node} is disconnected")
        link.partitioned = True
        for _ in range(4):
            await runtime_round(world, agent)
            await asyncio.sleep(rng.choice((0.2, 1.0, TTL, LIMIT)))
            await runtime_round(world, rng.choice(world.agents))
        world.note(f"{agent.node} is back")
        link.partitioned = False


async def make_world(world: Simulation) -> None:
    """The networks and groups of the first moment, by a control plane that nothing disturbs."""
    cluster = Cluster()
    mirror = Mirror(world.store, cluster)
    control = ControlPlane(
        store=world.store, cluster=cluster, mirror=mirror, fence=lambda: ALWAYS, step_down=lambda: None
    )
    async with background(mirror.run(), name="creation"):
        await mirror.wait_for(NEVER, within=1.0)
        await control.put(kinds.TENANT, model.Tenant(name=TENANT), Condition())
        for client in CLIENTS:
            await control.put(kinds.TENANT, model.Tenant(name=TenantName(client)), Condition())
            if world.rng.random() < 0.5:
                await control.put(kinds.NETWORK, spare_of(client), Condition())
        for scene in world.scenes:
            await control.put(kinds.NETWORK, scene.network, Condition())
            for members in scene.groups:
                if world.rng.random() < 0.6:
                    await control.put(kinds.GROUP, members, Condition())


async def release_all(world: Simulation) -> None:
    """Everyone deletes what they have; then nothing of it is left."""
    world.answered.clear()
    for agent in world.agents:
        for attachment in agent.attachment_store:
            await agent.detach(attachment.key)
    await until(lambda: not any(endpoint.host for endpoint in world.state().all(kinds.ENDPOINT)))
    await insist(partial(return_all_blocks, world))
    await insist(partial(delete_all, world))


async def return_all_blocks(world: Simulation) -> bool:
    for one in world.state().all(kinds.NETWORK):
        for agent in world.agents:
            await agent.return_blocks(one)
    owners = {stored.value.owner for blocks in world.state().blocks.values() for stored in blocks.values()}
    return owners <= {""}


async def delete_all(world: Simulation) -> bool:
    """By whichever master leads; one that is behind the other may refuse at first."""
    control = world.rng.choice(world.masters).control
    state = world.state()
    for endpoint in state.all(kinds.ENDPOINT):
        await control.delete_endpoint(endpoint.key)
    for (where, family), pool in state.addresses.items():
        stored = state.get(kinds.NETWORK, *where)
        for number, claim in pool.holders.items():
            if stored and claim.value.holder.startswith("reserved:"):
                await control.release_address(stored.value, format_address(family, number))
    deletable: tuple[Kind[Any], ...] = (kinds.SERVICE, kinds.GROUP, kinds.NETWORK)
    for kind in deletable:
        for value in state.all(kind):
            await control.delete(kind, kind.key_parts(value), Condition())
    left = {entry.key.split("/")[0] for entry in (await world.store.list(EVERYTHING)).entries}
    return left <= {"tenants", "nodes", "alive", "leader"}


async def until(holds: Callable[[], bool]) -> None:
    backoff = Backoff(within=600.0)
    while not holds():
        await backoff.pause()


async def insist(act: Callable[[], Awaitable[bool]]) -> None:
    """Do it until it says that all is done."""
    backoff = Backoff(within=600.0)
    while True:
        with suppress(NotFound, Conflict, Unavailable):
            if await act():
                return
        await backoff.pause()


async def run_cluster(world: Simulation) -> None:
    """The whole lifetime of a cluster, from the first network to the last."""
    await make_world(world)
    world.scheduler.check = world.check
    async with AsyncExitStack() as stack:
        for life in [*(master.run() for master in world.masters), *(agent.run() for agent in world.agents)]:
            await stack.enter_async_context(background(life, name="actor"))
        await until(lambda: all(agent.connected for agent in world.agents))
        for agent in world.rng.choices(world.agents, k=world.rng.randrange(4)) if world.agents else ():
            await runtime_round(world, agent)
        world.scheduler.enable_faults()
        async with asyncio.TaskGroup() as tasks:
            for client in CLIENTS:
                tasks.create_task(use_master(world, client))
            for agent in world.agents:
                tasks.create_task(use_agent(world, agent))
            if world.agents:
                tasks.create_task(disconnect(world))
        await world.scheduler.disable_faults()
        await release_all(world)


def run(seed: int, nodes: Sequence[str] = ("n1", "n2", "n3")) -> None:
    rng = Random(seed)
    random.seed(seed)  # for the jitter of pauses
    scheduler = Scheduler(rng, FaultProfile.random(rng))

    async def main() -> None:
        async with MemoryStore() as store:
            await run_cluster(Simulation(scheduler, store, nodes=nodes, fenced=rng.random() < 0.6))

    scheduler.run(main())


SETTINGS = settings(
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(SETTINGS, max_examples=80)
@given(st.integers(0, 1 << 32))
def test_no_address_is_given_twice_or_lost_whatever_happens_when(seed: int) -> None:
    run(seed)


@settings(SETTINGS, max_examples=120)
@given(st.integers(0, 1 << 32))
def test_no_address_tag_or_id_is_given_twice_by_two_masters(seed: int) -> None:
    run(seed, nodes=())


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(SETTINGS, max_examples=5_000)
@given(st.integers(0, 1 << 32), st.sampled_from([("n1", "n2", "n3"), ()]))
def test_no_address_tag_or_id_is_given_twice_or_lost_in_thousands_of_runs(seed: int, nodes: Sequence[str]) -> None:
    run(seed, nodes=nodes)
