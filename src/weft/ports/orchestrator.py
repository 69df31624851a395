"""The Orchestrator port: what the one who starts workloads says about them.

Three sides, which may be had apart:

- **Pods** are those of one node, for its agent. What was heard is kept, so that pods are known while the orchestrator
  is away.
- **Declarations** are what holds for the whole cluster (namespaces, policies, services). They are followed once, by the
  leading netmaster, and reach the nodes through the store (docs/adr/0009).
- **Meeting** is how agents find netmaster, and how netmaster knows them (docs/design/joining.md).

All are opened and closed as async context managers; the first two do nothing before `run`. Errors are
`weft.domain.errors`.
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
    """A pod, as a runtime names it. Runtimes of old name no `uid`."""

    namespace: str
    name: str
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """A pod, as the orchestrator describes it now."""

    ref: PodRef
    labels: Mapping[str, str]
    ports: tuple[PodPort, ...] = ()


class Pods(Protocol):
    """The pods of one node."""

    # Set whenever something about them may be another than before; whoever looks clears it first.
    news: asyncio.Event

    @property
    def fault(self) -> str:
        """Why the orchestrator tells nothing now; empty while it does."""
        ...

    async def find(self, pod: PodRef) -> PodFacts:
        """That very pod. One that was not heard of yet is asked for, for a few seconds at most.

        `NotFound` when there is none, or one of the same name only; `Unavailable` when nobody can say.
        """
        ...

    async def find_namespace(self, name: str) -> Mapping[str, str]:
        """The labels of a namespace that the cluster does not know yet; errors as in `find`."""
        ...

    def known(self, pod: PodRef) -> PodFacts | None:
        """That very pod, if it was heard of. Asks nobody."""
        ...

    def tell(self, pod: PodRef, *, reason: str, message: str) -> None:
        """Tell people who look at the pod what went wrong. `reason` is one word in camel case."""
        ...

    async def run(self) -> None:
        """Follow for ever."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ResourceHandler(Protocol):
    """Whoever keeps declarations, each of which is a document. Called from the event loop; must not raise.

    Documents of services and slices have the default tenant: whose they are follows from their namespace.
    """

    def replace(self, kind: Kind[Any], documents: Sequence[Value]) -> None:
        """All of a kind; what is not listed is gone."""
        ...

    def put(self, kind: Kind[Any], document: Value) -> None:
        """One is new, or another than before."""
        ...

    def remove(self, kind: Kind[Any], document: Value) -> None:
        """One is gone; here it is as it was last."""
        ...


class ClusterInformers(Protocol):
    """What holds for the whole cluster."""

    @property
    def faults(self) -> Sequence[str]:
        """Why the orchestrator tells nothing now, or not all."""
        ...

    def tell_of_policy(self, *, namespace: str, name: str, uid: str, reason: str, message: str, fault: bool) -> None:
        """Tell people who look at a policy what has become of it. `reason` is one word in camel case."""
        ...

    async def run(self, keeper: ResourceHandler) -> None:
        """Follow for ever."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetmasterEndpoint:
    """Where a netmaster is, as URLs of its store and of where nodes join, and the authority it is known by, in PEM."""

    store: str
    join: str
    ca: str


class Discovery(Protocol):
    """Where netmaster and agents of one cluster meet."""

    async def read(self) -> NetmasterEndpoint | None:
        """What netmaster has published last; None where there is nothing yet."""
        ...

    async def publish(self, notice: NetmasterEndpoint) -> None:
        """Tell agents; the last word counts."""
        ...

    async def node_of(self, token: str) -> str:
        """The node on which the agent is whose token this is; `Denied` when it is no agent's, with the reason."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Orchestrator(Protocol):
    """All sides of one orchestrator."""

    def pods(self, *, node: str) -> Pods:
        """The pods of a node."""
        ...

    def declarations(self) -> ClusterInformers:
        """What holds for the whole cluster."""
        ...

    def meeting(self) -> Discovery:
        """Where netmaster and agents meet."""
        ...
