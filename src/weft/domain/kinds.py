"""The table of object kinds: their REST names, store prefixes and key members; and the builders of store keys.

Code that treats all kinds alike (codec, cluster snapshot, REST routes, backup, the OpenAPI document) reads this table.
`store_keys` parses what the builders here build.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from weft.domain import model
from weft.domain.errors import Invalid, Malformed
from weft.domain.ids import StoreKey, store_key
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy

T = TypeVar("T", bound=model.Value)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """One kind of object. `plural` is its path element in REST (Contiv's spelling), `prefix` its store folder."""

    name: str
    type: type[T]
    # Never shown to users; REST uses `plural`.
    prefix: str
    key_attributes: tuple[str, ...]
    plural: str = ""
    # JSON members that the control plane sets: rejected in input, omitted from the configuration in output.
    read_only_fields: frozenset[str] = frozenset()

    def key_parts(self, value: T) -> tuple[str, ...]:
        return tuple(getattr(value, attribute) for attribute in self.key_attributes)

    def key_text(self, value: T) -> str:
        """The key as REST spells it: parts joined by colons."""
        return ":".join(self.key_parts(value))

    def store_key(self, *parts: str) -> StoreKey:
        return store_key(self.prefix, *parts)

    def store_prefix(self, *parts: str) -> StoreKey:
        """The prefix of all objects whose keys start with these parts."""
        return StoreKey(store_key(self.prefix, *parts) + "/")

    def parse_key(self, text: str) -> tuple[str, ...]:
        """The parts of a key as REST spells it, or `Malformed`."""
        parts = tuple(text.split(":"))
        if len(parts) != len(self.key_attributes) or not all(parts):
            wanted = ":".join(self.key_members())
            raise Malformed(f"key {text[:200]!r} of a {self.name} must be {wanted}", field="key")
        return parts

    def key_members(self) -> tuple[str, ...]:
        """The JSON members that form the key."""
        names = dict(zip(self.type.__struct_fields__, self.type.__struct_encode_fields__, strict=True))
        return tuple(names[attribute] for attribute in self.key_attributes)

    def check_key(self, value: T, parts: tuple[str, ...]) -> None:
        """`Invalid` unless the key in the path is the object's own."""
        for member, inside, outside in zip(self.key_members(), self.key_parts(value), parts, strict=True):
            if inside != outside:
                raise Invalid(f"{member} is {inside!r} but the key in the path says {outside!r}", field=member)


TENANT = Kind("tenant", model.Tenant, "tenants", ("name",), "tenants")
NETWORK = Kind("network", model.Network, "networks", ("tenant", "name"), "networks", frozenset({"tags"}))
GROUP = Kind("endpointGroup", model.Group, "groups", ("tenant", "name"), "endpointGroups", frozenset({"groupId"}))
# Contiv spells the plural so.
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
# `Kind` is invariant in its type, so a tuple of different kinds is one of `Kind[Any]`.
CONFIGURABLE: tuple[Kind[Any], ...] = (TENANT, NETWORK, GROUP, POLICY, RULE, PROFILE, SERVICE, BGP, GLOBAL)

# Kinds of the resources that netmaster copies from Kubernetes.
KUBERNETES: tuple[Kind[Any], ...] = (KUBE_NAMESPACE, KUBE_POLICY, KUBE_SERVICE, KUBE_SLICE)

# Kinds that the control plane and the agents write; users only read them.
OBSERVED: tuple[Kind[Any], ...] = (ENDPOINT, NODE, *KUBERNETES)

ALL = CONFIGURABLE + OBSERVED
BY_PREFIX = {kind.prefix: kind for kind in ALL}
BY_PLURAL = {kind.plural: kind for kind in ALL}

# Folders of keys that are not objects. `Final`, because patterns of `match` compare with them.
CLAIMS: Final = "claims"
BLOCKS: Final = "blocks"
ALIVE: Final = "alive"
STATUS: Final = "status"
REQUESTS: Final = "requests"
APPLIED: Final = "applied"

LEADER_KEY = StoreKey("leader")
# Separates the leader's address from its instance id in the value of that key.
_INSTANCE = b"#"
# Exists while a restore runs: no decision may be based on a half restored state.
RESTORE_KEY = StoreKey("restore")
# A client that waits for realization puts this key; its revision is the one that every node must acknowledge.
SYNC_REQUEST_KEY = StoreKey(f"{REQUESTS}/sync")
# The version of the key layout and documents; see `weft.domain.lifecycle.store_format`.
FORMAT_KEY = StoreKey("format")
SINGLETONS = frozenset({LEADER_KEY, RESTORE_KEY, SYNC_REQUEST_KEY, FORMAT_KEY})


def all_address_claims() -> StoreKey:
    """The prefix of the address claims of all networks."""
    return StoreKey(f"{CLAIMS}/addresses/")


def address_claims(tenant: str, network: str) -> StoreKey:
    """The prefix of the address claims of a network."""
    return StoreKey(f"{all_address_claims()}{tenant}/{network}/")


def number_claims(pool: str) -> StoreKey:
    """The prefix of the claims of a pool (`vlan`, `local-vlan`, `vni`, `group-id`)."""
    return StoreKey(f"{CLAIMS}/{pool}/")


def blocks_of(tenant: str, network: str) -> StoreKey:
    """The prefix of the address blocks of a network."""
    return StoreKey(f"{BLOCKS}/{tenant}/{network}/")


def alive_node(node: str) -> StoreKey:
    """The leased key that exists while a node's agent is connected."""
    return StoreKey(f"{ALIVE}/nodes/{node}")


def leader_name(address: str, instance: str) -> bytes:
    """The name of a candidate: unique even if two machines have the same address (M6)."""
    return address.encode() + _INSTANCE + instance.encode()


def leader_address(name: bytes) -> str:
    """The address in a candidate's name."""
    return name.partition(_INSTANCE)[0].decode()


def alive_master(address: str) -> StoreKey:
    """The leased key that exists while a netmaster runs."""
    return StoreKey(f"{ALIVE}/masters/{address}")


def status_prefix(node: str) -> StoreKey:
    """The prefix of a node's own status keys."""
    return StoreKey(f"{STATUS}/nodes/{node}/")


def applied_key(node: str) -> StoreKey:
    """The key under which a node reports the revision it has applied."""
    return StoreKey(f"{status_prefix(node)}{APPLIED}")
