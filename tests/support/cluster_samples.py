"""Random clusters: small ones with every form of policy, and large ones of a requested size.

Everything derives from the given `random.Random`, so the seed reproduces a failure. The pools of names, labels,
addresses and ports are small on purpose: objects often collide, overlap, or refer to something that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from random import Random
from typing import TypeVar

from tests.support.policy_oracle import FlowSpec

from weft.domain.errors import Invalid, NotFound
from weft.domain.ids import EndpointId, GroupName, NetworkName, PolicyName, RuleId, TenantName
from weft.domain.model import Endpoint, Group, Network, PodPort, Policy, Rule
from weft.domain.policy.engine.engine import Affected, Engine, PolicyObject
from weft.domain.policy.model.identities import ApiServer, Host, Namespace, Pod
from weft.domain.policy.model.netpol import (
    EgressRule,
    IngressRule,
    IpBlock,
    Metadata,
    NetworkPolicy,
    PolicyPeer,
    PolicyPort,
    PolicySpec,
)
from weft.domain.selectors import LabelExpression, LabelSelector

_TENANTS = [TenantName("default"), TenantName("red")]
_NAMESPACES = ["x", "y", "z"]
_NODES = ["n1", "n2", ""]
_LABELS = {"app": ["web", "db"], "tier": ["a", "b", "c"]}
_NETWORKS = [NetworkName("blue"), NetworkName("green"), NetworkName("gone")]
_GROUPS = [GroupName("web"), GroupName("db"), GroupName("gone")]
_POLICIES = [PolicyName("p1"), PolicyName("p2"), PolicyName("p3")]
_SUBNETS = ["10.1.0.0/24", "10.2.0.5-10.2.0.60/24", "10.1.0.0/26"]
_BLOCKS = {
    "10.1.0.0/24": ["10.1.0.0/25", "10.1.0.8/29"],
    "10.1.0.77/25": ["10.1.0.16/28"],
    "10.0.0.0/8": ["10.1.0.0/16", "10.2.0.0/15"],
    "0.0.0.0/0": ["10.0.0.0/8", "192.0.2.0/24", "10.1.0.3/32"],
    "::ffff:10.2.0.0/120": ["10.2.0.0/26"],
    "fd01::/64": ["fd01::/124", "fd01::5/128"],
    "::/0": ["fd01::/64"],
}
_SPANS = ["10.1.0.3", "10.1.0.0/28", "10.1.0.4-20", "10.2.0.1-9", "fd01::3", "fd01::/124", "0.0.0.0/0"]
_PORTS = [1, 80, 81, 443, 8080, 65535]
_PORT_NAMES = ["http", "dns"]
_PROTOCOLS = {"TCP": 6, "UDP": 17, "SCTP": 132}
_WORLD = ["192.0.2.7", "203.0.113.9", "10.1.0.250", "2001:db8::7", "fd01::ffff"]


T = TypeVar("T")


def random_cluster(rng: Random) -> list[PolicyObject]:
    """A small cluster with Contiv and Kubernetes policies, and some dangling references."""
    objects: dict[Hashable, PolicyObject] = {}
    for make, most in _MAKERS.items():
        for _ in range(rng.randint(most // 2, most)):
            value = make(rng)
            objects[key_of(value)] = value
    return list(objects.values())


def random_object(rng: Random) -> PolicyObject:
    """An object of a small cluster: a new one, or a changed one with an existing key."""
    return rng.choices(list(_MAKERS), weights=list(_MAKERS.values()))[0](rng)


def key_of(value: PolicyObject) -> Hashable:
    """The key under which an object replaces another."""
    match value:
        case Pod():
            return Pod, value.namespace, value.name
        case NetworkPolicy():
            return NetworkPolicy, value.metadata.namespace, value.metadata.name
        case Namespace():
            return Namespace, value.name
        case Host():
            return Host, value.node
        case ApiServer():
            return ApiServer
        case Policy():
            return Policy, value.tenant, value.name
        case Rule():
            return Rule, value.tenant, value.policy, value.rule_id
        case Endpoint() | Group() | Network():
            return type(value), value.key


def remove_object(engine: Engine, value: PolicyObject) -> Affected:
    """Remove the object with this key from the engine."""
    match value:
        case Pod():
            return engine.remove_pod(value.namespace, value.name)
        case NetworkPolicy():
            return engine.remove_network_policy(value.metadata.namespace, value.metadata.name)
        case Namespace():
            return engine.remove_namespace(value.name)
        case Host():
            return engine.remove_host(value.node)
        case ApiServer():
            return engine.remove_api_server()
        case Policy():
            return engine.remove_policy((value.tenant, value.name))
        case Rule():
            return engine.remove_rule((value.tenant, value.policy, value.rule_id))
        case Endpoint():
            return engine.remove_endpoint(value.key)
        case Group():
            return engine.remove_group(value.key)
        case Network():
            return engine.remove_network(value.key)


def random_flow(rng: Random, engine: Engine) -> FlowSpec | None:
    """A flow between two identities; None if they have no common address family."""
    workloads = list(engine.workloads)
    ends = [*workloads, *workloads, *workloads, *_WORLD, *(f"host:{node}" for node in _NODES if node), "apiserver"]
    source, target = rng.choice(ends), rng.choice(ends)
    protocol = rng.choice([6, 6, 6, 17, 132, 1, 47])
    port = rng.choice(_PORTS) if protocol in _PROTOCOLS.values() else 0
    try:
        flow = engine.directory.flow(
            source, target, protocol=protocol, port=port, version=rng.choice([None, 6]), tenant=""
        )
    except (Invalid, NotFound):
        return None
    return FlowSpec(source, target, flow.protocol, flow.port, flow.version)


def _maybe(rng: Random, value: T) -> T | None:
    return value if rng.random() < 0.5 else None


def _some(rng: Random, values: Sequence[T], most: int) -> tuple[T, ...]:
    return tuple(rng.choice(values) for _ in range(rng.randint(0, most)))


def _random_tenant(rng: Random) -> TenantName:
    return rng.choices(_TENANTS, weights=[12, 1])[0]


def _random_labels(rng: Random) -> dict[str, str]:
    return {key: rng.choice(values) for key, values in _LABELS.items() if rng.random() < 0.7}


def _random_addresses(rng: Random) -> tuple[str, ...]:
    v4, v6 = f"10.{rng.randint(1, 2)}.0.{rng.randint(1, 30)}", f"fd01::{rng.randint(1, 30):x}"
    return rng.choice([(v4,), (v4, v6), (v4, v6), (v6,), ()])


def _random_namespace(rng: Random) -> Namespace:
    return Namespace(name=rng.choice(_NAMESPACES), labels=_random_labels(rng))


def _random_pod(rng: Random) -> Pod:
    port_names = _some(rng, _PORT_NAMES, 2)
    return Pod(
        namespace=rng.choice(_NAMESPACES),
        name=rng.choice("abcd"),
        labels=_random_labels(rng),
        ips=_random_addresses(rng),
        ports=tuple(PodPort(name, rng.choice([6, 17]), rng.choice(_PORTS)) for name in port_names),
        node=rng.choice(_NODES),
        tenant=_random_tenant(rng),
        group=rng.choice([*_GROUPS[:2], *_GROUPS, ""]),
    )


def _random_host(rng: Random) -> Host:
    return Host(node=rng.choice(_NODES[:2]), addresses=("192.0.2.1", "2001:db8::1"))


def _random_api_server(rng: Random) -> ApiServer:
    return ApiServer(addresses=rng.choice([("192.0.2.2",), ("192.0.2.2", "2001:db8::2")]))


def _random_selector(rng: Random) -> LabelSelector:
    expressions = []
    for _ in range(rng.choice([0, 0, 1, 2])):
        key = rng.choice([*_LABELS, "kubernetes.io/metadata.name"])
        operator = rng.choice(["In", "NotIn", "Exists", "DoesNotExist"])
        pool = _LABELS.get(key, _NAMESPACES)
        values = tuple(rng.sample(pool, rng.randint(1, 2))) if operator in ("In", "NotIn") else None
        expressions.append(LabelExpression(key=key, operator=operator, values=values))
    labels = {} if rng.random() < 0.5 else dict([rng.choice(list(_random_labels(rng).items()) or [("app", "web")])])
    return LabelSelector(match_labels=_maybe(rng, labels), match_expressions=tuple(expressions))


def _random_peer(rng: Random) -> PolicyPeer:
    if rng.random() < 0.3:
        cidr = rng.choice(list(_BLOCKS))
        return PolicyPeer(ip_block=IpBlock(cidr=cidr, except_=_maybe(rng, _some(rng, _BLOCKS[cidr], 2))))
    pods, namespaces = rng.choice([(True, False), (False, True), (True, True)])
    return PolicyPeer(
        pod_selector=_random_selector(rng) if pods else None,
        namespace_selector=_random_selector(rng) if namespaces else None,
    )


def _random_port(rng: Random) -> PolicyPort:
    protocol = rng.choice([None, *_PROTOCOLS])
    if rng.random() < 0.3:
        return PolicyPort(protocol=protocol, port=rng.choice([None, *_PORT_NAMES]))
    first, last = sorted(rng.choices(_PORTS, k=2))
    return PolicyPort(protocol=protocol, port=first, end_port=_maybe(rng, last))


def _random_network_policy(rng: Random) -> NetworkPolicy:
    def peers() -> tuple[PolicyPeer, ...] | None:
        return _maybe(rng, tuple(_random_peer(rng) for _ in range(rng.randint(0, 3))))

    def ports() -> tuple[PolicyPort, ...] | None:
        return _maybe(rng, tuple(_random_port(rng) for _ in range(rng.randint(0, 2))))

    return NetworkPolicy(
        metadata=Metadata(
            namespace=rng.choice(_NAMESPACES),
            name=rng.choice(["first", "second", "third"]),
            annotations={"weft/mode": rng.choice(["audit", "enforce", "enforce"])},
        ),
        spec=PolicySpec(
            pod_selector=_maybe(rng, _random_selector(rng)),
            policy_types=rng.choice([None, (), ("Ingress",), ("Egress",), ("Ingress", "Egress")]),
            ingress=_maybe(rng, tuple(IngressRule(from_=peers(), ports=ports()) for _ in range(rng.randint(0, 2)))),
            egress=_maybe(rng, tuple(EgressRule(to=peers(), ports=ports()) for _ in range(rng.randint(0, 2)))),
        ),
    )


def _random_endpoint(rng: Random) -> Endpoint:
    addresses = _random_addresses(rng)
    return Endpoint(
        tenant=_random_tenant(rng),
        network=rng.choice(_NETWORKS),
        endpoint_id=EndpointId(rng.choice(["e1", "e2", "e3"])),
        group=rng.choice([*_GROUPS[:2], *_GROUPS, ""]),
        ip_address=next((text for text in addresses if "." in text), ""),
        ipv6_address=next((text for text in addresses if ":" in text), ""),
        host=rng.choice(_NODES),
    )


def _random_network(rng: Random) -> Network:
    return Network(
        tenant=_random_tenant(rng),
        name=rng.choice(_NETWORKS[:2]),
        encap="vxlan",
        subnet=rng.choice(_SUBNETS),
        ipv6_subnet=rng.choice(["", "fd01::/64"]),
    )


def _random_group(rng: Random) -> Group:
    return Group(
        tenant=_random_tenant(rng),
        name=rng.choice(_GROUPS[:2]),
        network=_NETWORKS[0],
        policies=tuple(rng.sample(_POLICIES, rng.randint(0, 3))),
    )


def _random_policy(rng: Random) -> Policy:
    return Policy(
        tenant=_random_tenant(rng), name=rng.choice(_POLICIES), mode="audit" if rng.random() < 0.2 else "enforce"
    )


def _random_rule(rng: Random) -> Rule:
    ingress = rng.random() < 0.5
    group = rng.choice([*_GROUPS, *[""] * 6])
    network = "" if group else rng.choice([*_NETWORKS, *[""] * 6])
    address = "" if network else rng.choice([*_SPANS, *[""] * len(_SPANS)])
    return Rule(
        tenant=_random_tenant(rng),
        policy=rng.choice(_POLICIES),
        rule_id=RuleId(str(rng.randint(1, 12))),
        direction="in" if ingress else "out",
        priority=rng.choice([1, 1, 2, 50, 100]),
        from_endpoint_group=group if ingress else "",
        from_network=network if ingress else "",
        from_ip_address=address if ingress else "",
        to_endpoint_group="" if ingress else group,
        to_network="" if ingress else network,
        to_ip_address=rng.choice(["", "", "", *_SPANS[:2]]) if ingress else address,
        protocol=rng.choice(["", "", "tcp", "tcp", "tcp", "udp", "icmp", "47", "132"]),
        port=rng.choice([0, 0, 0, *_PORTS]),
        action="allow" if rng.random() < 0.5 else "deny",
    )


# The generator of each kind, and how many of it a small cluster has at most.
_MAKERS: dict[Callable[[Random], PolicyObject], int] = {
    _random_namespace: 3,
    _random_pod: 8,
    _random_network_policy: 5,
    _random_endpoint: 5,
    _random_network: 3,
    _random_group: 8,
    _random_policy: 8,
    _random_rule: 40,
    _random_host: 2,
    _random_api_server: 1,
}


def large_cluster(rng: Random, *, pods: int, namespaces: int, policies: int) -> list[PolicyObject]:
    """A cluster of the requested size, shaped like real ones: applications of a few pods that allow each other."""
    names = [f"ns-{number}" for number in range(namespaces)]
    stages = ["dev", "test", "prod"]
    return [
        *(
            Namespace(name=name, labels={"team": f"team-{number % 50}", "stage": rng.choice(stages)})
            for number, name in enumerate(names)
        ),
        *(_large_pod(rng, number, names) for number in range(pods)),
        *(_large_policy(rng, number, names) for number in range(policies)),
    ]


def _large_pod(rng: Random, number: int, names: Sequence[str]) -> Pod:
    return Pod(
        namespace=names[number % len(names)],
        name=f"pod-{number}",
        labels={"app": f"app-{number % 7}", "tier": rng.choice(["front", "back", "data"]), "pod": str(number)},
        ips=(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", f"fd00::{number:x}"),
        ports=(PodPort("http", 6, 8080), PodPort("metrics", 6, 9090)),
        node=f"node-{number % 100}",
    )


def _large_policy(rng: Random, number: int, names: Sequence[str]) -> NetworkPolicy:
    def app() -> LabelSelector:
        return LabelSelector(match_labels={"app": f"app-{rng.randrange(7)}"})

    def tiers() -> LabelSelector:
        expression = LabelExpression(key="tier", operator="In", values=tuple(rng.sample(["front", "back", "data"], 2)))
        return LabelSelector(match_expressions=(expression,))

    team = LabelSelector(match_labels={"team": f"team-{rng.randrange(50)}"})
    second, third = rng.randrange(256), rng.randrange(256)
    block = IpBlock(cidr=f"10.{second}.0.0/16", except_=(f"10.{second}.{third}.0/24",))
    ports = (PolicyPort(port="http"), PolicyPort(port=rng.randrange(1, 60000)))
    return NetworkPolicy(
        metadata=Metadata(namespace=names[number % len(names)], name=f"policy-{number}"),
        spec=PolicySpec(
            pod_selector=app(),
            policy_types=("Ingress", "Egress") if rng.random() < 0.3 else ("Ingress",),
            ingress=(
                IngressRule(from_=(PolicyPeer(pod_selector=tiers()),), ports=ports),
                IngressRule(from_=(PolicyPeer(pod_selector=app(), namespace_selector=team),), ports=ports[:1]),
            ),
            egress=(EgressRule(to=(PolicyPeer(ip_block=block), PolicyPeer(namespace_selector=team))),),
        ),
    )
