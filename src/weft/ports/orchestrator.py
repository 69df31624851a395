"""The Orchestrator port: what Weft reads from the system that starts workloads.

It has three independent interfaces:

- **Pods**: the pods of one node, for its agent. They are cached for when the API server is unreachable.
- **ClusterInformers**: cluster-wide resources (namespaces, policies, services, EndpointSlices). Only the leading
  netmaster watches them; they reach the nodes through the store (docs/adr/0009).
- **Discovery**: how agents find netmaster, and how netmaster authenticates them (docs/design/node-enrollment.md).

All are async context managers; the first two do nothing before `run`. Errors are `weft.domain.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from weft.domain.kinds import Kind
from weft.domain.model import PodPort, Value


class PodRef(NamedTuple):
    """A pod, as a container runtime names it. Old runtimes pass no `uid`."""

    namespace: str
    name: str
    # A pod of the same name with another UID is another pod: StatefulSets reuse names.
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodInfo:
    """The current metadata of a pod."""

    ref: PodRef
    labels: Mapping[str, str]
    ports: tuple[PodPort, ...] = ()


class Pods(Protocol):
    """The pods of one node."""

    # Set whenever a pod may have changed. A consumer clears it before it reads, so that no change is lost in between.
    changed: asyncio.Event

    @property
    def fault(self) -> str:
        """Why the watch does not work now; empty while it does."""
        ...

    # An ADD may arrive before the watch event of its pod: the runtime is faster than the API server.
    async def find(self, pod: PodRef) -> PodInfo:
        """The pod with this name and UID. One that is not cached yet is requested, for a few seconds at most.

        `NotFound` when it does not exist, or only with another UID; `Unavailable` when the API server is unreachable.
        """
        ...

    async def find_namespace(self, name: str) -> Mapping[str, str]:
        """The labels of a namespace that is not in the store yet; errors as in `find`."""
        ...

    def cached(self, pod: PodRef) -> PodInfo | None:
        """The pod with this name and UID, if it is cached. Sends no request."""
        ...

    # Not async: an event must never delay an ADD, so it is queued and may be lost.
    def record_event(self, pod: PodRef, *, reason: str, message: str) -> None:
        """Record an Event on the pod, as `kubectl describe` shows it. `reason` is one word in camel case."""
        ...

    async def run(self) -> None:
        """List and watch until cancelled."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ResourceHandler(Protocol):
    """Receives the resources of the informers as documents. Called from the event loop; must not raise.

    Documents of services and slices carry the default tenant; the handler derives the tenant from their namespace.
    """

    def replace(self, kind: Kind[Any], documents: Sequence[Value]) -> None:
        """A full listing of a kind: everything that is not listed is deleted."""
        ...

    def put(self, kind: Kind[Any], document: Value) -> None:
        """A resource was added or modified."""
        ...

    def remove(self, kind: Kind[Any], document: Value) -> None:
        """A resource was deleted; the document is its last state."""
        ...


class ClusterInformers(Protocol):
    """Informers for the cluster-wide resources."""

    @property
    def faults(self) -> Sequence[str]:
        """Why some watches do not work now, one text for each; empty while all do."""
        ...

    def record_policy_event(
        self, *, namespace: str, name: str, uid: str, reason: str, message: str, warning: bool
    ) -> None:
        """Record an Event on a policy, a Warning if `warning`, else Normal. `reason` is one word in camel case."""
        ...

    async def run(self, handler: ResourceHandler) -> None:
        """List and watch until cancelled."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetmasterEndpoint:
    """The address of a netmaster: URLs of its store and of node enrollment, and the CA certificate in PEM."""

    store: str
    join: str
    # Agents pin this CA: TLS needs no other trust on the node.
    ca: str


class Discovery(Protocol):
    """How netmaster and agents of one cluster find each other."""

    async def read(self) -> NetmasterEndpoint | None:
        """The endpoint that netmaster published last; None before the first."""
        ...

    async def publish(self, endpoint: NetmasterEndpoint) -> None:
        """Publish the endpoint for agents; the last write wins."""
        ...

    async def review_token(self, token: str) -> str:
        """The node of the agent that a service account token belongs to (TokenReview); `Denied` with the reason."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Orchestrator(Protocol):
    """The interfaces of one orchestrator."""

    def pods(self, *, node: str) -> Pods:
        """Informer of the pods of a node."""
        ...

    def informers(self) -> ClusterInformers:
        """Informers for the cluster-wide resources."""
        ...

    def discovery(self) -> Discovery:
        """Discovery of netmaster and authentication of agents."""
        ...
