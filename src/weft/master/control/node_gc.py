"""Takes back what silent nodes had: minutes after the limit, not once a day (W12)."""

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

log = Log("collector")

Clock = Callable[[], float]

# How often silence is looked for; a silent node is shown so within 2 s.
ROUND_S = 1.0


async def collect_for_ever(control: ControlPlane, *, limit: float, pause: float = ROUND_S) -> None:
    """Mark silent nodes and collect dead ones, for as long as we lead. One that fails is tried again next round."""
    never = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Marks are read by other masters, so they have the time of day; but a clock that is set must not age the silent.
    start = time.time() - loop.time()
    while not await wait_event(never, within=pause):
        try:
            await collect_once(control, clock=lambda: start + loop.time(), limit=limit)
        except WeftError as error:
            log.warning("collection postponed", reason=error.message)


async def collect_once(control: ControlPlane, *, clock: Clock, limit: float) -> None:
    """One round."""
    cluster = control.cluster
    for name in list(node_gc.nodes_to_mark(cluster)):
        await control.carry_out(partial(_mark, name, clock))
        log.info("node silent" if cluster.is_silent(name) else "node heard again", node=name)
    for name in list(node_gc.nodes_to_collect(cluster, now=clock(), limit=limit)):
        while name in node_gc.nodes_to_collect(cluster, now=clock(), limit=limit):
            await control.carry_out(partial(_collect, name, clock, limit))
        if cluster.get(kinds.NODE, name) is None:
            log.info("node collected", node=name)


# The clock is read at each try, since a try may have to wait for the store.


def _mark(name: NodeName, clock: Clock, reading: ReadSet) -> Transaction:
    return node_gc.plan_mark(reading, name, now=clock())


def _collect(name: NodeName, clock: Clock, limit: float, reading: ReadSet) -> Transaction:
    return node_gc.plan_collect(reading, name, now=clock(), limit=limit)
