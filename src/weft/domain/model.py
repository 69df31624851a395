"""The objects of the control plane as frozen values, with Contiv's JSON member names (contiv 2.2).

Members that users set come first. Members that the control plane sets (`tags`, `groupId`, `vip` …) are read-only and
rejected in input. Zero values are omitted from JSON, as in Contiv. `validation` has the rules, `kinds` the table of all
kinds.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from weft.domain.addresses import Address, parse_address
from weft.domain.ids import (
    GLOBAL_NAME,
    EndpointId,
    EndpointKey,
    GroupKey,
    GroupName,
    NetworkKey,
    NetworkName,
    NodeName,
    PolicyName,
    ProfileName,
    RuleId,
    ServiceName,
    TenantName,
)

# Literals, not enums: msgspec validates them, and JSON needs no conversion.
NwType = Literal["data", "infra"]
Encap = Literal["vlan", "vxlan"]
FwdMode = Literal["", "bridge", "routing"]
ArpMode = Literal["", "proxy", "flood"]
Direction = Literal["in", "out"]
Action = Literal["allow", "deny"]
PolicyMode = Literal["enforce", "audit"]


# kw_only in every subclass: msgspec does not inherit it for new fields.
class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all stored values: immutable, strict about unknown members, without zero values."""


class Tenant(Value, frozen=True, kw_only=True):
    """The owner of isolated virtual networks: two tenants may use the same names and addresses."""

    name: TenantName = field(name="tenantName")
    default_network: str = ""
    external_ranges: tuple[str, ...] = ()


class NetworkTags(Value, frozen=True, kw_only=True):
    """Read-only: the tags of a network. `vlan` is the VLAN tag (encap vlan) or the local VLAN (vxlan, 1..4094)."""

    vlan: int
    vni: int = 0


class Network(Value, frozen=True, kw_only=True):
    """A subnet of a tenant, IPv4 and optionally IPv6."""

    tenant: TenantName = field(name="tenantName")
    name: NetworkName = field(name="networkName")
    nw_type: NwType = "data"
    encap: Encap
    pkt_tag: int = 0
    subnet: str
    gateway: str = ""
    ipv6_subnet: str = field(name="ipv6Subnet", default="")
    ipv6_gateway: str = field(name="ipv6Gateway", default="")
    # Set for external systems (ACI in Contiv); Weft only stores it.
    cfgd_tag: str = ""
    tags: NetworkTags | None = None

    @property
    def key(self) -> NetworkKey:
        return NetworkKey(self.tenant, self.name)


class Group(Value, frozen=True, kw_only=True):
    """An endpoint group: endpoints of one network with common policies and profile, maybe an address pool or tag."""

    tenant: TenantName = field(name="tenantName")
    name: GroupName = field(name="groupName")
    network: NetworkName = field(name="networkName")
    ip_pool: str = ""
    pkt_tag: int = 0
    policies: tuple[PolicyName, ...] = ()
    net_profile: str = ""
    cfgd_tag: str = ""
    group_id: int = 0

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.tenant, self.name)


class Policy(Value, frozen=True, kw_only=True):
    """A named set of rules. In mode `audit` its rules are evaluated and reported, but never decide."""

    tenant: TenantName = field(name="tenantName")
    name: PolicyName = field(name="policyName")
    # Not in Contiv.
    mode: PolicyMode = "enforce"

    @property
    def audit(self) -> bool:
        return self.mode == "audit"


class Rule(Value, frozen=True, kw_only=True):
    """One line of a policy. Empty means any; a higher priority wins."""

    tenant: TenantName = field(name="tenantName")
    policy: PolicyName = field(name="policyName")
    rule_id: RuleId
    direction: Direction
    # 1 to 100; a higher number wins, as in Contiv.
    priority: int = 1
    from_endpoint_group: str = ""
    to_endpoint_group: str = ""
    from_network: str = ""
    to_network: str = ""
    from_ip_address: str = ""
    to_ip_address: str = ""
    protocol: str = ""
    port: int = 0
    action: Action


class Profile(Value, frozen=True, kw_only=True):
    """A netprofile: bandwidth, burst (kilobytes) and DSCP of a group's endpoints."""

    tenant: TenantName = field(name="tenantName")
    name: ProfileName = field(name="profileName")
    bandwidth: str = ""
    dscp: int = field(name="DSCP", default=0)
    burst: int = 0


