"""Pod informer of one node: lists and watches the pods that are scheduled to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.events import EventRecorder, Subject
from weft.adapters.kubernetes.objects import Namespace, Pod
from weft.adapters.kubernetes.reflector import ApiResource, Reflector, decode_reply
from weft.domain.errors import Denied, NotFound, Unavailable
from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import protocol_number
from weft.ports.orchestrator import PodInfo, PodRef
from weft.runtime.tasks import background

# Timeout of a GET for a pod that is not in the cache yet. The runtime's ADD waits for it.
GET_TIMEOUT_S = 5.0

_decode_pod = msgspec.json.Decoder(Pod).decode
_decode_namespace = msgspec.json.Decoder(Namespace).decode


class NodePods(ApiClient):
    """See `weft.ports.orchestrator.Pods`. A pod with `hostNetwork` gets no CNI call and is never looked up."""

    def __init__(self, config: ClientConfig, *, node: str) -> None:
        super().__init__(config)
        self._events = EventRecorder(self._api, host=node)
        self._pods: dict[tuple[str, str], Pod] = {}
        resource = ApiResource("/api/v1/pods", _decode_pod, selector=f"spec.nodeName={node}")
        self._reflector = Reflector(self._api, [resource], self)
        self.changed = asyncio.Event()

    @property
    def fault(self) -> str:
        return self._reflector.fault

    @property
    def in_sync(self) -> asyncio.Event:
        """Set once all pods of the node have been listed."""
        return self._reflector.in_sync

    async def run(self) -> None:
        async with background(self._events.run(), name="events"):
            await self._reflector.run()

    def cached(self, pod: PodRef) -> PodInfo | None:
        found = self._pods.get((pod.namespace, pod.name))
        return pod_info(found) if found is not None and found.has_uid(pod.uid) else None

    async def find(self, pod: PodRef) -> PodInfo:
        if known := self.cached(pod):
            return known
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        # The watch may lag behind the kubelet, which starts a pod as soon as it sees it itself.
        found = decode_reply(_decode_pod, await self._get(path, what=f"pod {pod}"))
        if not found.has_uid(pod.uid):
            raise NotFound(f"pod {pod} was replaced: its UID is {found.metadata.uid}, not {pod.uid}")
        return pod_info(found)

    async def find_namespace(self, name: str) -> Mapping[str, str]:
        data = await self._get(f"/api/v1/namespaces/{name}", what=f"namespace {name}")
        return decode_reply(_decode_namespace, data).metadata.labels

    async def _get(self, path: str, *, what: str) -> bytes:
        try:
            async with asyncio.timeout(GET_TIMEOUT_S):
                return await self._api.get(path)
        except TimeoutError as error:
            raise Unavailable(f"the API server did not return {what} within {GET_TIMEOUT_S:g} s") from error
        except NotFound as error:
            raise NotFound(f"{what} does not exist") from error
        except Denied as error:  # not final: the same request succeeds once an administrator has fixed RBAC
            raise Unavailable(error.message) from error

    def record_event(self, pod: PodRef, *, reason: str, message: str) -> None:
        self._events.record_event(Subject("v1", "Pod", *pod), reason=reason, message=message)

    def replace(self, objects: Sequence[Pod]) -> None:
        self._pods = {pod.key: pod for pod in objects}
        self.changed.set()

    def put(self, value: Pod) -> None:
        before = self._pods.get(value.key)
        self._pods[value.key] = value
        # Most updates change only the status, which is not used here.
        if before is None or before.metadata.labels != value.metadata.labels:
            self.changed.set()

    def remove(self, value: Pod) -> None:
        self._pods.pop(value.key, None)
        self.changed.set()


def pod_info(pod: Pod) -> PodInfo:
    """The members that the agent uses."""
    return PodInfo(
        ref=PodRef(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid),
        labels=pod.metadata.labels,
        ports=tuple(
            PodPort(port.name, protocol_number(port.protocol), port.container_port)
            for container in (*pod.spec.containers, *pod.spec.init_containers)
            for port in container.ports
            if port.name
        ),
    )
