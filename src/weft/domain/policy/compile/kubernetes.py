"""NetworkPolicy -> the intermediate form.

A policy isolates the pods it selects in each direction it speaks about: one rule per entry allows, and below all of
them one rule denies the rest. So allows of several policies add up, a pod that no policy selects stays open, and even a
default deny has a name. Isolation covers every protocol; the services of an entry are TCP, UDP and SCTP only.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    PortMatch,
    RuleId,
    Tier,
    UnitId,
)
from weft.domain.selectors import EVERYTHING, LabelSelector, Selector, parse_label_selector

_ALLOW_PRIORITY, _ISOLATION_PRIORITY = 1, 0
_PREFIX, _ISOLATION = "k8s/", "/isolation"

_Entry = tuple[tuple[PolicyPeer, ...] | None, tuple[PolicyPort, ...] | None]


def unit_id(namespace: str, name: str) -> UnitId:
    return UnitId(f"{_PREFIX}{namespace}/{name}")


def is_isolation(rule: RuleId) -> bool:
    """Whether this is the rule of a policy that denies what no entry allows."""
    return rule.startswith(_PREFIX) and rule.endswith(_ISOLATION)


def compile_network_policy(policy: NetworkPolicy) -> CompiledPolicy:
    """The policy's rules and the pods they protect; `Invalid` when it is not a valid policy."""
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
        id=unit_id(policy.metadata.namespace, policy.metadata.name),
        subjects=(PodsOfNamespace(policy.metadata.namespace, _selector(spec.pod_selector)),),
        rules=tuple(rules),
    )


def _compile_direction(policy: NetworkPolicy, direction: Direction, entries: list[_Entry]) -> Iterator[FlowRule]:
    prefix = f"{unit_id(policy.metadata.namespace, policy.metadata.name)}/{direction}"
    for index, (peers, ports) in enumerate(entries):
        yield FlowRule(
            id=RuleId(f"{prefix}/{index}"),
            tier=Tier.NAMESPACE,
            direction=direction,
            action=Action.ALLOW,
            priority=_ALLOW_PRIORITY,
            peers=tuple(_compile_peer(peer, policy.metadata.namespace) for peer in peers) if peers else None,
            services=tuple(_compile_port(port) for port in ports) if ports else None,
            dry_run=policy.dry_run,
        )
    yield FlowRule(
        id=RuleId(f"{prefix}{_ISOLATION}"),
        tier=Tier.NAMESPACE,
        direction=direction,
        action=Action.DENY,
        priority=_ISOLATION_PRIORITY,
        dry_run=policy.dry_run,
    )


def _compile_peer(peer: PolicyPeer, namespace: str) -> Peer:
    if peer.ip_block is not None:
        whole, holes = parse_ip_block(peer.ip_block, field="ipBlock")
        return Peer(addresses=address_set([whole], without=holes))
    pods = _selector(peer.pod_selector)
    if peer.namespace_selector is None:
        return Peer(members=PodsOfNamespace(namespace, pods))
    return Peer(members=PodsOfNamespaces(_selector(peer.namespace_selector), pods))


def _compile_port(port: PolicyPort) -> PortMatch:
    protocols = (protocol_number(port.protocol),) if port.protocol else (TCP,)
    if port.port is None:
        return PortMatch(protocols=protocols)
    if isinstance(port.port, str):
        return PortMatch(protocols=protocols, name=port.port)
    return PortMatch(protocols=protocols, first=port.port, last=port.end_port or port.port)


def _selector(source: LabelSelector | None) -> Selector:
    return EVERYTHING if source is None else parse_label_selector(source, field="selector")
