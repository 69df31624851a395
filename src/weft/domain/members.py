"""What each member of each object means, for the reference and the OpenAPI document. A test keeps it complete."""

from __future__ import annotations

from collections.abc import Mapping

_TENANT = "the tenant it belongs to"
_NAME = "its name: letters, digits and inner hyphens, labels joined by dots"

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "tenant": {
        "tenantName": _NAME,
        "defaultNetwork": "network for workloads that name none",
    },
    "network": {
        "tenantName": _TENANT,
        "networkName": f"{_NAME}; no group of the tenant may have the same",
        "nwType": "`data`, or `infra` (one address per node)",
        "encap": "`vlan` or `vxlan`",
        "pktTag": "VLAN tag or VXLAN id on the wire, within the cluster's range; 0: the lowest free one",
        "subnet": "IPv4 `address/length` or `first-last/length`, /8 to /31; overlaps no other network of the tenant",
        "gateway": "a host address of the subnet, or empty",
        "ipv6Subnet": "IPv6 subnet, /16 to /127, or empty; overlaps no other network of the tenant",
        "ipv6Gateway": "a host address of the IPv6 subnet, or empty",
        "cfgdTag": "tag by which other systems know it; empty: `network.tenant`",
        "tags": "given: the VLAN tag (or local VLAN) and the VXLAN id",
    },
    "endpointGroup": {
        "tenantName": _TENANT,
        "groupName": f"{_NAME}; no network of the tenant may have the same",
        "networkName": "the network of its endpoints; never changes",
        "ipPool": "`first-last` or one address, kept for its endpoints; unused when taken, never changes",
        "policies": "names of the policies in force for its endpoints",
        "netProfile": "name of its netprofile, or empty",
        "cfgdTag": "tag by which other systems know it; empty: `group.tenant`",
        "groupId": "given: a number unique in the cluster, 1 to 32767",
    },
    "policy": {
        "tenantName": _TENANT,
        "policyName": _NAME,
        "dryRun": "its rules are evaluated and reported, but never decide",
    },
    "rule": {
        "tenantName": _TENANT,
        "policyName": "the policy it belongs to",
        "ruleId": "its id, unique in the policy; a rule never changes, it is deleted and added",
        "direction": "`in`: traffic to the group's endpoints; `out`: traffic from them",
        "priority": "1 to 100; the higher one wins",
        "fromEndpointGroup": "with `in`: only from endpoints of this group",
        "toEndpointGroup": "with `out`: only to endpoints of this group",
        "fromNetwork": "with `in`: only from this network; not together with the other from-members",
        "toNetwork": "with `out`: only to this network; not together with the other to-members",
        "fromIpAddress": "with `in`: only from this address, range (`10.1.1.5-9`) or prefix, v4 or v6",
        "toIpAddress": "with `out`: only to it; with `in`: only to it among the members of the policy's one group",
        "protocol": "`tcp`, `udp`, `sctp`, `icmp`, a number up to 255, or empty: any",
        "port": "destination port of tcp, udp or sctp; 0: any",
        "action": "`allow` or `deny`",
    },
    "netprofile": {
        "tenantName": _TENANT,
        "profileName": _NAME,
        "bandwidth": "limit such as `10 Mbps`, `4G`, `500kb`; empty: none",
        "DSCP": "0 to 63",
        "burst": "kilobytes, 0 or 2 to 10486",
    },
    "serviceLB": {
        "tenantName": _TENANT,
        "serviceName": _NAME,
        "networkName": "the network its address is from; never changes",
        "ipAddress": "the address asked for, or empty: the lowest free one",
        "selectors": "`key=value` pairs; endpoints whose labels contain all of them provide the service",
        "ports": "`servicePort:providerPort:TCP` (or UDP)",
        "vip": "given: the address, kept until the service is deleted",
    },
    "Bgp": {
        "hostname": "the node whose session it is",
        "routerip": "the node's address on the way to the router, with its prefix length",
        "as": "the node's AS number",
        "neighbor-as": "the router's AS number",
        "neighbor": "the router's address",
    },
    "global": {
        "name": "always `global`",
        "networkInfraType": "`default`; ACI is not supported",
        "vlans": "range of VLAN tags, within 1-4094; must cover the tags in use",
        "vxlans": "range of VXLAN ids, at most 16000 wide; must cover the ids in use",
        "fwdMode": "`bridge` or `routing`; changes only while there is no network",
        "arpMode": "`proxy` or `flood`",
        "pvtSubnet": "a /16 for addresses between host and pods; changes only while there is no network",
    },
    "endpoint": {
        "tenantName": _TENANT,
        "networkName": "the network it is attached to",
        "endpointID": "its id, from the runtime",
        "serviceName": "its group, or empty",
        "ipAddress": "its IPv4 address",
        "ipv6Address": "its IPv6 address",
        "macAddress": "its MAC address",
        "homingHost": "the node it runs on",
        "intfName": "the interface's name in the workload",
        "vtepIP": "the node's address in the overlay",
        "labels": "the workload's labels",
        "containerID": "the container's id",
        "containerName": "the container's name",
    },
    "node": {
        "name": "the machine's name",
        "ctrlIp": "the address of its agent",
        "vtepIp": "its address in the overlay",
        "vxlanPort": "UDP port of the overlay",
        "version": "the agent's version",
        "silentSince": "when it was last missed, in seconds since 1970; 0 while it is heard",
    },
}
