"""`weft oracle netpol FILE`: judge the policy engine by a table of right answers for NetworkPolicy.

The file is JSON, gzipped or plain: cases made of steps. The actions of a step change policies, its `resources` are the
namespaces and pods that the step's other actions lead to, and every row of `expected` must hold then. One engine goes
through all steps of a case, so its incremental side is judged too.
"""

from __future__ import annotations

import argparse
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from weft.domain.errors import Malformed
from weft.domain.policy.engine import Engine
from weft.domain.policy.identities import IdentityKey, Namespace, Pod, PodPort
from weft.domain.policy.netpol import read_network_policy
from weft.domain.policy.protocols import protocol_number
from weft.domain.policy.rules import Action

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


class _Resources(msgspec.Struct, frozen=True):
    namespaces: dict[str, dict[str, str] | None] = {}
    pods: tuple[_Pod, ...] = ()


class _PolicyDocument(msgspec.Struct, frozen=True, rename="pascal"):
    policy: dict[str, object]


class _Ref(msgspec.Struct, frozen=True, rename="pascal"):
    namespace: str
    name: str = ""


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """One member is set. What happens to pods and labels is told by the step's resources, so it needs no form here."""

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


class _Row(msgspec.Struct, frozen=True, array_like=True):
    source: str
    target: str
    protocol: str
    port: int | str | None
    ingress: str
    egress: str
    combined: str


class _Step(msgspec.Struct, frozen=True):
    resources: _Resources
    expected: tuple[_Row, ...]
    actions: tuple[_Action, ...] | None = None


class _Case(msgspec.Struct, frozen=True):
    steps: tuple[_Step, ...]
    description: str = ""


class _Table(msgspec.Struct, frozen=True):
    cases: tuple[_Case, ...]


def main(argv: Sequence[str]) -> int:
    """Print each row that differs, then `agree N of M`; 1 when a row differs. `Malformed` when the file is no table."""
    parser = argparse.ArgumentParser(prog="weft oracle", description="Judge the policy engine by right answers.")
    parser.add_argument("kind", choices=["netpol"], help="netpol: Kubernetes NetworkPolicy")
    parser.add_argument("file", type=Path, help="a table of cases, JSON or gzipped JSON")
    args = parser.parse_args(argv)
    agreed = judged = 0
    for case in _read_table(args.file).cases:
        for difference in _judge(case):
            judged += 1
            if difference is None:
                agreed += 1
            else:
                print(difference)
    print(f"agree {agreed} of {judged}")
    return 0 if agreed == judged else 1


def _read_table(path: Path) -> _Table:
    try:
        raw = path.read_bytes()
        return msgspec.json.decode(gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw, type=_Table)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
        raise Malformed(f"{path} is not a readable table of cases: {error}") from error


def _judge(case: _Case) -> Iterator[str | None]:
    """For every row that makes sense: None where the engine agrees, else the difference in words."""
    engine, policies, before = Engine(), set[tuple[str, str]](), _Resources()
    for number, step in enumerate(case.steps, start=1):
        for action in step.actions or ():
            _carry_out(action, engine, policies)
        _follow(engine, before=before, after=step.resources)
        before = step.resources
        for row in step.expected:
            if not row.combined.startswith("invalid"):
                difference = _difference(row, engine)
                yield difference and f"{case.description}, step {number}: {difference}"


def _carry_out(action: _Action, engine: Engine, policies: set[tuple[str, str]]) -> None:
    if document := action.create_policy or action.update_policy:
        policy = read_network_policy(document.policy)
        engine.put(policy)
        policies.add((policy.metadata.namespace, policy.metadata.name))
    if deleted := action.delete_policy:
        engine.remove_network_policy(deleted.namespace, deleted.name)
    if ended := action.delete_namespace:
        for namespace, name in policies:
            if namespace == ended.namespace:
                engine.remove_network_policy(namespace, name)


def _follow(engine: Engine, *, before: _Resources, after: _Resources) -> None:
    for name in before.namespaces.keys() - after.namespaces.keys():
        engine.remove_namespace(name)
    for name, labels in after.namespaces.items():
        engine.put(Namespace(name=name, labels=labels or {}))
    kept = {(pod.namespace, pod.name) for pod in after.pods}
    for pod in before.pods:
        if (pod.namespace, pod.name) not in kept:
            engine.remove_pod(pod.namespace, pod.name)
    for pod in after.pods:
        ports = tuple(PodPort(each.port_name, protocol_number(each.protocol), each.port) for each in pod.ports or ())
        engine.put(Pod(namespace=pod.namespace, name=pod.name, labels=pod.labels or {}, ips=(pod.ip,), ports=ports))


def _difference(row: _Row, engine: Engine) -> str | None:
    protocol = protocol_number(row.protocol)
    flow = engine.directory.flow(row.source, row.target, protocol=protocol, port=_port(row, engine, protocol))
    verdict = engine.verdict(flow)
    ours = _word(allowed=verdict.ingress.action is Action.ALLOW), _word(allowed=verdict.egress.action is Action.ALLOW)
    if (*ours, _word(allowed=verdict.allowed)) == (row.ingress, row.egress, row.combined):
        return None
    return (
        f"{flow}: expected ingress {row.ingress}, egress {row.egress}; "
        f"engine: ingress {ours[0]} by {verdict.ingress.id}, egress {ours[1]} by {verdict.egress.id}"
    )


def _port(row: _Row, engine: Engine, protocol: int) -> int:
    """The row's port as a number; a name is looked up at the target, as a client does."""
    if isinstance(row.port, int):
        return row.port
    target = engine.directory.get(IdentityKey(row.target))
    for port in target.ports if target else ():
        if (port.name, port.protocol) == (row.port, protocol):
            return port.port
    raise Malformed(f"{row.target} has no {row.protocol} port {row.port!r}")


def _word(*, allowed: bool) -> str:
    return "allowed" if allowed else "blocked"
