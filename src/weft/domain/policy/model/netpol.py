"""NetworkPolicy of networking.k8s.io/v1 as typed values, with its validation.

Fields below `spec` are decoded strictly: an unknown field may narrow a rule, and ignoring it would widen the rule.
Absent (`None`) and empty (`()`, `{}`) are kept apart in both directions of the codec.
"""

from __future__ import annotations

import re

import msgspec

from weft.domain.addresses import Range
from weft.domain.errors import Invalid, Malformed
from weft.domain.policy.model.protocols import MAX_PORT
from weft.domain.policy.model.ranges import parse_cidr
from weft.domain.selectors import LabelSelector, parse_label_selector

API_VERSION = "networking.k8s.io/v1"
KIND = "NetworkPolicy"
# Any other value enforces the policy: a typo must not disable it.
MODE_ANNOTATION = "weft/mode"
PROTOCOLS = ("TCP", "UDP", "SCTP")

# RFC 1123 labels and names; a port name is an IANA_SVC_NAME (RFC 6335).
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
# A name has no limit per label, unlike in DNS: Kubernetes allows 253 characters in all.
_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_PORT_NAME = re.compile(r"(?=.{1,15}\Z)(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")


class _Strict(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"
):
    """The base of everything below `spec`: unknown fields are rejected."""


class IpBlock(_Strict, frozen=True, kw_only=True):
    """The addresses of `cidr` without those of `except`."""

    cidr: str
    # The trailing underscore avoids a Python keyword, here and in `from_`.
    except_: tuple[str, ...] | None = msgspec.field(name="except", default=None)


class PolicyPeer(_Strict, frozen=True, kw_only=True):
    """Either `ipBlock`, or one or both selectors. An absent namespaceSelector means the policy's own namespace."""

    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    ip_block: IpBlock | None = None


class PolicyPort(_Strict, frozen=True, kw_only=True):
    """A protocol (TCP when absent) with all its ports, one port by number or name, or a range to `endPort`."""

    protocol: str | None = None
    port: int | str | None = None
    end_port: int | None = None


class IngressRule(_Strict, frozen=True, kw_only=True):
    """Absent or empty `from` means any peer, absent or empty `ports` means all traffic."""

    from_: tuple[PolicyPeer, ...] | None = msgspec.field(name="from", default=None)
    ports: tuple[PolicyPort, ...] | None = None


class EgressRule(_Strict, frozen=True, kw_only=True):
    """Absent or empty `to` means any peer, absent or empty `ports` means all traffic."""

    to: tuple[PolicyPeer, ...] | None = None
    ports: tuple[PolicyPort, ...] | None = None


class PolicySpec(_Strict, frozen=True, kw_only=True):
    """An absent podSelector is the empty one: every pod of the namespace."""

    pod_selector: LabelSelector | None = None
    policy_types: tuple[str, ...] | None = None
    ingress: tuple[IngressRule, ...] | None = None
    egress: tuple[EgressRule, ...] | None = None

    # Kubernetes' defaulting of policyTypes: Ingress always, Egress only if there are egress rules.
    @property
    def isolates_ingress(self) -> bool:
        return "Ingress" in self.policy_types if self.policy_types else True

    @property
    def isolates_egress(self) -> bool:
        return "Egress" in self.policy_types if self.policy_types else bool(self.egress)


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The object metadata that Weft uses."""

    name: str
    namespace: str = "default"
    annotations: dict[str, str] | None = None


class NetworkPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A NetworkPolicy object."""

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Metadata
    spec: PolicySpec = PolicySpec()

    @property
    def audit(self) -> bool:
        """Whether `weft/mode: audit` is set: the policy is evaluated and reported, but not enforced."""
        return (self.metadata.annotations or {}).get(MODE_ANNOTATION) == "audit"


def read_network_policy(document: object) -> NetworkPolicy:
    """Convert a decoded JSON document to a valid policy; `Malformed` or `Invalid` with the field at fault."""
    try:
        policy = msgspec.convert(document, NetworkPolicy)
    except msgspec.ValidationError as error:
        # msgspec has the path of the field in its message only.
        reason, _, path = str(error).partition(" - at `$")
        raise Malformed(f"not a NetworkPolicy: {reason}", field=path.strip(".`")) from error
    validate(policy)
    return policy


