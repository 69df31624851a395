"""Waiting for realization with a real netmaster, netctl, and nodes with a fake datapath."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

from tests.support.agents import make_store_side

from weft.agent.dataplane.desired_state import DesiredState, make_features
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.observe.sync_status import SyncStatusReporter
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.state import StateItem
from weft.domain.ids import NodeName
from weft.drivers import RemoteStoreSettings, open_store
from weft.lab.servers.masters import MasterProcess, Rest, client
from weft.lab.waiting import DEADLINE, eventually, until
from weft.ports.datapath import Datapath, DriftReport
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background
from weft.runtime.worker_thread import WorkerThread


class NoopDatapath:
    """A datapath on which everything succeeds."""

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        return DriftReport()

    def flush_datapath_cache(self) -> None: ...


@asynccontextmanager
async def node(name: str, master: MasterProcess) -> AsyncIterator[list[str]]:
    """A node on netmaster's store while the block runs; yields its list of faults, empty at first."""
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(WorkerThread("kernel"))
        settings = RemoteStoreSettings(endpoints=(f"unix:{master.data / 'store.sock'}",), node=name)
        store = await stack.enter_async_context(open_store(settings))
        cluster, attachment_store = Cluster(), AttachmentStore()
        own = model.Node(name=NodeName(name))
        executor = DatapathExecutor(cast("Datapath", NoopDatapath()), thread)
        features = make_features(cluster, node=own.name, attachment_store=attachment_store)
        desired = DesiredState(cluster, node=own.name, attachment_store=attachment_store, features=features)
        reconciler = Reconciler(desired, executor=executor)
        mirror = Mirror(store, cluster, desired)
        store_side = make_store_side(
            store,
            node=own,
            cluster=cluster,
            mirror=mirror,
            attachment_store=attachment_store,
            ttl=2.0,
            limit=60.0,
        )
        faults: list[str] = []
        reporter = SyncStatusReporter(
            store, node=own.name, cluster=cluster, mirror=mirror, reconciler=reconciler,
            faults=lambda: list(faults) if store_side.lease.connected else None,
        )  # fmt: skip
        await stack.enter_async_context(background(mirror.run(), name="mirror"))
        await stack.enter_async_context(background(store_side.run(), name="node lease"))
        await until(lambda: store_side.lease.connected)
        await reconciler.converge()
        await stack.enter_async_context(background(reconciler.run(), name="reconcile"))
        await stack.enter_async_context(background(reporter.run(), name="sync status"))
        yield faults


async def netctl(master: MasterProcess, line: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    command = (sys.executable, "-m", "weft.ctl.netctl.main", "--netmaster", master.url, *line.split())
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(DEADLINE):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def state_of(rest: Rest, name: str) -> str:
    return str((await rest.get(kinds.NODE.plural, name)).accepted()["status"]["state"])


async def test_netctl_waits_and_lists_the_pending_nodes(tmp_path: Path) -> None:
    async with MasterProcess(tmp_path) as master, client(master.url) as rest, node("a", master):
        async with node("b", master):
            assert await netctl(master, "tenant create t1 --wait=30") == (0, "t1 created\n", "")
            assert (await netctl(master, "node wait --wait=30"))[0] == 0
        code, out, err = await netctl(master, "tenant create t2 --wait=0.5")
        assert (code, out) == (5, "")
        assert "is committed" in err
        assert " b (" in err
        assert " a (" not in err
        assert "t2\n" in (await netctl(master, "tenant ls -q"))[1]
        await eventually(lambda: state_of(rest, "b"), lambda state: state == "Unreachable")
        assert await netctl(master, "tenant create t3 --wait=30 --ignore-unreachable") == (0, "t3 created\n", "")
        assert "Unreachable" in (await netctl(master, "node ls"))[1]


async def test_a_node_that_is_not_ready_is_listed_with_its_reason(tmp_path: Path) -> None:
    async with MasterProcess(tmp_path) as master, client(master.url) as rest, node("a", master) as faults:
        faults.append("no store events for 10 s")
        await eventually(lambda: state_of(rest, "a"), lambda state: state == "NotReady")
        assert "NotReady: no store events for 10 s" in (await netctl(master, "node ls"))[1]
        faults.clear()
        await eventually(lambda: state_of(rest, "a"), lambda state: state == "Ready")


async def test_many_writes_wait_concurrently(tmp_path: Path) -> None:
    async with MasterProcess(tmp_path) as master, client(master.url) as rest, node("a", master), node("b", master):
        paths = [f"/api/v1/tenants/t{number}/?wait=30" for number in range(40)]
        bodies = [b'{"tenantName":"t%d"}' % number for number in range(40)]
        sent = (
            rest.send("POST", path, data=body, headers={"Content-Type": "application/json"})
            for path, body in zip(paths, bodies, strict=True)
        )
        for answer in await asyncio.gather(*sent):
            answer.accepted()


async def test_an_invalid_wait_writes_nothing(tmp_path: Path) -> None:
    async with MasterProcess(tmp_path) as master, client(master.url) as rest:
        answer = await rest.send("POST", "/api/v1/tenants/t1/?wait=soon", data=b'{"tenantName":"t1"}')
        answer.refused(400, field="wait")
        (await rest.get("tenants", "t1")).refused(404)
