"""Decodes NetworkPolicies, failing closed.

The API server has admitted the policy, so it cannot be rejected any more. A rule that cannot be decoded, such as one
with a member of a newer Kubernetes that narrows it, is dropped: it allows nothing. The document's `fault` says so.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weft.adapters.kubernetes.objects import Metadata
from weft.domain.errors import Invalid
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.model.netpol import MODE_ANNOTATION, EgressRule, IngressRule, PolicySpec, validate
from weft.domain.selectors import LabelSelector

R = TypeVar("R", IngressRule, EgressRule)


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    """A NetworkPolicySpec whose rules are decoded one by one."""

    pod_selector: LabelSelector | None = None
    policy_types: tuple[str, ...] | None = None
    ingress: list[msgspec.Raw] | None = None
    egress: list[msgspec.Raw] | None = None


class _Policy(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _Spec = _Spec()


_decode = msgspec.json.Decoder(_Policy).decode


def decode_policy(data: bytes) -> KubePolicy:
    """Decode a v1 NetworkPolicy; `Invalid` when its pod selector is, as then no pods are known to isolate."""
    policy = _decode(data)
    without_rules = PolicySpec(pod_selector=policy.spec.pod_selector, policy_types=policy.spec.policy_types)
    validate(_document(policy, without_rules, []).policy)
    faults: list[str] = []
    spec = msgspec.structs.replace(
        without_rules,
        ingress=_decode_rules(policy, "ingress", IngressRule, faults),
        egress=_decode_rules(policy, "egress", EgressRule, faults),
    )
    return _document(policy, spec, faults)


def _decode_rules(policy: _Policy, member: str, kind: type[R], faults: list[str]) -> tuple[R, ...] | None:
    """The valid rules of one direction; adds the others to `faults`."""
    raw_rules: list[msgspec.Raw] | None = getattr(policy.spec, member)
    # Absent stays None. With policyTypes Egress, an empty list denies all egress, and so does an absent one.
    if raw_rules is None:
        return None
    rules: list[R] = []
    for index, raw in enumerate(raw_rules):
        try:
            rule = msgspec.json.decode(raw, type=kind)
            # Rules are independent: a policy whose rules are valid one by one is valid.
            spec: dict[str, Any] = {member: (rule,)}
            validate(_document(policy, PolicySpec(**spec), []).policy)
            rules.append(rule)
        except (msgspec.ValidationError, Invalid) as error:
            faults.append(f"{member}[{index}]: {error}")
    return tuple(rules)


def _document(policy: _Policy, spec: PolicySpec, faults: list[str]) -> KubePolicy:
    return KubePolicy(
        namespace=policy.metadata.namespace,
        name=policy.metadata.name,
        uid=policy.metadata.uid,
        # Anything else than `audit`, a typing error too, enforces.
        mode="audit" if policy.metadata.annotations.get(MODE_ANNOTATION) == "audit" else "enforce",
        spec=spec,
        fault="; ".join(faults)[:1000],  # it becomes part of an Event, which takes 1,024 characters
    )