def validate(policy: NetworkPolicy) -> None:
    """Raise `Invalid` for the first field that Kubernetes' own validation rejects."""
    if (policy.api_version, policy.kind) != (API_VERSION, KIND):
        raise Invalid(f"expected {KIND} of {API_VERSION}, not {policy.kind} of {policy.api_version}", field="kind")
    # Names become parts of store keys and rule ids, so a slash in them must never pass.
    if not _DNS_NAME.fullmatch(policy.metadata.name):
        raise Invalid(f"{policy.metadata.name!r} is not a DNS name in lower case", field="metadata.name")
    if not _DNS_LABEL.fullmatch(policy.metadata.namespace):
        raise Invalid(f"{policy.metadata.namespace!r} is not a DNS label in lower case", field="metadata.namespace")
    spec = policy.spec
    if spec.pod_selector is not None:
        parse_label_selector(spec.pod_selector, field="spec.podSelector")
    if len(spec.policy_types or ()) > 2:
        raise Invalid("there are two policyTypes at most: Ingress, Egress", field="spec.policyTypes")
    for index, kind in enumerate(spec.policy_types or ()):
        if kind not in ("Ingress", "Egress"):
            raise Invalid(f"{kind!r} is unknown: use Ingress, Egress", field=f"spec.policyTypes[{index}]")
    for index, ingress in enumerate(spec.ingress or ()):
        _validate_rule(ingress.from_, ingress.ports, field=f"spec.ingress[{index}]", peers_field="from")
    for index, egress in enumerate(spec.egress or ()):
        _validate_rule(egress.to, egress.ports, field=f"spec.egress[{index}]", peers_field="to")


def _validate_rule(
    peers: tuple[PolicyPeer, ...] | None, ports: tuple[PolicyPort, ...] | None, *, field: str, peers_field: str
) -> None:
    for index, port in enumerate(ports or ()):
        _validate_port(port, field=f"{field}.ports[{index}]")
    for index, peer in enumerate(peers or ()):
        _validate_peer(peer, field=f"{field}.{peers_field}[{index}]")


def _validate_port(port: PolicyPort, *, field: str) -> None:
    if port.protocol is not None and port.protocol not in PROTOCOLS:
        raise Invalid(f"protocol {port.protocol!r} is unknown: use {', '.join(PROTOCOLS)}", field=f"{field}.protocol")
    if isinstance(port.port, int) and not 1 <= port.port <= MAX_PORT:
        raise Invalid(f"port {port.port} is not between 1 and {MAX_PORT}", field=f"{field}.port")
    if isinstance(port.port, str) and not _PORT_NAME.fullmatch(port.port):
        raise Invalid(
            f"{port.port!r} is not a port name: at most 15 lower-case letters, digits and inner hyphens, one letter",
            field=f"{field}.port",
        )
    # The number behind a named port depends on the pod, so endPort needs a numeric port.
    if port.end_port is None:
        return
    if not isinstance(port.port, int):
        raise Invalid("endPort needs a port given by number", field=f"{field}.endPort")
    if not port.port <= port.end_port <= MAX_PORT:
        raise Invalid(f"endPort {port.end_port} is not between {port.port} and {MAX_PORT}", field=f"{field}.endPort")


def _validate_peer(peer: PolicyPeer, *, field: str) -> None:
    selectors = (peer.pod_selector, peer.namespace_selector)
    # A peer without any member is rejected: it could be read as "any".
    if peer.ip_block is not None:
        if selectors != (None, None):
            raise Invalid("ipBlock stands alone: leave out the selectors", field=field)
        parse_ip_block(peer.ip_block, field=f"{field}.ipBlock")
    elif selectors == (None, None):
        raise Invalid("a peer needs podSelector, namespaceSelector or ipBlock", field=field)
    for selector, name in zip(selectors, ("podSelector", "namespaceSelector"), strict=True):
        if selector is not None:
            parse_label_selector(selector, field=f"{field}.{name}")


def parse_ip_block(block: IpBlock, *, field: str) -> tuple[Range, tuple[Range, ...]]:
    """Return the block's range and its exceptions, each of which must be a strict subset of the block."""
    cidr = parse_cidr(block.cidr, field=f"{field}.cidr")
    exceptions = []
    for index, text in enumerate(block.except_ or ()):
        exception = parse_cidr(text, field=f"{field}.except[{index}]")
        if not cidr.covers(exception) or exception == cidr:
            raise Invalid(f"{text} is not a strict subset of {block.cidr}", field=f"{field}.except[{index}]")
        exceptions.append(exception)
    return cidr, tuple(exceptions)
