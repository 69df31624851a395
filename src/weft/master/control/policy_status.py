"""Tells those who declare policies what has become of them: in force on every node, not yet, or not understood.

Policies that are written while the nodes are being asked are asked about together, next. Where a node does not answer
they are told so, and it is asked again, more and more rarely, until all have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from weft.domain import codec, kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Behind
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.store_types import Delete, Put
from weft.runtime.backoff import Backoff

AGAIN_FIRST_S, AGAIN_CAP_S = 5.0, 300.0

# Returns when all nodes have carried out everything written so far; `Behind` with those who have not.
Settle = Callable[[], Awaitable[object]]


class Telling(Protocol):
    """The part of `weft.ports.orchestrator.ClusterInformers` that is used here."""

    def tell_of_policy(
        self, *, namespace: str, name: str, uid: str, reason: str, message: str, fault: bool
    ) -> None: ...


class PolicyStatus:
    """`written` takes what the leader has written; `run` finds out what became of it and tells, for ever."""

    def __init__(self, cluster: Cluster, telling: Telling, *, settle: Settle) -> None:
        self._cluster = cluster
        self._telling = telling
        self._settle = settle
        self._asked: dict[str, KubePolicy] = {}
        self._told_late: set[str] = set()
        self._news = asyncio.Event()

    def written(self, writes: Sequence[Put | Delete]) -> None:
        """These writes are in the store."""
        for write in writes:
            if not write.key.startswith(f"{kinds.KUBE_POLICY.prefix}/"):
                continue
            if isinstance(write, Put):
                self._asked[write.key] = codec.decode(KubePolicy, write.value)
                self._news.set()
            else:
                self._asked.pop(write.key, None)
            self._told_late.discard(write.key)

    async def run(self) -> None:
        """Tell for ever."""
        backoff = Backoff(first=AGAIN_FIRST_S, cap=AGAIN_CAP_S)
        while True:
            await self._news.wait()
            self._news.clear()
            policies = dict(self._asked)
            try:
                await self._settle()
            except Behind as late:
                for key in policies.keys() - self._told_late:
                    self._tell(policies[key], "NotInForce", late.message, fault=True)
                self._told_late |= policies.keys() & self._asked.keys()
                self._news.set()
                await backoff.pause()
                continue
            backoff.reset()
            for key, policy in policies.items():
                if self._asked.get(key) is policy:
                    del self._asked[key]
                    self._told_late.discard(key)
                    self._tell_settled(policy)

    def _tell_settled(self, policy: KubePolicy) -> None:
        nodes = sum(1 for _ in self._cluster.all(kinds.NODE))
        where = f"on {nodes} node{'' if nodes == 1 else 's'}"
        if policy.fault:
            said = f"in force {where}, but these rules are not understood and allow nothing: {policy.fault}"
            self._tell(policy, "NotUnderstood", said, fault=True)
        else:
            self._tell(policy, "InForce", f"in force {where}", fault=False)

    def _tell(self, policy: KubePolicy, reason: str, message: str, *, fault: bool) -> None:
        self._telling.tell_of_policy(
            namespace=policy.namespace,
            name=policy.name,
            uid=policy.uid,
            reason=reason,
            message=message,
            fault=fault,
        )
