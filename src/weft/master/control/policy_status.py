"""Records Events on NetworkPolicies: realized on all nodes, not realized yet, or with unsupported rules.

Policies that are written while a sync is running are batched into the next one. When a node does not acknowledge in
time, a warning is recorded and the sync is repeated with backoff until all nodes have.
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

# Pauses between syncs while a node is behind. It may be down for days, and each sync writes to the store.
RETRY_FIRST_S, RETRY_CAP_S = 5.0, 300.0

# Returns when all nodes have applied everything written so far; raises `Behind` with the nodes that have not.
WaitForSync = Callable[[], Awaitable[object]]


class PolicyEventRecorder(Protocol):
    """The part of `weft.ports.orchestrator.ClusterInformers` that is used here."""

    def record_policy_event(
        self, *, namespace: str, name: str, uid: str, reason: str, message: str, warning: bool
    ) -> None: ...


class PolicyStatus:
    """`written` queues policies that the leader has committed; `run` waits for the nodes and records Events."""

    def __init__(self, cluster: Cluster, recorder: PolicyEventRecorder, *, wait_for_sync: WaitForSync) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._wait_for_sync = wait_for_sync
        # Policies without a final Event, by store key.
        self._pending: dict[str, KubePolicy] = {}
        # Keys of pending policies with a NotRealized Event: one is enough until the policy changes.
        self._reported_late: set[str] = set()
        self._changed = asyncio.Event()

    def written(self, writes: Sequence[Put | Delete]) -> None:
        """Queue the policies among writes that are committed."""
        for write in writes:
            if not write.key.startswith(f"{kinds.KUBE_POLICY.prefix}/"):
                continue
            if isinstance(write, Put):
                self._pending[write.key] = codec.decode(KubePolicy, write.value)
                self._changed.set()
            else:
                self._pending.pop(write.key, None)
            self._reported_late.discard(write.key)

    async def run(self) -> None:
        """Record Events until cancelled."""
        backoff = Backoff(first=RETRY_FIRST_S, cap=RETRY_CAP_S)
        while True:
            await self._changed.wait()
            self._changed.clear()
            # A copy: policies that are written during the wait are not covered by this sync.
            policies = dict(self._pending)
            try:
                await self._wait_for_sync()
            except Behind as late:
                for key in policies.keys() - self._reported_late:
                    self._record(policies[key], "NotRealized", late.message, warning=True)
                self._reported_late |= policies.keys() & self._pending.keys()
                self._changed.set()
                await backoff.pause()
                continue
            backoff.reset()
            for key, policy in policies.items():
                # By identity: a policy that was replaced meanwhile has yet to be realized.
                if self._pending.get(key) is policy:
                    del self._pending[key]
                    self._reported_late.discard(key)
                    self._record_realized(policy)

    def _record_realized(self, policy: KubePolicy) -> None:
        nodes = sum(1 for _ in self._cluster.all(kinds.NODE))
        where = f"on {nodes} node{'' if nodes == 1 else 's'}"
        if policy.fault:
            message = f"realized {where}, but these rules are not supported and allow nothing: {policy.fault}"
            self._record(policy, "UnsupportedRules", message, warning=True)
        else:
            self._record(policy, "Realized", f"realized {where}", warning=False)

    def _record(self, policy: KubePolicy, reason: str, message: str, *, warning: bool) -> None:
        self._recorder.record_policy_event(
            namespace=policy.namespace,
            name=policy.name,
            uid=policy.uid,
            reason=reason,
            message=message,
            warning=warning,
        )
