"""Compiles a Kubernetes NetworkPolicy to rules.

A policy isolates the pods it selects in each of its policy types: one rule per entry allows, and one rule of lower
priority denies the rest. So the allows of several policies add up, a pod that no policy selects is not isolated, and
even the default deny has a rule id to report. Isolation covers every protocol; the ports of an entry are TCP, UDP or
SCTP only.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from weft.domain.errors import Invalid
from weft.domain.policy.model.netpol import NetworkPolicy, PolicyPeer, PolicyPort, parse_ip_block, validate
from weft.domain.policy.model.protocols import TCP, protocol_number
from weft.domain.policy.model.ranges import address_set
from weft.domain.policy.model.rules import (
    Action,
    CompiledPolicy,
    Direction,
    FlowRule,
    Peer,
    PodsOfNamespace,
    PodsOfNamespaces,
    PolicyId,
    PortMatch,
    RuleId,
    Tier,
)
from weft.domain.selectors import EVERYTHING, LabelSelector, Selector, parse_label_selector

# All allows of all policies outrank all isolation rules of the tier; so the order of policies never matters.
_ALLOW_PRIORITY, _ISOLATION_PRIORITY = 1, 0
_PREFIX, _ISOLATION = "k8s/", "/isolation"

_Entry = tuple[tuple[PolicyPeer, ...] | None, tuple[PolicyPort, ...] | None]


def policy_id(namespace: str, name: str) -> PolicyId:
    return PolicyId(f"{_PREFIX}{namespace}/{name}")


def is_isolation(rule: RuleId) -> bool:
    """Return whether this is the default-deny rule of a policy."""
    return rule.startswith(_PREFIX) and rule.endswith(_ISOLATION)


def compile_network_policy(policy: NetworkPolicy) -> CompiledPolicy:
    """Return the policy's rules and the pods it selects; `Invalid` if the policy is not valid."""
    validate(policy)
    spec = policy.spec
    rules: list[FlowRule] = []
    if spec.isolates_ingress:
        rules += _compile_direction(
            policy, Direction.INGRESS, [(rule.from_, rule.ports) for rule in spec.ingress or ()]
        )
    if spec.isolates_egress:
        rules += _compile_direction(policy, Direction.EGRESS, [(rule.to, rule.ports) for rule in spec.egress or ()])
    return CompiledPolicy(
        id=policy_id(policy.metadata.namespace, policy.metadata.name),
        subjects=(PodsOfNamespace(policy.metadata.namespace, _selector(spec.pod_selector)),),
        rules=tuple(rules),
    )


def compile_closed(policy: NetworkPolicy) -> CompiledPolicy:
    """Return a policy that isolates the same pods and allows them nothing, whatever is wrong with the policy.

    If even its pod selector is invalid, it isolates all pods of its namespace.
    """
    try:
        pods = _selector(policy.spec.pod_selector)
        isolated = [policy.spec.isolates_ingress, policy.spec.isolates_egress]
        validate(replace(policy, spec=replace(policy.spec, ingress=None, egress=None)))
    except Invalid:
        pods, isolated = EVERYTHING, [True, True]
    directions = [each for each, closed in zip((Direction.INGRESS, Direction.EGRESS), isolated, strict=True) if closed]
    return CompiledPolicy(
        id=policy_id(policy.metadata.namespace, policy.metadata.name),
        subjects=(PodsOfNamespace(policy.metadata.namespace, pods),),
        rules=tuple(rule for each in directions for rule in _compile_direction(policy, each, [])),
    )


def _compile_direction(policy: NetworkPolicy, direction: Direction, entries: list[_Entry]) -> Iterator[FlowRule]:
    prefix = f"{policy_id(policy.metadata.namespace, policy.metadata.name)}/{direction}"
    for index, (peers, ports) in enumerate(entries):
        yield FlowRule(
            id=RuleId(f"{prefix}/{index}"),
            tier=Tier.NAMESPACE,
            direction=direction,
            action=Action.ALLOW,
            priority=_ALLOW_PRIORITY,
            # Empty `from` and `to` mean any peer, as absent ones do (the API's rule), hence None rather than ().
            peers=_compile_peers(peers, policy.metadata.namespace) if peers else None,
            services=tuple(_compile_port(port) for port in ports) if ports else None,
            audit=policy.audit,
        )
    yield FlowRule(
        # Emitted even without entries: selecting a pod isolates it.
        id=RuleId(f"{prefix}{_ISOLATION}"),
        tier=Tier.NAMESPACE,
        direction=direction,
        action=Action.DENY,
        priority=_ISOLATION_PRIORITY,
        audit=policy.audit,
    )


def _compile_peers(peers: tuple[PolicyPeer, ...], namespace: str) -> tuple[Peer, ...]:
    """The peers of one entry. Its ipBlocks become one address set, which is one identity instead of thousands."""
    blocks = [parse_ip_block(peer.ip_block, field="ipBlock") for peer in peers if peer.ip_block is not None]
    compiled = [_compile_selectors(peer, namespace) for peer in peers if peer.ip_block is None]
    if blocks:
        plain = [whole for whole, holes in blocks if not holes]
        # The exceptions of a block are cut from that block alone, not from what other blocks allow.
        cut = (span for whole, holes in blocks if holes for span in address_set([whole], without=holes).ranges)
        compiled.append(Peer(addresses=address_set([*plain, *cut])))
    return tuple(compiled)


def _compile_selectors(peer: PolicyPeer, namespace: str) -> Peer:
    pods = _selector(peer.pod_selector)
    # Absent means the policy's own namespace; empty means every namespace.
    if peer.namespace_selector is None:
        return Peer(members=PodsOfNamespace(namespace, pods))
    return Peer(members=PodsOfNamespaces(_selector(peer.namespace_selector), pods))


def _compile_port(port: PolicyPort) -> PortMatch:
    # The API's default protocol is TCP.
    protocols = (protocol_number(port.protocol),) if port.protocol else (TCP,)
    if port.port is None:
        return PortMatch(protocols=protocols)
    if isinstance(port.port, str):
        return PortMatch(protocols=protocols, name=port.port)
    return PortMatch(protocols=protocols, first=port.port, last=port.end_port or port.port)


def _selector(source: LabelSelector | None) -> Selector:
    return EVERYTHING if source is None else parse_label_selector(source, field="selector")
