"""The pods of a node, from the API server: one list and watch for those that are bound to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.events import Events, Subject
from weft.adapters.kubernetes.objects import Namespace, Pod
from weft.adapters.kubernetes.reflector import Reflector, ResourceVersion, decoded
from weft.domain.errors import Denied, NotFound, Unavailable
from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import protocol_number
from weft.ports.orchestrator import PodFacts, PodRef
from weft.runtime.tasks import background

# How long a pod that is not known yet is asked for; a runtime waits for us meanwhile.
ASK_WITHIN_S = 5.0

_read_pod = msgspec.json.Decoder(Pod).decode
_read_namespace = msgspec.json.Decoder(Namespace).decode


class NodePods(ApiClient):
    """See `weft.ports.orchestrator.Pods`. Pods on the host's own network are none of ours."""

    def __init__(self, access: Access, *, node: str) -> None:
        super().__init__(access)
        self._events = Events(self._api, host=node)
        self._pods: dict[tuple[str, str], Pod] = {}
        form = ResourceVersion("/api/v1/pods", _read_pod, selector=f"spec.nodeName={node}")
        self._reflector = Reflector(self._api, [form], self)
        self.news = asyncio.Event()

    @property
    def fault(self) -> str:
        return self._reflector.fault

    @property
    def in_sync(self) -> asyncio.Event:
        """Set once all pods of the node have been heard of."""
        return self._reflector.in_sync

    async def run(self) -> None:
        async with background(self._events.run(), name="events"):
            await self._reflector.run()

    def known(self, pod: PodRef) -> PodFacts | None:
        found = self._pods.get((pod.namespace, pod.name))
        return facts_of(found) if found is not None and found.is_meant_by(pod.uid) else None

    async def find(self, pod: PodRef) -> PodFacts:
        if known := self.known(pod):
            return known
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        found = decoded(_read_pod, await self._get(path, what=f"pod {pod}"))
        if not found.is_meant_by(pod.uid):
            raise NotFound(f"pod {pod} is another one by now: its UID is {found.metadata.uid}, not {pod.uid}")
        return facts_of(found)

    async def find_namespace(self, name: str) -> Mapping[str, str]:
        data = await self._get(f"/api/v1/namespaces/{name}", what=f"namespace {name}")
        return decoded(_read_namespace, data).metadata.labels

    async def _get(self, path: str, *, what: str) -> bytes:
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                return await self._api.get(path)
        except TimeoutError as error:
            raise Unavailable(f"the API server did not tell of {what} within {ASK_WITHIN_S:g} s") from error
        except NotFound as error:
            raise NotFound(f"{what} does not exist") from error
        except Denied as error:  # somebody has to give us the right: the same call may succeed then
            raise Unavailable(error.message) from error

    def tell(self, pod: PodRef, *, reason: str, message: str) -> None:
        self._events.tell(Subject("v1", "Pod", *pod), reason=reason, message=message)

    def replace(self, objects: Sequence[Pod]) -> None:
        self._pods = {pod.key: pod for pod in objects}
        self.news.set()

    def put(self, value: Pod) -> None:
        before = self._pods.get(value.key)
        self._pods[value.key] = value
        if before is None or before.metadata.labels != value.metadata.labels:  # most news is about their status
            self.news.set()

    def remove(self, value: Pod) -> None:
        self._pods.pop(value.key, None)
        self.news.set()


def facts_of(pod: Pod) -> PodFacts:
    """What is of use here."""
    return PodFacts(
        ref=PodRef(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid),
        labels=pod.metadata.labels,
        ports=tuple(
            PodPort(port.name, protocol_number(port.protocol), port.container_port)
            for container in (*pod.spec.containers, *pod.spec.init_containers)
            for port in container.ports
            if port.name
        ),
    )
