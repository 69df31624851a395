"""A reference implementation of policy: slow, simple, and written from the specifications alone.

It shares only the input types with the engine. It has no index and compiles nothing: every query scans all objects.
Where the two disagree, one of them is wrong; property tests on random clusters look for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from weft.domain.model import Endpoint, Group, Network, PodPort, Policy, Rule
from weft.domain.policy.engine.engine import PolicyObject
from weft.domain.policy.model.identities import ApiServer, Host, Namespace, Pod
from weft.domain.policy.model.netpol import NetworkPolicy, PolicyPeer, PolicyPort
from weft.domain.selectors import LabelSelector

_TCP, _UDP, _SCTP = 6, 17, 132
_NUMBERS = {"TCP": _TCP, "UDP": _UDP, "SCTP": _SCTP, "tcp": _TCP, "udp": _UDP}


class _End(NamedTuple):
    """One end of a flow, with everything that a specification refers to."""

    address: str
    tenant: str = ""
    group: str = ""
    node: str = ""
    host: bool = False
    pod: Pod | None = None


class FlowSpec(NamedTuple):
    """The first packet of a flow. Ends have the identity keys of the engine."""

    source: str
    target: str
    protocol: int
    port: int
    version: int


class OracleVerdict(NamedTuple):
    """Whether the source and the destination allow a flow."""

    egress: bool
    ingress: bool


class PolicyOracle:
    """Evaluates flows against one state of the cluster."""

    def __init__(self, objects: Iterable[PolicyObject]) -> None:
        objects = list(objects)
        self._namespaces = {value.name: value for value in objects if isinstance(value, Namespace)}
        self._policies = [value for value in objects if isinstance(value, NetworkPolicy)]
        self._pods = [value for value in objects if isinstance(value, Pod)]
        self._endpoints = [value for value in objects if isinstance(value, Endpoint)]
        self._hosts = [value for value in objects if isinstance(value, Host)]
        self._api_servers = [value for value in objects if isinstance(value, ApiServer)]
        self._groups = [value for value in objects if isinstance(value, Group)]
        self._contiv_policies = [value for value in objects if isinstance(value, Policy)]
        self._rules = [value for value in objects if isinstance(value, Rule)]
        self._networks = [value for value in objects if isinstance(value, Network)]

    def verdict(self, flow: FlowSpec) -> OracleVerdict:
        source = self._end(flow.source, flow.version)
        target = self._end(flow.target, flow.version)
        if source.tenant and target.tenant and source.tenant != target.tenant:
            return OracleVerdict(egress=False, ingress=False)
        own_host = source.host and source.node == target.node != ""
        return OracleVerdict(
            egress=self._allows("egress", source, target, flow),
            ingress=own_host or self._allows("ingress", target, source, flow),
        )

    def _end(self, name: str, version: int) -> _End:
        for pod in self._pods:
            if name == f"{pod.namespace}/{pod.name}":
                return _End(_first(pod.ips, version), pod.tenant, pod.group, pod.node, pod=pod)
        for endpoint in self._endpoints:
            if name == f"{endpoint.tenant}:{endpoint.network}:{endpoint.endpoint_id}":
                texts = (endpoint.ip_address, endpoint.ipv6_address)
                return _End(_first(texts, version), endpoint.tenant, endpoint.group, endpoint.host)
        for host in self._hosts:
            if name == f"host:{host.node}":
                return _End(_first(host.addresses, version), node=host.node, host=True)
        for server in self._api_servers:
            if name == "apiserver":
                return _End(_first(server.addresses, version))
        return _End(name)

    def _allows(self, direction: str, local: _End, remote: _End, flow: FlowSpec) -> bool:
        target = remote if direction == "egress" else local
        ports = target.pod.ports if target.pod else ()
        return self._contiv_allows(direction, local, remote, flow) and self._kubernetes_allows(
            direction, local, remote, flow, ports
        )

    # Kubernetes: a pod that no policy selects is open; otherwise some entry of some policy must allow the flow.

    def _kubernetes_allows(
        self, direction: str, local: _End, remote: _End, flow: FlowSpec, ports: Sequence[PodPort]
    ) -> bool:
        if local.pod is None:
            return True
        selecting = [policy for policy in self._policies if _selects(policy, local.pod, direction)]
        return not selecting or any(
            (not peers or any(self._is_peer(peer, remote, policy.metadata.namespace) for peer in peers))
            and (not services or any(_is_service(service, flow, ports) for service in services))
            for policy in selecting
            for peers, services in _entries(policy, direction)
        )

    def _is_peer(self, peer: PolicyPeer, remote: _End, namespace: str) -> bool:
        if peer.ip_block is not None:
            excepted = any(_in_network(remote.address, text) for text in peer.ip_block.except_ or ())
            return _in_network(remote.address, peer.ip_block.cidr) and not excepted
        if remote.pod is None:
            return False
        if peer.pod_selector is not None and not _labels_match(peer.pod_selector, remote.pod.labels):
            return False
        if peer.namespace_selector is None:
            return remote.pod.namespace == namespace
        namespace_object = self._namespaces.get(remote.pod.namespace)
        if namespace_object is None:
            return False
        labels = {**namespace_object.labels, "kubernetes.io/metadata.name": namespace_object.name}
        return _labels_match(peer.namespace_selector, labels)

    # Contiv: of the rules that match the flow, those of the highest priority decide; one deny among them denies.

    def _contiv_allows(self, direction: str, local: _End, remote: _End, flow: FlowSpec) -> bool:
        source, target = (local, remote) if direction == "egress" else (remote, local)
        matching = [
            rule
            for group in self._groups
            if (group.tenant, group.name) == (local.tenant, local.group)
            for policy in self._contiv_policies
            if policy.tenant == group.tenant and policy.name in group.policies and not policy.audit
            for rule in self._rules
            if (rule.tenant, rule.policy) == (policy.tenant, policy.name)
            and rule.direction == ("out" if direction == "egress" else "in")
            and self._is_end(source, rule.tenant, rule.from_endpoint_group, rule.from_network, rule.from_ip_address)
            and self._is_end(target, rule.tenant, rule.to_endpoint_group, rule.to_network, rule.to_ip_address)
            and _is_contiv_service(rule, flow)
        ]
        highest = max((rule.priority for rule in matching), default=0)
        return all(rule.action == "allow" for rule in matching if rule.priority == highest)

    def _is_end(self, end: _End, tenant: str, group: str, network: str, address: str) -> bool:
        if group:
            exists = any((each.tenant, each.name) == (tenant, group) for each in self._groups)
            if not exists or (end.tenant, end.group) != (tenant, group):
                return False
        if network:
            subnets = [
                subnet
                for each in self._networks
                if (each.tenant, each.name) == (tenant, network)
                for subnet in (each.subnet, each.ipv6_subnet)
                if subnet
            ]
            if not any(_in_subnet(end.address, subnet) for subnet in subnets):
                return False
        return not address or _in_span(end.address, address)


def _first(addresses: Iterable[str], version: int) -> str:
    return next((text for text in addresses if text and ip_address(text).version == version), "")


def _selects(policy: NetworkPolicy, pod: Pod, direction: str) -> bool:
    types = policy.spec.policy_types or (("Ingress", "Egress") if policy.spec.egress else ("Ingress",))
    audit = (policy.metadata.annotations or {}).get("weft/mode") == "audit"
    return (
        not audit
        and direction.capitalize() in types
        and policy.metadata.namespace == pod.namespace
        and (policy.spec.pod_selector is None or _labels_match(policy.spec.pod_selector, pod.labels))
    )


def _entries(
    policy: NetworkPolicy, direction: str
) -> list[tuple[tuple[PolicyPeer, ...] | None, tuple[PolicyPort, ...] | None]]:
    if direction == "ingress":
        return [(rule.from_, rule.ports) for rule in policy.spec.ingress or ()]
    return [(rule.to, rule.ports) for rule in policy.spec.egress or ()]


def _labels_match(selector: LabelSelector, labels: dict[str, str]) -> bool:
    for key, value in (selector.match_labels or {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.match_expressions or ():
        value_in = each.key in labels and labels[each.key] in (each.values or ())
        holds = {
            "In": value_in,
            "NotIn": not value_in,
            "Exists": each.key in labels,
            "DoesNotExist": each.key not in labels,
        }[each.operator]
        if not holds:
            return False
    return True


def _is_service(service: PolicyPort, flow: FlowSpec, ports: Sequence[PodPort]) -> bool:
    if flow.protocol != _NUMBERS[service.protocol or "TCP"]:
        return False
    if service.port is None:
        return True
    if isinstance(service.port, str):
        return PodPort(service.port, flow.protocol, flow.port) in ports
    return flow.port in range(service.port, (service.end_port or service.port) + 1)


def _is_contiv_service(rule: Rule, flow: FlowSpec) -> bool:
    has_ports = flow.protocol in (_TCP, _UDP, _SCTP)
    if rule.protocol == "icmp":
        return flow.protocol in (1, 58)
    if rule.protocol:
        number = _NUMBERS.get(rule.protocol) or int(rule.protocol)
        return flow.protocol == number and (not has_ports or rule.port in (0, flow.port))
    return rule.port == 0 or (has_ports and rule.port == flow.port)


def _in_network(address: str, text: str) -> bool:
    if not address:
        return False
    network = ip_network(text, strict=False)
    mapped = _mapped_ipv4(network)
    return ip_address(address) in (mapped or network)


def _in_subnet(address: str, text: str) -> bool:
    """Also for a network with an address range: `10.1.1.5-10.1.1.20/24`."""
    start, _, length = text.partition("/")
    return _in_network(address, f"{start.partition('-')[0]}/{length}")


def _mapped_ipv4(network: IPv4Network | IPv6Network) -> IPv4Network | None:
    if isinstance(network, IPv6Network) and network.subnet_of(IPv6Network("::ffff:0:0/96")):
        mapped = network.network_address.ipv4_mapped
        return IPv4Network((mapped, network.prefixlen - 96)) if mapped else None
    return None


def _in_span(address: str, text: str) -> bool:
    first, dash, rest = text.partition("-")
    if not dash:
        return _in_network(address, text)
    last = ".".join([*first.split(".")[:-1], rest.partition("/")[0]])
    return bool(address) and any(
        str(ip_address(number)) == address for number in range(int(ip_address(first)), int(ip_address(last)) + 1)
    )
