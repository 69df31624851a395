"""Validation of single objects (contiv 2.2), with Contiv's mistakes corrected.

`check` returns an object in its canonical form or raises `Invalid` with the member at fault. References between
objects, changes and deletions are validated in `weft.domain.lifecycle.changes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec

from weft.domain import model
from weft.domain.addresses import (
    BITS,
    Range,
    parse_address,
    parse_prefix_or_range,
    parse_range,
    parse_subnet,
    parse_subnet_v4,
    parse_subnet_v6,
)
from weft.domain.errors import Invalid
from weft.domain.ids import GLOBAL_NAME, MAX_LONG_NAME, check_endpoint_id, check_name
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.model.netpol import validate
from weft.domain.selectors import Label, parse_labels

T = TypeVar("T", bound=model.Value)

# 802.1Q reserves the tags 0 and 4095. VNIs have 24 bits (RFC 7348).
MAX_VLAN = 4094
MAX_VNI = (1 << 24) - 1
# Contiv's limits: 16,000 VNIs in a range, and a burst in kilobytes that OVS can police.
MAX_VNI_SPAN = 16000
MAX_BURST = 10486
MAX_TEXT = 2048
MAX_GROUP_ID = (1 << 16) - 1

# ASCII: \d would accept digits of other scripts, which int() parses too.
_BANDWIDTH = re.compile(r"([1-9]\d{0,9}) ?([kmg])(?:bps|b)?", re.IGNORECASE | re.ASCII)
_TAG_RANGE = re.compile(r"(\d{1,8})-(\d{1,8})", re.ASCII)
_PROTOCOL = re.compile(r"\d{1,3}", re.ASCII)
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_OCTET = re.compile(r"0|[1-9]\d{0,2}", re.ASCII)
_AS_NUMBER = re.compile(r"[1-9]\d{0,9}", re.ASCII)
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}", re.ASCII | re.IGNORECASE)


def check(value: T) -> T:
    """The value in its canonical form, or `Invalid`."""
    # Each function returns the type it takes; a table by type cannot express that.
    return cast("T", _CHECKS[type(value)](value))


def _check_tenant(tenant: model.Tenant) -> model.Tenant:
    check_name(tenant.name, field="tenantName")
    _check_optional_name(tenant.default_network, field="defaultNetwork")
    for text in tenant.external_ranges:
        parse_prefix_or_range(text, field="externalRanges")
    return tenant


def _check_network(network: model.Network) -> model.Network:
    check_name(network.tenant, field="tenantName")
    check_name(network.name, field="networkName")
    _check_tag_text(network.cfgd_tag)
    highest = MAX_VLAN if network.encap == "vlan" else MAX_VNI
    if not 0 <= network.pkt_tag <= highest:
        raise Invalid(
            f"pktTag {network.pkt_tag} must be 0 (automatic) to {highest} with {network.encap}", field="pktTag"
        )
    if network.tags and not (0 <= network.tags.vlan <= MAX_VLAN and 0 <= network.tags.vni <= MAX_VNI):
        raise Invalid(f"tags {network.tags.vlan}/{network.tags.vni} are no VLAN and VNI", field="tags")
    subnet = parse_subnet_v4(network.subnet)
    _check_gateway(network.gateway, subnet.whole, field="gateway", inside="subnet")
    ipv6_subnet = ""
    if network.ipv6_subnet:
        subnet_v6 = parse_subnet_v6(network.ipv6_subnet)
        _check_gateway(network.ipv6_gateway, subnet_v6.whole, field="ipv6Gateway", inside="ipv6Subnet")
        ipv6_subnet = str(subnet_v6)
    elif network.ipv6_gateway:
        raise Invalid("ipv6Gateway is set without ipv6Subnet: set both or neither", field="ipv6Gateway")
    return msgspec.structs.replace(
        network,
        subnet=str(subnet),
        ipv6_subnet=ipv6_subnet,
        ipv6_gateway=_canonical_address(network.ipv6_gateway, field="ipv6Gateway"),
    )


def _check_gateway(text: str, prefix: Range, *, field: str, inside: str) -> None:
    if not text:
        return
    gateway = parse_address(text, field=field, family=prefix.family)
    last = prefix.last - 1 if prefix.family == 4 else prefix.last  # IPv6 has no broadcast address
    if not prefix.first < gateway.number <= last:
        raise Invalid(f"{field} {text} is not a host address of the {inside}", field=field)


def _check_group(group: model.Group) -> model.Group:
    check_name(group.tenant, field="tenantName")
    check_name(group.name, field="groupName")
    check_name(group.network, field="networkName")
    for policy in group.policies:
        check_name(policy, field="policies")
    # A policy that is listed twice would be counted twice in references.
    if len(set(group.policies)) != len(group.policies):
        raise Invalid("policies names a policy twice: list each once", field="policies")
    _check_optional_name(group.net_profile, field="netProfile")
    _check_tag_text(group.cfgd_tag)
    if not 0 <= group.pkt_tag <= MAX_VLAN:
        raise Invalid(f"pktTag {group.pkt_tag} must be 0 (the network's) to {MAX_VLAN}", field="pktTag")
    if not 0 <= group.group_id <= MAX_GROUP_ID:
        raise Invalid(f"groupId {group.group_id} must be 0 to {MAX_GROUP_ID}", field="groupId")
    pool = str(parse_range(group.ip_pool, field="ipPool", family=4)) if group.ip_pool else ""
    return msgspec.structs.replace(group, ip_pool=pool)


def _check_policy(policy: model.Policy) -> model.Policy:
    check_name(policy.tenant, field="tenantName")
    check_name(policy.name, field="policyName")
    return policy


def _check_rule(rule: model.Rule) -> model.Rule:
    check_name(rule.tenant, field="tenantName")
    check_name(rule.policy, field="policyName")
    check_name(rule.rule_id, field="ruleId")
    if not 1 <= rule.priority <= 100:
        raise Invalid(f"priority {rule.priority} must be 1 to 100", field="priority")
    for text, field in (
        (rule.from_endpoint_group, "fromEndpointGroup"),
        (rule.to_endpoint_group, "toEndpointGroup"),
        (rule.from_network, "fromNetwork"),
        (rule.to_network, "toNetwork"),
    ):
        _check_optional_name(text, field=field)
    _check_rule_address(rule.from_ip_address, field="fromIpAddress")
    _check_rule_address(rule.to_ip_address, field="toIpAddress")
    _check_protocol(rule.protocol)
    if not 0 <= rule.port <= 65535:
        raise Invalid(f"port {rule.port} must be 0 (any) to 65535", field="port")
    # Numbers are the same protocols by IANA.
    if rule.port and rule.protocol not in {"tcp", "udp", "sctp", "6", "17", "132"}:
        raise Invalid(f"port {rule.port} needs protocol tcp, udp or sctp", field="port")
    _check_rule_direction(rule)
    return rule


def _check_rule_direction(rule: model.Rule) -> None:
    """`in` rules match the source, `out` rules the destination, by network or by address and group, not both (O13)."""
    if rule.direction == "in":
        forbidden = {"toNetwork": rule.to_network, "toEndpointGroup": rule.to_endpoint_group}
        network, others = rule.from_network, (rule.from_ip_address, rule.from_endpoint_group)
        side = "from"
    else:
        forbidden = {
            "fromNetwork": rule.from_network,
            "fromEndpointGroup": rule.from_endpoint_group,
            "fromIpAddress": rule.from_ip_address,
        }
        network, others = rule.to_network, (rule.to_ip_address, rule.to_endpoint_group)
        side = "to"
    for field, text in forbidden.items():
        if text:
            raise Invalid(f"{field} cannot be used with direction {rule.direction!r}: remove it", field=field)
    if network and any(others):
        raise Invalid(
            f"{side}Network cannot be used together with {side}IpAddress or {side}EndpointGroup: keep one",
            field=f"{side}Network",
        )


def _check_rule_address(text: str, *, field: str) -> None:
    if text:
        parse_rule_address(text, field=field)


def parse_rule_address(text: str, *, field: str) -> Range:
    """Parse an address, a short range `a.b.c.d-octet`, or a prefix; IPv4 or IPv6."""
    address_text, slash, _ = text.partition("/")
    head, dash, octet = address_text.partition("-")
    first = parse_address(head, field=field)
    if dash:
        if first.family != 4 or slash or not _OCTET.fullmatch(octet) or int(octet) > 255:
            raise Invalid(
                f"{field} {text[:80]!r} is not an address, a range such as 10.1.1.5-9 or a prefix", field=field
            )
        # The range stays within the last octet.
        last = first.number & ~255 | int(octet)
        if last < first.number:
            raise Invalid(f"{field} {text!r} runs backwards: put the lower octet first", field=field)
        return Range(4, first.number, last)
    if slash:
        return parse_subnet(text, field=field, family=first.family, shortest=0, longest=BITS[first.family]).whole
    return Range(first.family, first.number, first.number)


def _check_protocol(text: str) -> None:
    if text in {"", "tcp", "udp", "icmp", "sctp"} or (_PROTOCOL.fullmatch(text) and int(text) <= 255):
        return
    raise Invalid(
        f"protocol {text[:40]!r} must be tcp, udp, sctp, icmp, a number up to 255, or empty for any", field="protocol"
    )


def parse_bandwidth(text: str) -> int:
    """Parse a bandwidth to bits per second; empty text is 0: no limit. As in Contiv, units are powers of 1,024."""
    if not text:
        return 0
    match = _BANDWIDTH.fullmatch(text)
    if match is None:
        raise Invalid(f"bandwidth {text[:64]!r} must look like 10 Mbps, 4G or 500kb", field="bandwidth")
    number, unit = match.groups()
    return int(number) << 10 * ("kmg".index(unit.lower()) + 1)


def _check_profile(profile: model.Profile) -> model.Profile:
    check_name(profile.tenant, field="tenantName")
    check_name(profile.name, field="profileName")
    parse_bandwidth(profile.bandwidth)
    if not 0 <= profile.dscp <= 63:
        raise Invalid(f"DSCP {profile.dscp} must be 0 to 63", field="DSCP")
    # 1 kB is less than a packet: the policer would drop everything.
    if profile.burst == 1 or not 0 <= profile.burst <= MAX_BURST:
        raise Invalid(f"burst {profile.burst} must be 0 or 2 to {MAX_BURST} kilobytes", field="burst")
    return profile


def _check_service(service: model.Service) -> model.Service:
    check_name(service.tenant, field="tenantName")
    check_name(service.network, field="networkName")
    check_name(service.name, field="serviceName", limit=MAX_LONG_NAME)
    _check_pair(service.ip_address, service.ipv6_address, fields=("ipAddress", "ipv6Address"))
    _check_pair(service.vip, service.ipv6_vip, fields=("vip", "ipv6Vip"))
    parse_selectors(service.selectors)
    return msgspec.structs.replace(
        service,
        ports=tuple(map(str, parse_service_ports(service.ports))),
        ipv6_address=_canonical_address(service.ipv6_address, field="ipv6Address"),
    )


def parse_selectors(selectors: Sequence[str]) -> frozenset[Label]:
    """Parse the selectors of a service: the labels of its backends, at least one."""
    if not selectors:
        raise Invalid("selectors is empty: give at least one key=value", field="selectors")
    for pair in selectors:
        check_text(pair, field="selectors")
    return parse_labels(selectors)


class ServicePort(NamedTuple):
    """An entry of a service's ports; its text is canonical."""

    port: int
    target_port: int
    protocol: str

    def __str__(self) -> str:
        return f"{self.port}:{self.target_port}:{self.protocol}"


