"""Mode kubernetes: workload identity from the pod's labels in the API server, and label changes of attached pods.

DEL, CHECK and GC go by the attachment records and never ask the API server (K3, W46). ADD asks it only about a pod that
is not cached yet. An attached pod keeps its identity even if its object changes: only its labels are followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weft.agent.cni.workload_identity import PlainWorkloads, Workload, place
from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.agent.store.endpoint_publisher import EndpointPublisher
from weft.cni.errors import CniError
from weft.cni.request import Add
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import enforce_labels, with_defaults
from weft.domain.errors import NotFound, Unavailable, WeftError
from weft.ports.orchestrator import PodRef, Pods
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log

log = Log("pods")

# How often labels are compared without an event: an ADD may come after the last event of its pod.
RESYNC_EVERY_S = 30.0
# The reason of the Event on a pod whose ADD has failed.
FAILED = "FailedAttach"


class PodWorkloads:
    """Identifies pods by their labels in the API server; a container that is not a pod, by its request."""

    def __init__(self, cluster: Cluster, pods: Pods) -> None:
        self._cluster = cluster
        self._pods = pods
        self._plain = PlainWorkloads(cluster)

    async def describe(self, request: Add) -> Workload:
        ref = pod_of(request)
        if ref is None:
            return await self._plain.describe(request)
        pod = await self._pods.find(ref)
        labels = with_defaults(pod.labels, await self._namespace_labels(ref.namespace))
        # The network configuration is the administrator's: what it says overrides the pod's author.
        labels = enforce_labels(labels, request.capabilities.labels)
        return Workload(
            placement=place(self._cluster, labels),
            labels=pod.labels,
            pod=model.PodIdentity(namespace=ref.namespace, name=ref.name, uid=pod.ref.uid, ports=pod.ports),
        )

    def report_failure(self, request: Add, error: WeftError | CniError | asyncio.CancelledError) -> None:
        """Record an Event on the pod: `kubectl describe` is where its users look."""
        if (ref := pod_of(request)) is not None:
            pod = self._pods.cached(ref)
            message = "not attached in time" if isinstance(error, asyncio.CancelledError) else error.message
            self._pods.record_event(pod.ref if pod else ref, reason=FAILED, message=message)

    async def _namespace_labels(self, namespace: str) -> Mapping[str, str]:
        """The labels of a namespace; one that netmaster has not stored yet is requested from the API server."""
        stored = self._cluster.get(kinds.KUBE_NAMESPACE, namespace)
        return stored.value.labels if stored else await self._pods.find_namespace(namespace)


class LabelSync:
    """Copies label changes of pods to the endpoints of this node. `run` does the work."""

    def __init__(
        self, *, cluster: Cluster, pods: Pods, attachment_store: AttachmentStore, publisher: EndpointPublisher
    ) -> None:
        self._cluster = cluster
        self._pods = pods
        self._attachment_store = attachment_store
        self._publisher = publisher

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            await wait_event(self._pods.changed, within=RESYNC_EVERY_S)
            self._pods.changed.clear()
            try:
                is_done = await self.sync()
            except (Unavailable, NotFound):  # the endpoint is not published yet, or the store is unreachable
                is_done = False
            if is_done:
                backoff.reset()
            else:
                await backoff.pause()
                self._pods.changed.set()

    async def sync(self) -> bool:
        """Compare all attachments once; whether every endpoint has the labels of its pod now."""
        is_done = True
        for attachment in self._attachment_store:
            identity = attachment.endpoint.pod
            if identity is None or attachment.stage is Stage.DELETING:
                continue
            # By UID: a successor of the same name has labels of its own.
            pod = self._pods.cached(PodRef(identity.namespace, identity.name, identity.uid))
            if pod is None or self._labels(attachment.endpoint) == pod.labels:
                continue
            if attachment.stage is Stage.ATTACHED:
                await self._publisher.relabel(attachment.key, labels=pod.labels)
                log.info("labels changed", endpoint=str(attachment.key), pod=str(pod.ref))
            else:
                is_done = False  # its ADD is under way, with the labels that it had before
        return is_done

    def _labels(self, endpoint: model.Endpoint) -> Mapping[str, str]:
        stored = self._cluster.get(kinds.ENDPOINT, *endpoint.key)
        return stored.value.labels if stored else endpoint.labels


def pod_of(request: Add) -> PodRef | None:
    """The pod that a request names in CNI_ARGS; None for a container that is not a pod."""
    arguments = request.arguments
    if not (arguments.pod_namespace and arguments.pod_name):
        return None
    return PodRef(arguments.pod_namespace, arguments.pod_name, arguments.pod_uid)