class Service(Value, frozen=True, kw_only=True):
    """A serviceLB: a VIP of each family, load-balanced over the endpoints whose labels contain all selectors."""

    tenant: TenantName = field(name="tenantName")
    name: ServiceName = field(name="serviceName")
    network: NetworkName = field(name="networkName")
    ip_address: str = ""
    ipv6_address: str = field(name="ipv6Address", default="")
    selectors: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    vip: str = ""
    ipv6_vip: str = field(name="ipv6Vip", default="")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Its VIPs, IPv4 first."""
        vips = ((self.vip, "vip"), (self.ipv6_vip, "ipv6Vip"))
        return tuple(parse_address(text, field=member) for text, member in vips if text)


class BgpPeer(Value, frozen=True, kw_only=True):
    """A Bgp object: the BGP session of one node with its router."""

    hostname: NodeName
    # Contiv's spelling of these members.
    router_ip: str = field(name="routerip")
    as_number: str = field(name="as")
    neighbor_as: str = field(name="neighbor-as")
    neighbor: str = ""


class Global(Value, frozen=True, kw_only=True):
    """Cluster-wide settings: tag ranges and modes."""

    name: str = GLOBAL_NAME
    network_infra_type: Literal["", "default", "aci", "aci-opflex"] = "default"
    # Contiv's defaults.
    vlans: str = "1-4094"
    vxlans: str = "1-10000"
    fwd_mode: FwdMode = ""
    arp_mode: ArpMode = "proxy"
    pvt_subnet: str = "172.19.0.0/16"


# Not a `Value`: it is part of a document, and there are many of them.
class PodPort(msgspec.Struct, frozen=True, gc=False):
    """A named port of a pod."""

    name: str
    protocol: int
    port: int


class PodIdentity(Value, frozen=True, kw_only=True):
    """The Kubernetes pod of an endpoint, identified by its UID. Never derived from labels, which users can set."""

    namespace: str
    name: str
    uid: str = ""
    ports: tuple[PodPort, ...] = ()


class Endpoint(Value, frozen=True, kw_only=True):
    """An attachment of a workload on any node. Its labels select it as a backend of services."""

    tenant: TenantName = field(name="tenantName")
    network: NetworkName = field(name="networkName")
    endpoint_id: EndpointId = field(name="endpointID")
    # In Contiv's endpoint API "service" is the old name of a group.
    group: str = field(name="serviceName", default="")
    ip_address: str = ""
    ipv6_address: str = field(name="ipv6Address", default="")
    mac_address: str = ""
    host: str = field(name="homingHost", default="")
    interface: str = field(name="intfName", default="")
    vtep_ip: str = field(name="vtepIP", default="")
    # msgspec copies a mutable default for each instance.
    labels: dict[str, str] = {}
    container_id: str = field(name="containerID", default="")
    container_name: str = ""
    pod: PodIdentity | None = None

    @property
    def key(self) -> EndpointKey:
        return EndpointKey(self.tenant, self.network, self.endpoint_id)

    @property
    def network_key(self) -> NetworkKey:
        return NetworkKey(self.tenant, self.network)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Its addresses, IPv4 first."""
        texts = (self.ip_address, self.ipv6_address)
        return tuple(parse_address(text, field="ipAddress") for text in texts if text)


class Node(Value, frozen=True, kw_only=True):
    """A machine that runs the agent. It writes its own document; only the node GC writes `unreachableSince`."""

    name: NodeName
    ctrl_ip: str = ""
    vtep_ip: str = ""
    # IANA's port of VXLAN.
    vxlan_port: int = 4789
    # For operators only: compatibility is decided by document and store formats.
    version: str = ""
    unreachable_since: float = 0.0


class Claim(Value, frozen=True, kw_only=True):
    """Read-only: the holder of an address, tag or id (`endpoint:…`, `service:…`, `network:…`, `group:…`)."""

    holder: str


class Block(Value, frozen=True, kw_only=True):
    """Read-only: 64 addresses of a large pool. `owner` is a node; empty for a shared block, allocated by claims."""

    owner: str = ""


class SyncStatus(Value, frozen=True, kw_only=True):
    """Read-only: a node has applied everything up to `revision`; `faults` say why it is not ready."""

    revision: int = 0
    faults: tuple[str, ...] = ()