def parse_service_ports(entries: Sequence[str]) -> tuple[ServicePort, ...]:
    """Parse the ports of a service, at least one; every entry is checked (W21)."""
    if not entries:
        raise Invalid("ports is empty: give at least one servicePort:providerPort:protocol", field="ports")
    ports = tuple(map(_parse_service_port, entries))
    if len({(port, protocol) for port, _, protocol in ports}) != len(ports):
        raise Invalid("ports lists a service port twice for one protocol: list each once", field="ports")
    return ports


def _parse_service_port(entry: str) -> ServicePort:
    port, _, rest = entry.partition(":")
    target_port, _, word = rest.partition(":")
    protocol = word.upper()
    if protocol not in {"TCP", "UDP"}:
        raise Invalid(f"ports: {entry[:80]!r} must be servicePort:providerPort:TCP or UDP", field="ports")
    # Port 0 is reserved (RFC 6335).
    for text in (port, target_port):
        if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
            raise Invalid(f"ports: {text[:20]!r} in {entry[:80]!r} must be 1 to 65535", field="ports")
    return ServicePort(int(port), int(target_port), protocol)


def _check_bgp(peer: model.BgpPeer) -> model.BgpPeer:
    check_name(peer.hostname, field="hostname", limit=MAX_LONG_NAME)
    parse_subnet(peer.router_ip, field="routerip", family=4, shortest=1, longest=31)
    for text, field in ((peer.as_number, "as"), (peer.neighbor_as, "neighbor-as")):
        if not _AS_NUMBER.fullmatch(text) or int(text) > 0xFFFFFFFF:
            raise Invalid(f"{field} {text[:40]!r} must be an AS number, 1 to 4294967295", field=field)
    if peer.neighbor:
        parse_address(peer.neighbor, field="neighbor", family=4)
    return peer


