"""Decodes NetworkPolicies, failing closed.

The API server has admitted the policy, so it cannot be rejected any more, and a policy that is not enforced leaves its
pods open. What cannot be decoded allows nothing, and the document's `fault` says so:

- a rule, such as one with a member of a newer Kubernetes that narrows it, is dropped;
- with an unknown member of `spec` or unreadable policyTypes no rule is kept;
- with an unreadable podSelector the policy isolates all pods of its namespace, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from weft.domain.errors import Invalid
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.compile.limits import excess_of
from weft.domain.policy.model.netpol import (
    MODE_ANNOTATION,
    EgressRule,
    IngressRule,
    Metadata,
    NetworkPolicy,
    PolicySpec,
    validate,
)
from weft.domain.selectors import LabelSelector, parse_label_selector

R = TypeVar("R", IngressRule, EgressRule)

_TYPES = ("Ingress", "Egress")
_SPEC_MEMBERS = frozenset({"podSelector", "policyTypes", "ingress", "egress"})
# It becomes part of an Event, which takes 1,024 characters.
_MAX_FAULT = 900


def decode_policy(data: bytes) -> KubePolicy:
    """Decode a v1 NetworkPolicy; `Invalid` only when its namespace is unknown, as then no pods are known to isolate."""
    document = msgspec.json.decode(data)
    metadata = _mapping(_mapping(document).get("metadata"))
    faults: list[str] = []
    namespace, name = _key(metadata, faults)
    spec = _decode_spec(_mapping(document).get("spec"), faults)
    # Anything else than `audit`, a typing error too, enforces. A policy with a fault is enforced all the same.
    audit = _mapping(metadata.get("annotations")).get(MODE_ANNOTATION) == "audit"
    uid = metadata.get("uid")
    policy = KubePolicy(
        namespace=namespace,
        name=name,
        uid=uid if isinstance(uid, str) else "",
        mode="audit" if audit else "enforce",
        spec=spec,
        fault="; ".join(faults)[:_MAX_FAULT],
    )
    excess = excess_of(policy.policy)
    return policy.fail_closed(excess) if excess else policy


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _key(metadata: Mapping[str, Any], faults: list[str]) -> tuple[str, str]:
    """The namespace and the name; a name that cannot be part of a store key gets a stand-in."""
    namespace, name = metadata.get("namespace"), metadata.get("name")
    if not isinstance(namespace, str):
        raise Invalid("the policy has no namespace", field="metadata.namespace")
    _check_key(namespace, "x")
    try:
        if not isinstance(name, str):
            raise Invalid("is not a text", field="metadata.name")
        _check_key(namespace, name)
    except Invalid as error:
        faults.append(f"metadata.name: {error.message}")
        return namespace, f"unreadable-{blake2b(repr(name).encode(), digest_size=8).hexdigest()}"
    return namespace, name


def _check_key(namespace: str, name: str) -> None:
    validate(NetworkPolicy(metadata=Metadata(name=name, namespace=namespace)))


def _decode_spec(raw: object, faults: list[str]) -> PolicySpec:
    if raw is not None and not isinstance(raw, dict):
        faults.append("spec: is not an object")
        return PolicySpec(policy_types=_TYPES)
    members = _mapping(raw)
    try:
        selector = _decode_selector(members.get("podSelector"))
    except (msgspec.ValidationError, Invalid) as error:
        faults.append(f"podSelector: {error}; the policy isolates all pods of its namespace")
        return PolicySpec(policy_types=_TYPES)
    try:
        types = _decode_types(members.get("policyTypes"))
    except (msgspec.ValidationError, Invalid) as error:
        faults.append(f"policyTypes: {error}")
        return PolicySpec(pod_selector=selector, policy_types=_TYPES)
    # Kubernetes' defaulting, by what was declared: a rule that is dropped below still isolates.
    isolated = types or (_TYPES if members.get("egress") else _TYPES[:1])
    if unknown := sorted(members.keys() - _SPEC_MEMBERS):
        faults.append(f"spec: the members {', '.join(unknown)[:200]} are unknown")
        # An unknown member may say what policyTypes does not.
        return PolicySpec(pod_selector=selector, policy_types=types or _TYPES)
    known_faults = len(faults)
    ingress = _decode_rules(members.get("ingress"), "ingress", IngressRule, faults)
    egress = _decode_rules(members.get("egress"), "egress", EgressRule, faults)
    # Spelled out only if needed, so that absent and declared types stay apart in the store.
    return PolicySpec(
        pod_selector=selector,
        policy_types=isolated if len(faults) > known_faults else types,
        ingress=ingress,
        egress=egress,
    )


def _decode_selector(raw: object) -> LabelSelector | None:
    """The pod selector. An absent one is the empty one."""
    if raw is None:
        return None
    selector = msgspec.convert(raw, LabelSelector)
    parse_label_selector(selector, field="podSelector")
    return selector


def _decode_types(raw: object) -> tuple[str, ...] | None:
    if raw is None:
        return None
    types = msgspec.convert(raw, tuple[str, ...])
    validate(NetworkPolicy(metadata=Metadata(name="x"), spec=PolicySpec(policy_types=types)))
    return types


def _decode_rules(raw: object, member: str, kind: type[R], faults: list[str]) -> tuple[R, ...] | None:
    """The valid rules of one direction; adds the others to `faults`."""
    # Absent stays None. With policyTypes Egress, an empty list denies all egress, and so does an absent one.
    if raw is None:
        return None
    if not isinstance(raw, list):
        faults.append(f"{member}: is not a list")
        return ()
    rules: list[R] = []
    for index, raw_rule in enumerate(raw):
        try:
            rule = msgspec.convert(raw_rule, kind)
            # Rules are independent: a policy whose rules are valid one by one is valid.
            spec: dict[str, Any] = {member: (rule,)}
            validate(NetworkPolicy(metadata=Metadata(name="x"), spec=PolicySpec(**spec)))
            rules.append(rule)
        except (msgspec.ValidationError, Invalid) as error:
            faults.append(f"{member}[{index}]: {error}")
    return tuple(rules)
