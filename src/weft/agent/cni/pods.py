"""Mode kubernetes: workloads are pods, which the orchestrator describes (K3, W46).

DEL, CHECK and GC never ask: they go by the ledger. ADD asks only about a pod that was not heard of yet. A pod that is
attached stays what it is, whatever becomes of its object in the API: only its labels are followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weft.agent.cni.inflight_requests import Serve
from weft.agent.cni.workload_identity import PlainWorkloads, Workload, place
from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.agent.store.node_ipam import NodeIpam
from weft.cni.errors import CniError
from weft.cni.request import Add, Request
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import bound_by, over_defaults
from weft.domain.errors import NotFound, Unavailable, WeftError
from weft.ports.orchestrator import PodRef, Pods
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log

log = Log("pods")

# How often labels are compared when there is no news: an attachment may have come after its pod's last word.
LOOK_EVERY_S = 30.0
# The reason of the event about a pod that could not be attached.
FAILED = "FailedAttach"


class PodWorkloads:
    """Describes pods by what the orchestrator says; who is no pod is described by the request."""

    def __init__(self, cluster: Cluster, pods: Pods) -> None:
        self._cluster = cluster
        self._pods = pods
        self._plain = PlainWorkloads(cluster)

    async def describe(self, request: Add) -> Workload:
        ref = pod_of(request)
        if ref is None:
            return await self._plain.describe(request)
        pod = await self._pods.find(ref)
        chosen = over_defaults(pod.labels, await self._defaults(ref.namespace))
        chosen = bound_by(chosen, request.wishes.labels)
        return Workload(
            placement=place(self._cluster, chosen),
            labels=pod.labels,
            pod=model.PodIdentity(namespace=ref.namespace, name=ref.name, uid=pod.ref.uid, ports=pod.ports),
        )

    async def _defaults(self, namespace: str) -> Mapping[str, str]:
        """The labels of a namespace; one that the store has not heard of yet is asked for."""
        stored = self._cluster.get(kinds.KUBE_NAMESPACE, namespace)
        return stored.value.labels if stored else await self._pods.find_namespace(namespace)


class Relabelling:
    """Keeps the labels of this node's endpoints as those of their pods. `run` does it for ever."""

    def __init__(self, *, cluster: Cluster, pods: Pods, journal: AttachmentStore, holdings: NodeIpam) -> None:
        self._cluster = cluster
        self._pods = pods
        self._journal = journal
        self._holdings = holdings

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            await wait_event(self._pods.news, within=LOOK_EVERY_S)
            self._pods.news.clear()
            try:
                is_done = await self.look()
            except (Unavailable, NotFound):  # not published yet, or the store is away
                is_done = False
            if is_done:
                backoff.reset()
            else:
                await backoff.pause()
                self._pods.news.set()

    async def look(self) -> bool:
        """One round over all attachments; whether none is left that has other labels than its pod."""
        is_done = True
        for note in self._journal:
            identity = note.endpoint.pod
            if identity is None or note.stage is Stage.LEAVING:
                continue
            known = self._pods.known(PodRef(identity.namespace, identity.name, identity.uid))
            if known is None or self._labels(note.endpoint) == known.labels:
                continue
            if note.stage is Stage.ATTACHED:
                await self._holdings.relabel(note.key, labels=known.labels)
                log.info("labels changed", endpoint=str(note.key), pod=str(known.ref))
            else:
                is_done = False  # it is just being attached, with the labels that it had
        return is_done

    def _labels(self, endpoint: model.Endpoint) -> Mapping[str, str]:
        stored = self._cluster.get(kinds.ENDPOINT, *endpoint.key)
        return stored.value.labels if stored else endpoint.labels


def pod_of(request: Add) -> PodRef | None:
    """The pod that a request is about."""
    told = request.arguments
    return PodRef(told.pod_namespace, told.pod_name, told.pod_uid) if told.pod_namespace and told.pod_name else None


def telling_failures(serve: Serve, pods: Pods) -> Serve:
    """The same use cases, but a pod whose ADD fails is told why, where people look at it."""

    async def serve_and_tell(request: Request) -> bytes:
        try:
            return await serve(request)
        except (WeftError, CniError, asyncio.CancelledError) as error:
            if isinstance(request, Add) and (ref := pod_of(request)) is not None:
                known = pods.known(ref)
                message = "not attached in time" if isinstance(error, asyncio.CancelledError) else error.message
                pods.tell(known.ref if known else ref, reason=FAILED, message=message)
            raise

    return serve_and_tell
