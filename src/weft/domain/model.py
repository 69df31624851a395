"""The objects of the control plane as frozen values, with Contiv's JSON member names (contiv 2.2).

Members that the user sets come first; what the control plane adds (`tags`, `groupId`, `vip` …) is marked *given* and is
refused in input. Zero values are left out of JSON, as Contiv did. `validation.py` holds the rules, `kinds.py` the table
of all kinds.
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

NwType = Literal["data", "infra"]
Encap = Literal["vlan", "vxlan"]
FwdMode = Literal["", "bridge", "routing"]
ArpMode = Literal["", "proxy", "flood"]
Direction = Literal["in", "out"]
Action = Literal["allow", "deny"]


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all stored values: immutable, strict about unknown members, zero values left out."""


class Tenant(Value, frozen=True, kw_only=True):
    """A customer: names and addresses of two tenants may be the same and never meet."""

    name: TenantName = field(name="tenantName")
    default_network: str = ""
    external_ranges: tuple[str, ...] = ()


class NetworkTags(Value, frozen=True, kw_only=True):
    """Given: what the network is called on the wire. `vlan` is the tag (vlan) or the local tag (vxlan, 1..4094)."""

    vlan: int
    vni: int = 0


class Network(Value, frozen=True, kw_only=True):
    """A subnet of a tenant, v4 and optionally v6."""

    tenant: TenantName = field(name="tenantName")
    name: NetworkName = field(name="networkName")
    nw_type: NwType = "data"
    encap: Encap
    pkt_tag: int = 0
    subnet: str
    gateway: str = ""
    ipv6_subnet: str = field(name="ipv6Subnet", default="")
    ipv6_gateway: str = field(name="ipv6Gateway", default="")
    cfgd_tag: str = ""
    tags: NetworkTags | None = None

    @property
    def key(self) -> NetworkKey:
        return NetworkKey(self.tenant, self.name)


class Group(Value, frozen=True, kw_only=True):
    """An endpoint group: endpoints of one network that share policies, a profile and maybe an address pool or a tag."""

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
    """A named set of rules. With `dryRun` its rules are evaluated and reported, but never decide."""

    tenant: TenantName = field(name="tenantName")
    name: PolicyName = field(name="policyName")
    dry_run: bool = False


class Rule(Value, frozen=True, kw_only=True):
    """One line of a policy. Empty means any; a higher priority wins."""

    tenant: TenantName = field(name="tenantName")
    policy: PolicyName = field(name="policyName")
    rule_id: RuleId
    direction: Direction
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
    """A serviceLB: an address of each family, balanced over the endpoints whose labels contain all selectors."""

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
        """The addresses it was given, v4 first."""
        given = ((self.vip, "vip"), (self.ipv6_vip, "ipv6Vip"))
        return tuple(parse_address(text, field=member) for text, member in given if text)


class BgpPeer(Value, frozen=True, kw_only=True):
    """A Bgp object: the session of one node with its router."""

    hostname: NodeName
    router_ip: str = field(name="routerip")
    as_number: str = field(name="as")
    neighbor_as: str = field(name="neighbor-as")
    neighbor: str = ""


class Global(Value, frozen=True, kw_only=True):
    """What the whole cluster shares: tag ranges and modes."""

    name: str = GLOBAL_NAME
    network_infra_type: Literal["", "default", "aci", "aci-opflex"] = "default"
    vlans: str = "1-4094"
    vxlans: str = "1-10000"
    fwd_mode: FwdMode = ""
    arp_mode: ArpMode = "proxy"
    pvt_subnet: str = "172.19.0.0/16"


class PodPort(msgspec.Struct, frozen=True, gc=False):
    """A port that a pod gives a name."""

    name: str
    protocol: int
    port: int


class PodIdentity(Value, frozen=True, kw_only=True):
    """The Kubernetes pod that an endpoint belongs to, by its UID that very one. Never taken from its labels."""

    namespace: str
    name: str
    uid: str = ""
    ports: tuple[PodPort, ...] = ()


class Endpoint(Value, frozen=True, kw_only=True):
    """An attachment of a workload, wherever it runs. `labels` decide which services it provides."""

    tenant: TenantName = field(name="tenantName")
    network: NetworkName = field(name="networkName")
    endpoint_id: EndpointId = field(name="endpointID")
    group: str = field(name="serviceName", default="")
    ip_address: str = ""
    ipv6_address: str = field(name="ipv6Address", default="")
    mac_address: str = ""
    host: str = field(name="homingHost", default="")
    interface: str = field(name="intfName", default="")
    vtep_ip: str = field(name="vtepIP", default="")
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
        """Its addresses, v4 first."""
        texts = (self.ip_address, self.ipv6_address)
        return tuple(parse_address(text, field="ipAddress") for text in texts if text)


class Node(Value, frozen=True, kw_only=True):
    """A machine that runs the agent. It writes its own document; only the collector writes `silentSince`."""

    name: NodeName
    ctrl_ip: str = ""
    vtep_ip: str = ""
    vxlan_port: int = 4789
    version: str = ""
    silent_since: float = 0.0


class Claim(Value, frozen=True, kw_only=True):
    """Given: one address, tag or id is taken, and by whom (`endpoint:…`, `service:…`, `network:…`, `group:…`)."""

    holder: str


class Block(Value, frozen=True, kw_only=True):
    """Given: 64 addresses of a large pool. `owner` is a node, or empty: given out one by one through claims."""

    owner: str = ""


class Receipt(Value, frozen=True, kw_only=True):
    """Given: how far a node has come. All that was written up to `revision` is in force there; `faults` say why the
    node is not ready."""

    revision: int = 0
    faults: tuple[str, ...] = ()
