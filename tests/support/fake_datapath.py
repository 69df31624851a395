"""A node on paper: the agent's own use cases on a store in memory, above a datapath that only takes notes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from tests.support.fake_cluster import FakeCluster, network

from weft.adapters.stores.memory import MemoryStore
from weft.agent.cni.attachments import Attachments
from weft.agent.cni.pods import PodWorkloads
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.attachment_store import AttachmentStore
from weft.agent.store.evictions import Evictions
from weft.agent.store.node_ipam import NodeIpam
from weft.cni.request import AttachmentId, Request, parse_request
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Port, StateItem
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import Put
from weft.lab.waiting import DEADLINE, until
from weft.ports.datapath import NO_CHANGE, Datapath, DriftReport, EndpointConfig, PlugRequest, one_by_one
from weft.ports.orchestrator import Pods
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background
from weft.runtime.worker_thread import WorkerThread

NODE = NodeName("one")
_CONFIG = b'{"cniVersion":"1.1.0","name":"weft","type":"weft-cni"%s}'


class PaperDatapath:
    """Notes what it is told. It refuses what it is told to refuse, and waits where it is told to wait."""

    def __init__(self) -> None:
        self.plugged: dict[AttachmentId, EndpointConfig] = {}
        # What else there is.
        self._parts: set[StateItem] = set()
        # The containers that cannot be unplugged.
        self.refused: set[str] = set()
        # Why the next plug of a container fails.
        self.faults: dict[str, WeftError] = {}
        self.may_plug = threading.Event()
        self.may_plug.set()
        # Set when a plug has begun.
        self.plugging = threading.Event()

    def plug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        self.plugging.set()
        if not self.may_plug.wait(DEADLINE):
            raise DatapathFault("nobody let it go on")
        if fault := self.faults.pop(_id_of(wiring).container, None):
            raise fault
        self.plugged[_id_of(wiring)] = wiring
        self.apply(policy)

    def plug_together(self, pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        return one_by_one(lambda each: self.plug(each.wiring, each.policy), pluggings)

    def unplug(self, wiring: EndpointConfig, policy: Difference[StateItem] = NO_CHANGE) -> None:
        if wiring.netns.rpartition("/")[2] in self.refused:
            raise DatapathFault(f"{wiring.netns} is stuck")
        self.plugged.pop(_id_of(wiring), None)
        self.apply(policy)

    def check(self, wiring: EndpointConfig) -> list[str]:
        return [] if _id_of(wiring) in self.plugged else ["nothing is plugged"]

    def apply(self, difference: Difference[StateItem]) -> None:
        self._parts.difference_update(difference.drop)
        self._parts.update(difference.put)

    def settle(self) -> None: ...

    def converge(self, wanted: Set[StateItem]) -> DriftReport:
        """Finds what it was not told, ports aside: those come and go by plugging."""
        before, self._parts = self._parts, {part for part in wanted if not isinstance(part, Port)}
        plugged = {wiring.port for wiring in self.plugged.values()}
        missing = {part for part in wanted if isinstance(part, Port)} - plugged
        return DriftReport(repaired=tuple(f"{part}" for part in before ^ self._parts), missing=frozenset(missing))


def _id_of(wiring: EndpointConfig) -> AttachmentId:
    return AttachmentId(wiring.netns.rpartition("/")[2], wiring.interface)


class PaperNode:
    """See the module. The namespace of a container is named after it."""

    def __init__(
        self, store: MemoryStore, kernel: DatapathExecutor, datapath: PaperDatapath, *, pods: Pods | None = None
    ) -> None:
        self.store = store
        self.datapath = datapath
        self.journal = AttachmentStore()
        self.cluster = Cluster()
        self.reconciler = Reconciler(self.cluster, node=NODE, journal=self.journal, kernel=kernel)
        self.evictions = Evictions(self.reconciler, cluster=self.cluster, journal=self.journal)
        self.mirror = Mirror(store, self.evictions)
        self.holdings = NodeIpam(
            store,
            node=model.Node(name=NODE),
            cluster=self.cluster,
            mirror=self.mirror,
            journal=self.journal,
            ttl=DEADLINE,
            limit=DEADLINE,
        )
        self.attachments = Attachments(
            cluster=self.cluster,
            holdings=self.holdings,
            journal=self.journal,
            kernel=kernel,
            reconciler=self.reconciler,
            mtu=1450,
            workloads=PodWorkloads(self.cluster, pods) if pods else None,
        )

    async def call(self, verb: str, container: str = "", members: bytes = b"", *, uid: str = "") -> bytes:
        """A request as a runtime makes it for eth0 of a container; `members` go into the configuration."""
        return await self.attachments.serve(request_of(verb, container, members, uid=uid))


def request_of(verb: str, container: str = "", members: bytes = b"", *, uid: str = "") -> Request:
    """What `PaperNode.call` asks for. The pod of a container is called as it is, in the namespace `paper`."""
    named = {"COMMAND": verb, "CONTAINERID": container, "IFNAME": "eth0", "NETNS": f"/paper/{container}", "PATH": "/"}
    named["ARGS"] = f"K8S_POD_NAMESPACE=paper;K8S_POD_NAME={container}" if container else ""
    if uid:
        named["ARGS"] += f";K8S_POD_UID={uid}"
    return parse_request({f"CNI_{name}": value for name, value in named.items()}, _CONFIG % members)


@asynccontextmanager
async def paper_node(
    *, subnet: str = "10.1.0.0/16", pods: Pods | None = None, also: Sequence[model.Value] = ()
) -> AsyncIterator[PaperNode]:
    """A node that is ready, with `default-net` of the tenant `default` and whatever else is named."""
    world = FakeCluster()
    world.put(network("default-net", subnet))
    for value in also:
        world.put(value)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(MemoryStore())
        await store.commit([], [Put(StoreKey(key), value) for key, value in world.entries.items()])
        datapath = PaperDatapath()
        thread = stack.enter_context(WorkerThread("kernel"))
        node = PaperNode(store, DatapathExecutor(cast("Datapath", datapath), thread), datapath, pods=pods)
        await stack.enter_async_context(background(node.mirror.run(), name="mirror"))
        await stack.enter_async_context(background(node.holdings.run(), name="holdings"))
        await until(lambda: node.holdings.connected)
        node.attachments.ready.set()
        yield node