def _check_global(settings: model.Global) -> model.Global:
    if settings.name != GLOBAL_NAME:
        raise Invalid(f"name must be {GLOBAL_NAME!r}", field="name")
    # The type accepts Contiv's other values, so that the message can say why they fail.
    if settings.network_infra_type not in {"", "default"}:
        raise Invalid("networkInfraType: only default is supported, ACI is not", field="networkInfraType")
    parse_tag_range(settings.vlans, field="vlans", highest=MAX_VLAN, widest=MAX_VLAN)
    parse_tag_range(settings.vxlans, field="vxlans", highest=MAX_VNI, widest=MAX_VNI_SPAN)
    subnet = parse_subnet(settings.pvt_subnet, field="pvtSubnet", family=4, shortest=16, longest=16)
    return msgspec.structs.replace(settings, pvt_subnet=str(subnet._replace(span=subnet.whole)))


def parse_tag_range(text: str, *, field: str, highest: int, widest: int) -> tuple[int, int]:
    """Parse `first-last` within 1..highest, at most `widest` numbers."""
    match = _TAG_RANGE.fullmatch(text)
    if not match:
        raise Invalid(f"{field} {text[:40]!r} must be first-last, such as 1-{widest}", field=field)
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last <= highest:
        raise Invalid(f"{field} {text!r} must run upwards within 1 to {highest}", field=field)
    if last - first >= widest:
        raise Invalid(f"{field} {text!r} is wider than {widest}: narrow it", field=field)
    return first, last


