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
from weft.domain.store_types import Revision
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
    # `unreachableSince` is for people and other masters, so it is wall-clock time, which advances with the monotonic
    # clock. Only `Silence` decides what is collected. The loop's clock stops in suspend: after that, nodes get time to
    # reconnect.
    offset = time.time() - loop.time()
    silence = node_gc.Silence()
    while not await wait_event(never, within=pause):
        try:
            await collect_dead_nodes(control, silence, clock=loop.time, offset=offset, limit=limit)
        except WeftError as error:
            log.warning("node GC deferred", reason=error.message)


async def collect_dead_nodes(
    control: ControlPlane, silence: node_gc.Silence, *, clock: Clock, limit: float, offset: float = 0.0
) -> None:
    """One round; `offset` is from `clock` to the wall clock."""
    cluster = control.cluster
    for name in list(node_gc.nodes_to_mark(cluster)):
        await control.carry_out(partial(_plan_mark, name, lambda: offset + clock()))
        log.info("node unreachable" if cluster.is_unreachable(name) else "node reachable again", node=name)
    silence.observe(cluster, now=clock())
    for name, marked in list(silence.longer_than(limit, now=clock())):
        # Several commits: a commit has a bounded number of writes, and a node may have thousands of endpoints.
        while node_gc.is_marked(cluster, name, marked):
            await control.carry_out(partial(_plan_collect, name, marked))
        if cluster.get(kinds.NODE, name) is None:
            log.info("dead node garbage-collected", node=name)


# It reads the clock at each attempt, since an attempt may have waited for the store.
def _plan_mark(name: NodeName, clock: Clock, reading: ReadSet) -> Transaction:
    return node_gc.plan_mark(reading, name, now=clock())


def _plan_collect(name: NodeName, marked: Revision, reading: ReadSet) -> Transaction:
    return node_gc.plan_collect(reading, name, marked=marked)
