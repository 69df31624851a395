"""Node garbage collector: marks unreachable nodes, and frees what nodes had that are unreachable for too long (W12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from weft.domain import kinds
from weft.domain.errors import WeftError
from weft.domain.ids import NodeName
from weft.domain.lifecycle import node_gc
from weft.domain.transaction import ReadSet, Transaction
from weft.master.control.control import ControlPlane
from weft.runtime.backoff import wait_event
from weft.runtime.logs import Log

log = Log("node-gc")

Clock = Callable[[], float]

# Pause between rounds; an unreachable node is shown as such within 2 s.
ROUND_S = 1.0


async def run_node_gc(control: ControlPlane, *, limit: float, pause: float = ROUND_S) -> None:
    """Mark unreachable nodes and collect dead ones while we lead. A failed round is repeated by the next one."""
    never = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Other masters read `unreachableSince`, so it is wall-clock time. But it advances with the monotonic clock: setting
    # the system clock forward must not make nodes look dead.
    offset = time.time() - loop.time()
    while not await wait_event(never, within=pause):
        try:
            await collect_dead_nodes(control, clock=lambda: offset + loop.time(), limit=limit)
        except WeftError as error:
            log.warning("node GC deferred", reason=error.message)


async def collect_dead_nodes(control: ControlPlane, *, clock: Clock, limit: float) -> None:
    """One round."""
    cluster = control.cluster
    for name in list(node_gc.nodes_to_mark(cluster)):
        await control.carry_out(partial(_plan_mark, name, clock))
        log.info("node unreachable" if cluster.is_unreachable(name) else "node reachable again", node=name)
    for name in list(node_gc.nodes_to_collect(cluster, now=clock(), limit=limit)):
        # Several commits: a commit has a bounded number of writes, and a node may have thousands of endpoints.
        while name in node_gc.nodes_to_collect(cluster, now=clock(), limit=limit):
            await control.carry_out(partial(_plan_collect, name, clock, limit))
        if cluster.get(kinds.NODE, name) is None:
            log.info("dead node garbage-collected", node=name)


# Both read the clock at each attempt, since an attempt may have waited for the store.


def _plan_mark(name: NodeName, clock: Clock, reading: ReadSet) -> Transaction:
    return node_gc.plan_mark(reading, name, now=clock())


def _plan_collect(name: NodeName, clock: Clock, limit: float, reading: ReadSet) -> Transaction:
    return node_gc.plan_collect(reading, name, now=clock(), limit=limit)