def _check_endpoint(endpoint: model.Endpoint) -> model.Endpoint:
    check_name(endpoint.tenant, field="tenantName")
    check_name(endpoint.network, field="networkName")
    check_endpoint_id(endpoint.endpoint_id)
    _check_optional_name(endpoint.group, field="serviceName")
    _check_optional_name(endpoint.host, field="homingHost", limit=MAX_LONG_NAME)
    if endpoint.ip_address:
        parse_address(endpoint.ip_address, field="ipAddress", family=4)
    if endpoint.ipv6_address:
        parse_address(endpoint.ipv6_address, field="ipv6Address", family=6)
    if endpoint.vtep_ip:
        parse_address(endpoint.vtep_ip, field="vtepIP")
    if endpoint.mac_address and not _MAC.fullmatch(endpoint.mac_address):
        raise Invalid(f"macAddress {endpoint.mac_address[:40]!r} is not a MAC address", field="macAddress")
    _check_endpoint_texts(endpoint)
    for port in endpoint.pod.ports if endpoint.pod else ():
        check_text(port.name, field="pod.ports")
        _check_port(port.port, field="pod.ports")
        if not 0 <= port.protocol <= 255:
            raise Invalid(f"pod.ports: protocol {port.protocol} must be 0 to 255", field="pod.ports")
    return endpoint


def _check_endpoint_texts(endpoint: model.Endpoint) -> None:
    pod = endpoint.pod
    names = (pod.namespace, pod.name, pod.uid) if pod else ()
    own = (endpoint.container_id, endpoint.container_name, endpoint.interface)
    # One look at all of them is enough nearly always: a mirror checks every endpoint of the cluster.
    together = "".join((*own, *names, *endpoint.labels, *endpoint.labels.values()))
    if len(together) <= MAX_TEXT and together.isprintable():
        return
    for text, field in zip((*own, *names), ("containerID", "containerName", "intfName", *("pod",) * 3), strict=False):
        check_text(text, field=field)
    for pair in endpoint.labels.items():
        for text in pair:
            check_text(text, field="labels")


def _check_pair(v4: str, v6: str, *, fields: tuple[str, str]) -> None:
    """Check an IPv4 and an IPv6 address, each of which may be absent."""
    for family, text, field in ((4, v4, fields[0]), (6, v6, fields[1])):
        if text:
            parse_address(text, field=field, family=family)


