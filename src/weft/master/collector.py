"""Takes back what silent nodes had: minutes after the limit, not once a day (W12)."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from weft.domain import collection, kinds
from weft.domain.errors import WeftError
from weft.master.control import ControlPlane
from weft.runtime.backoff import happens
from weft.runtime.logs import Log

log = Log("collector")

ROUND_S = 1.0
"""How often silence is looked for; a silent node is shown so within 2 s."""


async def collect_for_ever(control: ControlPlane, *, limit: float, pause: float = ROUND_S) -> None:
    """Mark silent nodes and collect dead ones, for as long as we lead. One that fails is tried again next round."""
    never = asyncio.Event()
    while not await happens(never, within=pause):
        try:
            await collect_once(control, now=time.time(), limit=limit)
        except WeftError as error:
            log.warning("collection postponed", reason=error.message)


async def collect_once(control: ControlPlane, *, now: float, limit: float) -> None:
    """One round."""
    cluster = control.cluster
    for name in list(collection.nodes_to_mark(cluster)):
        await control.carry_out(partial(collection.plan_mark, name=name, now=now))
        log.info("node silent" if cluster.is_silent(name) else "node heard again", node=name)
    for name in list(collection.nodes_to_collect(cluster, now=now, limit=limit)):
        while cluster.get(kinds.NODE, name) is not None and cluster.is_silent(name):
            await control.carry_out(partial(collection.plan_collect, name=name))
        log.info("node collected", node=name)
