"""NetworkPolicy as the API server has it -> the document that is kept of it.

The server has accepted the policy, and pods run under it, so it cannot be refused any more. What cannot be read of it
(a member that a newer Kubernetes has, which may narrow a rule in a way we do not know) is left out so that nothing is
wider than it was meant: its rule allows nothing, and the document says so.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weft.adapters.kubernetes.objects import Metadata
from weft.domain.errors import Invalid
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.model.netpol import DRY_RUN_ANNOTATION, EgressRule, IngressRule, PolicySpec, validate
from weft.domain.selectors import LabelSelector

R = TypeVar("R", IngressRule, EgressRule)


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    """A spec whose rules are still to be read."""

    pod_selector: LabelSelector | None = None
    policy_types: tuple[str, ...] | None = None
    ingress: list[msgspec.Raw] | None = None
    egress: list[msgspec.Raw] | None = None


class _Policy(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _Spec = _Spec()


_read = msgspec.json.Decoder(_Policy).decode


def read_policy(data: bytes) -> KubePolicy:
    """A v1 NetworkPolicy. One whose selector cannot be read is refused: nobody knows whom it protects."""
    found = _read(data)
    bare = PolicySpec(pod_selector=found.spec.pod_selector, policy_types=found.spec.policy_types)
    validate(_document(found, bare, []).policy)
    faults: list[str] = []
    spec = msgspec.structs.replace(
        bare,
        ingress=_rules(found, "ingress", IngressRule, faults),
        egress=_rules(found, "egress", EgressRule, faults),
    )
    return _document(found, spec, faults)


def _rules(found: _Policy, member: str, kind: type[R], faults: list[str]) -> tuple[R, ...] | None:
    """The rules of a direction that can be read and are valid, alone and so all together; absent stays absent."""
    raw: list[msgspec.Raw] | None = getattr(found.spec, member)
    if raw is None:
        return None
    rules: list[R] = []
    for index, each in enumerate(raw):
        try:
            rule = msgspec.json.decode(each, type=kind)
            alone: dict[str, Any] = {member: (rule,)}
            validate(_document(found, PolicySpec(**alone), []).policy)
            rules.append(rule)
        except (msgspec.ValidationError, Invalid) as error:
            faults.append(f"{member}[{index}]: {error}")
    return tuple(rules)


def _document(found: _Policy, spec: PolicySpec, faults: list[str]) -> KubePolicy:
    return KubePolicy(
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        uid=found.metadata.uid,
        dry_run=found.metadata.annotations.get(DRY_RUN_ANNOTATION) == "true",
        spec=spec,
        fault="; ".join(faults)[:1000],
    )