def _check_node(node: model.Node) -> model.Node:
    check_name(node.name, field="name", limit=MAX_LONG_NAME)
    for text, field in ((node.ctrl_ip, "ctrlIp"), (node.vtep_ip, "vtepIp")):
        if text:
            parse_address(text, field=field)
    _check_port(node.vxlan_port, field="vxlanPort")
    check_text(node.version, field="version")
    # JSON spells an infinite number as 1e999.
    if not 0 <= node.unreachable_since < 1 << 53:
        raise Invalid(f"unreachableSince {node.unreachable_since} is not a time", field="unreachableSince")
    return node


def _check_claim(claim: model.Claim) -> model.Claim:
    if not check_text(claim.holder, field="holder"):
        raise Invalid("holder is missing: a claim has one", field="holder")
    return claim


def _check_block(block: model.Block) -> model.Block:
    _check_optional_name(block.owner, field="owner", limit=MAX_LONG_NAME)
    return block


def _check_sync_status(status: model.SyncStatus) -> model.SyncStatus:
    if not 0 <= status.revision < 1 << 63:
        raise Invalid(f"revision {status.revision} is not a revision", field="revision")
    for fault in status.faults:
        check_text(fault, field="faults")
    return status


def check_text(text: str, *, field: str) -> str:
    """Check free text from outside: bounded, without control characters. Returns it unchanged."""
    if len(text) > MAX_TEXT:
        raise Invalid(f"{field} is {len(text)} characters long: at most {MAX_TEXT} are allowed", field=field)
    # Control characters could forge log lines and terminal output.
    if not text.isprintable():
        raise Invalid(f"{field} contains a character that cannot be printed", field=field)
    return text


def _check_optional_name(text: str, *, field: str, limit: int = 64) -> None:
    if text:
        check_name(text, field=field, limit=limit)


def _check_tag_text(text: str) -> None:
    _check_optional_name(text, field="cfgdTag", limit=128)


def _canonical_address(text: str, *, field: str) -> str:
    return str(parse_address(text, field=field)) if text else ""


def _check_kube_namespace(document: KubeNamespace) -> KubeNamespace:
    check_name(document.name, field="name")
    return document


def _check_kube_policy(document: KubePolicy) -> KubePolicy:
    check_name(document.namespace, field="namespace")
    check_name(document.name, field="name", limit=MAX_LONG_NAME)
    validate(document.policy)
    return document


def _check_kube_service(document: KubeService) -> KubeService:
    """Check names and ports. Addresses are checked at use: one invalid address must not reject the whole service."""
    check_name(document.tenant, field="tenantName")
    check_name(document.namespace, field="namespace")
    check_name(document.name, field="name")
    for port in document.service.spec.ports:
        _check_port(port.port, field="spec.ports.port")
        # 0 means that the service has no node port.
        _check_port(port.node_port or 1, field="spec.ports.nodePort")
    return document


def _check_kube_slice(document: KubeSlice) -> KubeSlice:
    check_name(document.tenant, field="tenantName")
    check_name(document.namespace, field="namespace")
    check_name(document.service_name, field="serviceName")
    check_name(document.name, field="name", limit=MAX_LONG_NAME)
    for port in document.slice.ports or ():
        _check_port(port.port or 1, field="ports.port")
    return document


def _check_port(number: int, *, field: str) -> None:
    if not 0 < number < 1 << 16:
        raise Invalid(f"{field} {number} must be 1 to 65535", field=field)


# By type, so that a new kind without a check fails at once with a KeyError.
_CHECKS: dict[type[model.Value], Callable[..., model.Value]] = {
    model.Tenant: _check_tenant,
    model.Network: _check_network,
    model.Group: _check_group,
    model.Policy: _check_policy,
    model.Rule: _check_rule,
    model.Profile: _check_profile,
    model.Service: _check_service,
    model.BgpPeer: _check_bgp,
    model.Global: _check_global,
    model.Endpoint: _check_endpoint,
    model.Node: _check_node,
    model.Claim: _check_claim,
    model.Block: _check_block,
    model.SyncStatus: _check_sync_status,
    KubeNamespace: _check_kube_namespace,
    KubePolicy: _check_kube_policy,
    KubeService: _check_kube_service,
    KubeSlice: _check_kube_slice,
}
