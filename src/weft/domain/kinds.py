"""The table of all kinds of objects: what they are called in REST and in the store, and what their key is made of.

Whatever treats kinds alike (codec, cluster snapshot, REST routes, backup, the OpenAPI document) reads this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.domain import model
from weft.domain.errors import Invalid, Malformed
from weft.domain.ids import StoreKey, store_key
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy

T = TypeVar("T", bound=model.Value)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of object. `plural` is its word in REST (Contiv's), `prefix` its folder in the store."""

    name: str
    type: type[T]
    prefix: str
    key_attributes: tuple[str, ...]
    plural: str = ""
    # JSON members that the control plane adds: refused in input, left out of the configuration shown.
    given: frozenset[str] = frozenset()

    def key_parts(self, value: T) -> tuple[str, ...]:
        return tuple(getattr(value, attribute) for attribute in self.key_attributes)

    def key_text(self, value: T) -> str:
        """The key as REST spells it: colon-joined."""
        return ":".join(self.key_parts(value))

    def store_key(self, *parts: str) -> StoreKey:
        return store_key(self.prefix, *parts)

    def store_prefix(self, *parts: str) -> StoreKey:
        """The folder of all objects whose keys start with these parts."""
        return StoreKey(store_key(self.prefix, *parts) + "/")

    def parse_key(self, text: str) -> tuple[str, ...]:
        parts = tuple(text.split(":"))
        if len(parts) != len(self.key_attributes) or not all(parts):
            wanted = ":".join(self.key_members())
            raise Malformed(f"key {text[:200]!r} of a {self.name} must be {wanted}", field="key")
        return parts

    def key_members(self) -> tuple[str, ...]:
        """The JSON members the key is made of."""
        names = dict(zip(self.type.__struct_fields__, self.type.__struct_encode_fields__, strict=True))
        return tuple(names[attribute] for attribute in self.key_attributes)

    def check_key(self, value: T, parts: tuple[str, ...]) -> None:
        """The key in the path must be the object's own."""
        for member, inside, outside in zip(self.key_members(), self.key_parts(value), parts, strict=True):
            if inside != outside:
                raise Invalid(f"{member} is {inside!r} but the key in the path says {outside!r}", field=member)


TENANT = Kind("tenant", model.Tenant, "tenants", ("name",), "tenants")
NETWORK = Kind("network", model.Network, "networks", ("tenant", "name"), "networks", frozenset({"tags"}))
GROUP = Kind("endpointGroup", model.Group, "groups", ("tenant", "name"), "endpointGroups", frozenset({"groupId"}))
POLICY = Kind("policy", model.Policy, "policies", ("tenant", "name"), "policys")
RULE = Kind("rule", model.Rule, "rules", ("tenant", "policy", "rule_id"), "rules")
PROFILE = Kind("netprofile", model.Profile, "profiles", ("tenant", "name"), "netprofiles")
SERVICE = Kind("serviceLB", model.Service, "services", ("tenant", "name"), "serviceLBs", frozenset({"vip", "ipv6Vip"}))
BGP = Kind("Bgp", model.BgpPeer, "bgps", ("hostname",), "Bgps")
GLOBAL = Kind("global", model.Global, "globals", ("name",), "globals")

ENDPOINT = Kind("endpoint", model.Endpoint, "endpoints", ("tenant", "network", "endpoint_id"), "endpoints")
NODE = Kind("node", model.Node, "nodes", ("name",), "nodes")
KUBE_NAMESPACE = Kind("kubeNamespace", KubeNamespace, "kube-namespaces", ("name",), "kubeNamespaces")
KUBE_POLICY = Kind("kubePolicy", KubePolicy, "kube-policies", ("namespace", "name"), "kubePolicies")
KUBE_SERVICE = Kind("kubeService", KubeService, "kube-services", ("tenant", "namespace", "name"), "kubeServices")
KUBE_SLICE = Kind("kubeSlice", KubeSlice, "kube-slices", ("tenant", "namespace", "service_name", "name"), "kubeSlices")

# Kinds that users create, change and delete by REST.
CONFIGURABLE: tuple[Kind[model.Value], ...] = (
    TENANT, NETWORK, GROUP, POLICY, RULE, PROFILE, SERVICE, BGP, GLOBAL,
)  # type: ignore[assignment]  # fmt: skip

# Kinds of what Kubernetes declares.
DECLARED: tuple[Kind[model.Value], ...] = (
    KUBE_NAMESPACE, KUBE_POLICY, KUBE_SERVICE, KUBE_SLICE,
)  # type: ignore[assignment]  # fmt: skip

# Kinds that the control plane and the agents write; users read them.
OBSERVED: tuple[Kind[model.Value], ...] = (ENDPOINT, NODE, *DECLARED)  # type: ignore[arg-type]

ALL = CONFIGURABLE + OBSERVED
BY_PREFIX = {kind.prefix: kind for kind in ALL}
BY_PLURAL = {kind.plural: kind for kind in ALL}

CLAIMS = "claims"
BLOCKS = "blocks"
ALIVE = "alive"
STATUS = "status"
WISHES = "wishes"
LEADER_KEY = StoreKey("leader")
# There while a restore is under way: until it is finished nothing else may be decided on half a state.
RESTORE_KEY = StoreKey("restore")
# Put by whoever wants every node to say when it has carried out all that was written before.
RECEIPT_WISH_KEY = StoreKey(f"{WISHES}/receipt")


def address_claims(tenant: str, network: str) -> StoreKey:
    """The folder of the addresses taken in a network."""
    return StoreKey(f"{CLAIMS}/addresses/{tenant}/{network}/")


def number_claims(pool: str) -> StoreKey:
    """The folder of the tags or ids taken in a pool (`vlan`, `local-vlan`, `vni`, `group-id`)."""
    return StoreKey(f"{CLAIMS}/{pool}/")


def blocks_of(tenant: str, network: str) -> StoreKey:
    """The folder of the address blocks of a network."""
    return StoreKey(f"{BLOCKS}/{tenant}/{network}/")


def alive_node(node: str) -> StoreKey:
    """The leased key that shows that a node's agent lives."""
    return StoreKey(f"{ALIVE}/nodes/{node}")


def alive_master(address: str) -> StoreKey:
    """The leased key that shows that a netmaster lives."""
    return StoreKey(f"{ALIVE}/masters/{address}")


def status_prefix(node: str) -> StoreKey:
    """The folder in which a node reports about itself."""
    return StoreKey(f"{STATUS}/nodes/{node}/")


def receipt_of(node: str) -> StoreKey:
    """The key under which a node tells what it has carried out."""
    return StoreKey(f"{status_prefix(node)}receipt")
