"""Reads a table of expected NetworkPolicy verdicts and replays its cases in a policy engine.

The file is JSON, gzipped or plain: cases made of steps. The actions of a step change policies. Its `resources` are all
namespaces and pods after the step, and every row of `expected` must hold then. One engine replays all steps of a case,
so incremental updates are verified too.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft.domain.errors import Malformed
from weft.domain.model import PodPort
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.model.identities import IdentityKey, Namespace, Pod
from weft.domain.policy.model.netpol import read_network_policy
from weft.domain.policy.model.protocols import protocol_number

# Recognized by content: the file name is the user's choice.
_GZIP_MAGIC = b"\x1f\x8b"


class _Port(msgspec.Struct, frozen=True, rename="camel"):
    port: int
    protocol: str
    port_name: str = ""


class _Pod(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    ip: str
    labels: dict[str, str] | None = None
    ports: tuple[_Port, ...] | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class _Resources(msgspec.Struct, frozen=True):
    namespaces: dict[str, dict[str, str] | None] = {}
    pods: tuple[_Pod, ...] = ()


class _PolicyDocument(msgspec.Struct, frozen=True, rename="pascal"):
    policy: dict[str, object]


class _Ref(msgspec.Struct, frozen=True, rename="pascal"):
    namespace: str
    name: str = ""


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """Exactly one member is set.

    Members typed `object` are ignored: the step's `resources` already hold the pods and labels that they lead to.
    """

    create_policy: _PolicyDocument | None = None
    update_policy: _PolicyDocument | None = None
    delete_policy: _Ref | None = None
    read_network_policies: object = None
    create_namespace: object = None
    set_namespace_labels: object = None
    delete_namespace: _Ref | None = None
    create_pod: object = None
    set_pod_labels: object = None
    delete_pod: object = None


class ExpectedVerdict(msgspec.Struct, frozen=True, array_like=True):
    """A row of a table: `allowed` or `blocked` at the destination, at the source, and combined."""

    source: str
    target: str
    protocol: str
    port: int | str | None
    ingress: str
    egress: str
    combined: str


class _StepDocument(msgspec.Struct, frozen=True):
    resources: _Resources
    expected: tuple[ExpectedVerdict, ...]
    actions: tuple[_Action, ...] | None = None


class Case(msgspec.Struct, frozen=True):
    """Steps that build on each other."""

    steps: tuple[_StepDocument, ...]
    description: str = ""


class _Table(msgspec.Struct, frozen=True):
    cases: tuple[Case, ...]


class Step(NamedTuple):
    """The engine after a step of a case, what the step changed, and the verdicts expected now."""

    name: str
    is_first: bool
    engine: Engine
    affected: Affected
    rows: tuple[ExpectedVerdict, ...]

    def flow(self, row: ExpectedVerdict) -> Flow:
        """The flow of a row. A named port is resolved at the destination pod, as Kubernetes does."""
        protocol = protocol_number(row.protocol)
        port = row.port if isinstance(row.port, int) else self._named_port(row, protocol)
        return self.engine.directory.flow(row.source, row.target, protocol=protocol, port=port)

    def _named_port(self, row: ExpectedVerdict, protocol: int) -> int:
        target = self.engine.directory.get(IdentityKey(row.target))
        for port in target.ports if target else ():
            if (port.name, port.protocol) == (row.port, protocol):
                return port.port
        raise Malformed(f"{row.target} has no {row.protocol} port {row.port!r}")


def read_cases(path: Path) -> tuple[Case, ...]:
    """Read the cases of a file; `Malformed` if it is not a table of cases."""
    try:
        raw = path.read_bytes()
        return msgspec.json.decode(gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw, type=_Table).cases
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise Malformed(f"{path} is not a readable table of cases: {error}") from error


def walk(case: Case, node_of: Callable[[str], str]) -> Iterator[Step]:
    """Replay the steps of a case. `node_of` maps a pod to its node."""
    # Policies are remembered because the table does not delete them with their namespace.
    engine, policies, before = Engine(), set[tuple[str, str]](), _Resources()
    for number, step in enumerate(case.steps, start=1):
        affected = [
            *(change for action in step.actions or () for change in _apply_action(action, engine, policies)),
            *_apply_resources(engine, before=before, after=step.resources, node_of=node_of),
        ]
        before = step.resources
        yield Step(
            name=f"{case.description}, step {number}",
            is_first=number == 1,
            engine=engine,
            affected=reduce(or_, affected, Affected()),
            # The table marks flows that cannot exist, such as to a port that the pod does not have, as invalid.
            rows=tuple(row for row in step.expected if not row.combined.startswith("invalid")),
        )


def _apply_action(action: _Action, engine: Engine, policies: set[tuple[str, str]]) -> Iterator[Affected]:
    if document := action.create_policy or action.update_policy:
        policy = read_network_policy(document.policy)
        yield engine.put(policy)
        policies.add((policy.metadata.namespace, policy.metadata.name))
    if deleted := action.delete_policy:
        yield engine.remove_network_policy(deleted.namespace, deleted.name)
    if deleted_namespace := action.delete_namespace:
        # Kubernetes deletes the policies of a namespace with it; the table has no actions for that.
        for namespace, name in policies:
            if namespace == deleted_namespace.namespace:
                yield engine.remove_network_policy(namespace, name)


def _apply_resources(
    engine: Engine, *, before: _Resources, after: _Resources, node_of: Callable[[str], str]
) -> Iterator[Affected]:
    for name in before.namespaces.keys() - after.namespaces.keys():
        yield engine.remove_namespace(name)
    for name, labels in after.namespaces.items():
        yield engine.put(Namespace(name=name, labels=labels or {}))
    # Pods that stay are put again too: the engine must treat an unchanged object as no change.
    kept = {pod.key for pod in after.pods}
    for pod in before.pods:
        if pod.key not in kept:
            yield engine.remove_pod(pod.namespace, pod.name)
    for pod in after.pods:
        yield engine.put(
            Pod(
                namespace=pod.namespace,
                name=pod.name,
                labels=pod.labels or {},
                ips=(pod.ip,),
                ports=tuple(
                    PodPort(port.port_name, protocol_number(port.protocol), port.port) for port in pod.ports or ()
                ),
                node=node_of(pod.key),
            )
        )
