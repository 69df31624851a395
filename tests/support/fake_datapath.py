"""A node with a fake datapath: the agent's own CNI verbs on a store in memory."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

from tests.support.agents import make_store_side
from tests.support.fake_cluster import FakeCluster, network

from weft.adapters.stores.memory import MemoryStore
from weft.agent.cni.attachments import Attachments
from weft.agent.cni.pods import PodWorkloads
from weft.agent.dataplane.desired_state import DesiredState, make_features
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import NetnsObserver, Reconciler
from weft.agent.dns_publisher import DnsPublisher
from weft.agent.store.attachment_store import AttachmentStore
from weft.agent.store.evictions import Evictions
from weft.cni.chains import Chains
from weft.cni.request import AttachmentId, Request, parse_request
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Port, StateItem
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import Put
from weft.lab.waiting import DEADLINE, until
from weft.ports.datapath import (
    NO_CHANGE,
    Datapath,
    DriftReport,
    Drop,
    EndpointConfig,
    PlugRequest,
    TenantNetnsReport,
    VerdictCounters,
    one_by_one,
)
from weft.ports.orchestrator import Pods
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background
from weft.runtime.worker_thread import WorkerThread

NODE = NodeName("one")
_CONFIG = b'{"cniVersion":"1.1.0","name":"weft","type":"weft-cni"%s}'


class FakeDatapath:
    """Records what it is given. It fails and waits where a test says so."""

    def __init__(self) -> None:
        self.plugged: dict[AttachmentId, EndpointConfig] = {}
        # State items other than ports.
        self._items: set[StateItem] = set()
        # The containers that cannot be unplugged.
        self.refused: set[str] = set()
        # Why the next plug of a container fails.
        self.faults: dict[str, WeftError] = {}
        self.may_plug = threading.Event()
        self.may_plug.set()
        # Set when a plug has begun.
        self.plugging = threading.Event()

    def plug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        self.plugging.set()
        if not self.may_plug.wait(DEADLINE):
            raise DatapathFault("the test did not release the plug")
        if fault := self.faults.pop(_id_of(config).container, None):
            raise fault
        self.plugged[_id_of(config)] = config
        self.apply(changes)

    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        return one_by_one(lambda each: self.plug(each.config, each.changes), requests)

    def unplug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        if config.netns.rpartition("/")[2] in self.refused:
            raise DatapathFault(f"{config.netns} is stuck")
        self.plugged.pop(_id_of(config), None)
        self.apply(changes)

    def check(self, config: EndpointConfig) -> list[str]:
        return [] if _id_of(config) in self.plugged else ["nothing is plugged"]

    def apply(self, difference: Difference[StateItem]) -> None:
        self._items.difference_update(difference.drop)
        self._items.update(difference.put)

    def flush_datapath_cache(self) -> None: ...

    def reap(self) -> None: ...

    def has_drifted(self, *, in_sync: bool = True) -> bool:
        return False

    def drops(self) -> list[Drop]:
        return []

    def counters(self) -> list[VerdictCounters]:
        return []

    def inspect(self) -> list[TenantNetnsReport]:
        return []

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        """Repairs everything but ports, which come and go by plugging."""
        before, self._items = self._items, {item for item in desired if not isinstance(item, Port)}
        plugged = {config.port for config in self.plugged.values()}
        missing = {item for item in desired if isinstance(item, Port)} - plugged
        return DriftReport(repaired=tuple(f"{item}" for item in before ^ self._items), missing=frozenset(missing))


def _id_of(config: EndpointConfig) -> AttachmentId:
    return AttachmentId(config.netns.rpartition("/")[2], config.interface)


class FakeNode:
    """See the module. The netns of a container is named after it."""

    def __init__(
        self,
        store: MemoryStore,
        executor: DatapathExecutor,
        datapath: FakeDatapath,
        *,
        pods: Pods | None = None,
        chains: Chains | None = None,
        dns_socket: Path | None = None,
        observers: Sequence[NetnsObserver] = (),
    ) -> None:
        self.store = store
        self.datapath = datapath
        self.attachment_store = AttachmentStore()
        self.cluster = Cluster()
        self.features = make_features(self.cluster, node=NODE, attachment_store=self.attachment_store)
        self.desired = DesiredState(
            self.cluster, node=NODE, attachment_store=self.attachment_store, features=self.features
        )
        self.dns = (
            DnsPublisher(socket=dns_socket, cluster=self.cluster, node=NODE, policies=self.features.policies.by_tenant)
            if dns_socket
            else None
        )
        dns = (self.dns,) if self.dns else ()
        self.reconciler = Reconciler(self.desired, executor=executor, netns_observers=(*dns, *observers))
        self.evictions = Evictions(cluster=self.cluster, attachment_store=self.attachment_store)
        self.mirror = Mirror(store, self.cluster, self.desired, self.evictions, *dns)
        self.store_side = make_store_side(
            store,
            node=model.Node(name=NODE),
            cluster=self.cluster,
            mirror=self.mirror,
            attachment_store=self.attachment_store,
            ttl=DEADLINE,
            limit=DEADLINE,
        )
        self.attachments = Attachments(
            cluster=self.cluster,
            lease=self.store_side.lease,
            allocator=self.store_side.allocator,
            publisher=self.store_side.publisher,
            attachment_store=self.attachment_store,
            executor=executor,
            reconciler=self.reconciler,
            mtu=1450,
            workloads=PodWorkloads(self.cluster, pods) if pods else None,
            chains=chains,
        )

    async def call(self, verb: str, container: str = "", members: bytes = b"", *, uid: str = "") -> bytes:
        """A request for eth0 of a container as a runtime makes it; `members` are added to the configuration."""
        return await self.attachments.serve(request_of(verb, container, members, uid=uid))


def request_of(verb: str, container: str = "", members: bytes = b"", *, uid: str = "") -> Request:
    """The request of `FakeNode.call`. The pod of a container has its name, in the namespace `paper`."""
    named = {"COMMAND": verb, "CONTAINERID": container, "IFNAME": "eth0", "NETNS": f"/paper/{container}", "PATH": "/"}
    named["ARGS"] = f"K8S_POD_NAMESPACE=paper;K8S_POD_NAME={container}" if container else ""
    if uid:
        named["ARGS"] += f";K8S_POD_UID={uid}"
    return parse_request({f"CNI_{name}": value for name, value in named.items()}, _CONFIG % members)


@asynccontextmanager
async def fake_node(
    *,
    subnet: str = "10.1.0.0/16",
    pods: Pods | None = None,
    chains: Chains | None = None,
    also: Sequence[model.Value] = (),
    dns_socket: Path | None = None,
    observe: Callable[[FakeDatapath], NetnsObserver] | None = None,
) -> AsyncIterator[FakeNode]:
    """A node that is ready, with `default-net` of the tenant `default` and the objects in `also`."""
    world = FakeCluster()
    world.put(network("default-net", subnet))
    for value in also:
        world.put(value)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MemoryStore())
        await store.commit([], [Put(StoreKey(key), value) for key, value in world.entries.items()])
        datapath = FakeDatapath()
        thread = stack.enter_context(WorkerThread("kernel"))
        executor = DatapathExecutor(cast("Datapath", datapath), thread)
        observers = [observe(datapath)] if observe else []
        node = FakeNode(store, executor, datapath, pods=pods, chains=chains, dns_socket=dns_socket, observers=observers)
        await stack.enter_async_context(background(node.mirror.run(), name="mirror"))
        await stack.enter_async_context(background(node.store_side.run(), name="node lease"))
        await until(lambda: node.store_side.lease.connected)
        node.attachments.ready.set()
        yield node
