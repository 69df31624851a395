"""What Kubernetes declared, taken out of the store by whoever has left it.

Nothing goes by itself: a netmaster that was started in the wrong mode must not open what NetworkPolicies close.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiohttp import web

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict
from weft.domain.store_types import Delete
from weft.master.api.objects import API
from weft.master.control.control import ControlPlane
from weft.master.control.kube_sync import batches, plan_writes
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Route

log = Log("kubernetes")


class Forgetting:
    """The one call there is; `follows` says whether this netmaster writes what Kubernetes declares."""

    def __init__(self, control: ControlPlane, *, follows: bool) -> None:
        self._control = control
        self._follows = follows

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="DELETE", path=f"{API}/kubernetes", handler=self.forget, answer=dict[str, int],
                  about="Forget what Kubernetes declared, after mode kubernetes is left"),
        )  # fmt: skip

    async def forget(self, _: web.Request) -> web.Response:
        if self._follows:
            raise Conflict(
                "this netmaster follows Kubernetes, which would declare it again: start it in another --mode"
            )
        count = 0
        for batch in batches(_removals(self._control.cluster)):
            await self._control.carry_out(partial(plan_writes, batch))
            count += len(batch)
        log.info("what Kubernetes declared is forgotten", documents=count)
        return json_response({"forgotten": count})


def tell_leftovers(cluster: Cluster) -> None:
    """Log what Kubernetes declared and a netmaster finds that does not follow it: nodes still enforce it."""
    if count := sum(1 for _ in _removals(cluster)):
        log.warning(
            "what Kubernetes declared stays in force and is not followed: netctl forget-kubernetes removes it",
            documents=count,
        )


def _removals(cluster: Cluster) -> Iterator[Delete]:
    for kind in kinds.DECLARED:
        for value in list(cluster.all(kind)):
            yield Delete(kind.store_key(*kind.key_parts(value)))
