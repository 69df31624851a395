"""The kinds of objects of netctl: REST paths, keys and columns (docs/compatibility/contiv.md, 2.2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.ctl.client import quote
from weft.ctl.render import Column

API = "/api/v1"


# A NamedTuple and not a dataclass: dataclasses is slow to import.
class Kind(NamedTuple):
    """A kind of object. The last member of its key is its name; a `tenantName` before it makes it tenant-scoped."""

    word: str
    plural: str
    key: tuple[str, ...]
    columns: tuple[Column, ...] = ()

    @property
    def name(self) -> str:
        """The JSON member with an object's own name."""
        return self.key[-1]

    @property
    def of_tenant(self) -> bool:
        return "tenantName" in self.key[:-1]

    def spell_key(self, members: Mapping[str, object]) -> str:
        """The key of an object in REST paths: its key members joined by colons."""
        return ":".join(str(members[member]) for member in self.key)

    def path(self, key: str = "") -> str:
        """The REST path of one object, or of the list."""
        return f"{API}/{self.plural}/{quote(key)}/" if key else f"{API}/{self.plural}/"

    def inspect_path(self, key: str) -> str:
        """The REST path of one object with its operational state."""
        return f"{API}/inspect/{self.plural}/{quote(key)}/"


_TENANT = Column("Tenant", "tenantName")

TENANT = Kind("tenant", "tenants", ("tenantName",), (Column("Name", "tenantName"),))

NETWORK = Kind(
    "network",
    "networks",
    ("tenantName", "networkName"),
    (
        _TENANT,
        Column("Network", "networkName"),
        Column("Nw Type", "nwType"),
        Column("Encap type", "encap"),
        Column("Packet tag", "pktTag", "0"),
        Column("Subnet", "subnet"),
        Column("Gateway", "gateway"),
        Column("IPv6Subnet", "ipv6Subnet"),
        Column("IPv6Gateway", "ipv6Gateway"),
        Column("Cfgd Tag", "cfgdTag"),
    ),
)

GROUP = Kind(
    "group",
    "endpointGroups",
    ("tenantName", "groupName"),
    (
        _TENANT,
        Column("Group", "groupName"),
        Column("Network", "networkName"),
        Column("IP Pool", "ipPool"),
        Column("CfgdTag", "cfgdTag"),
        Column("Policies", "policies"),
        Column("Network profile", "netProfile"),
    ),
)

# Contiv's plural of policy is "policys" in REST.
POLICY = Kind(
    "policy",
    "policys",
    ("tenantName", "policyName"),
    (_TENANT, Column("Policy", "policyName"), Column("Mode", "mode")),
)

RULE = Kind("rule", "rules", ("tenantName", "policyName", "ruleId"))

# Columns of `policy diff` and --preview.
FLOW_CHANGES = (
    Column("Verdict", "verdict"),
    Column("From", "sources"),
    Column("To", "targets"),
    Column("Services", "services"),
    Column("Decided by", "decidedBy"),
)

# Contiv's titles and their order; scripts parse them.
INCOMING = (
    Column("Rule", "ruleId"),
    Column("Priority", "priority"),
    Column("From Group", "fromEndpointGroup"),
    Column("From Network", "fromNetwork"),
    Column("From Address", "fromIpAddress"),
    Column("To Address", "toIpAddress"),
    Column("Protocol", "protocol"),
    Column("Port", "port", "0"),
    Column("Action", "action"),
)
OUTGOING = (
    Column("Rule", "ruleId"),
    Column("Priority", "priority"),
    Column("To Group", "toEndpointGroup"),
    Column("To Network", "toNetwork"),
    Column("To Address", "toIpAddress"),
    Column("Protocol", "protocol"),
    Column("Port", "port", "0"),
    Column("Action", "action"),
)

PROFILE = Kind(
    "netprofile",
    "netprofiles",
    ("tenantName", "profileName"),
    (
        Column("Name", "profileName"),
        _TENANT,
        Column("Bandwidth", "bandwidth"),
        Column("DSCP", "DSCP", "0"),
        Column("burst size", "burst", "0"),
    ),
)

SERVICE = Kind(
    "service",
    "serviceLBs",
    ("tenantName", "serviceName"),
    (
        Column("Service", "serviceName"),
        _TENANT,
        Column("Network", "networkName"),
        Column("Preferred IP", "ipAddress"),
        Column("Preferred IPv6", "ipv6Address"),
        Column("Ports", "ports"),
        Column("Selectors", "selectors"),
    ),
)

# REST writes Bgps with a capital, as Contiv does.
BGP = Kind(
    "bgp",
    "Bgps",
    ("hostname",),
    (
        Column("HostName", "hostname"),
        Column("Router IP", "routerip"),
        Column("AS", "as"),
        Column("Neighbor AS", "neighbor-as"),
        Column("Neighbor", "neighbor"),
    ),
)

GLOBAL = Kind(
    "global",
    "globals",
    ("name",),
    (
        Column("Fabric mode", "networkInfraType"),
        Column("Forward mode", "fwdMode"),
        Column("ARP mode", "arpMode"),
        Column("VLAN range", "vlans"),
        Column("VXLAN range", "vxlans"),
        Column("Private subnet", "pvtSubnet"),
    ),
)

ENDPOINT = Kind(
    "endpoint",
    "endpoints",
    ("endpointID",),
    (
        _TENANT,
        Column("Network", "networkName"),
        Column("Group", "serviceName"),
        Column("Endpoint", "endpointID"),
        Column("IP address", "ipAddress"),
        Column("IPv6 address", "ipv6Address"),
        Column("MAC address", "macAddress"),
        Column("Host", "homingHost"),
        Column("Container", "containerName"),
    ),
)

NODE = Kind(
    "node",
    "nodes",
    ("name",),
    (
        Column("Node", "name"),
        Column("Control address", "ctrlIp"),
        Column("Tunnel address", "vtepIp"),
        Column("Version", "version"),
        # Zero until the node has applied its first revision.
        Column("Applied rev", "appliedRevision", "0"),
        Column("Lag", "lag", "0"),
        Column("State", "state"),
    ),
)
