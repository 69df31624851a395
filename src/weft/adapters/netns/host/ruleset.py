"""The nft table `inet weft_host` of the host netns: forwarding, NAT, host ports and node ports.

The whole table is replaced in one transaction, so what is there is always complete. Between replacements the elements
of its sets and maps are changed one by one (`apply_host_entries`), so that a change costs only its own size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Final, NamedTuple

import msgspec

from weft.adapters.netns.devices import HOST_LINK_PREFIX
from weft.adapters.netns.nft.commands import ADDRESS_TYPES, IP, replace_table
from weft.domain.addresses import Address, Subnet
from weft.domain.host_access.state import AddressScope, ExternalAddress, HostLink, HostPort, NodePort, NodePortVip
from weft.domain.loadbalancer.state import FrontendSources
from weft.domain.policy.model.protocols import PORTED, protocol_name
from weft.domain.policy.model.ranges import AddressSet, address_set, overlap
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import (
    Element,
    SetName,
    apply_changes,
    drop_elements,
    key,
    port,
    protocol,
    put_elements,
)
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.nf_tables import NFPROTO_INET

HOST_TABLE: Final = "weft_host"
# Comment that identifies our rules in chains of others.
COMMENT: Final = "weft"

CHAINS: Final = {
    "tenant_ingress": "drop packets of tenants to the tunnel port and to loopback addresses",
    "forward": "admission of packets to tenants: established, translated, or to an external or shared address",
    "snat_egress": "masquerade of tenants, and SNAT of hairpin and loopback connections",
    "source_check": "drop of connections to a restricted frontend from other sources, before any translation",
    "source_check_local": "the same for connections of the host itself",
    "host_dnat": "DNAT of received connections to host ports and node ports",
    "host_dnat_local": "the same for connections of the host itself",
    "port_dnat": "look up host ports, then node ports",
}
SETS: Final = {
    "host_ports{4,6}": "workload and port behind a host port of every address",
    "host_ports_by_ip{4,6}": "workload and port behind a host port of one address",
    "node_ports{4,6}": "node-port VIP of the tenant that owns a node port",
    "external_ips{4,6}": "external addresses of services that anybody may reach",
    "tenant_shared_ips{4,6}": "service addresses that all tenants of the node may reach",
    "restricted{4,6}": "frontends of services that only some sources may reach (loadBalancerSourceRanges)",
    "service_sources{4,6}": "these sources, by frontend",
}

_LOOPBACKS = {4: "127.0.0.0/8", 6: "::1"}
_TENANT_LINKS = f'"{HOST_LINK_PREFIX}*"'
_EXTERNAL_IPS, _SHARED_IPS = "external_ips", "tenant_shared_ips"
_SCOPES: Final[dict[str, AddressScope]] = {_EXTERNAL_IPS: "world", _SHARED_IPS: "tenants"}
# Source address of a workload that reaches another, or itself, through a port of its own host. No device has these
# addresses, so the replies come back to the host.
HOST_HAIRPIN: Final = {4: "169.254.1.3", 6: "fd77:6566:7400:3::1"}


class HostRules(msgspec.Struct, frozen=True):
    """The state items that the table depends on. `host_ips` are addresses of the host."""

    host_ips: frozenset[Address] = frozenset()
    host_ports: frozenset[HostPort] = frozenset()
    node_ports: frozenset[NodePort] = frozenset()
    node_port_vips: frozenset[NodePortVip] = frozenset()
    external: frozenset[ExternalAddress] = frozenset()
    sources: frozenset[FrontendSources] = frozenset()


class HostConfig(msgspec.Struct, frozen=True):
    """What the operator configures about the host. `nat_exclude` are destinations that see workloads unmasqueraded.

    Node ports are those of the host's addresses in `node_port_subnets`; without any, of all. `vtep` is the local end
    of the tunnels.
    """

    vtep: Address
    vxlan_port: int
    nat_exclude: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()
    # Protocol and port of listeners of the host that no host port, node port or external address takes over.
    reserved_ports: tuple[tuple[int, int], ...] = ()


def host_rules(items: Iterable[object]) -> HostRules:
    """Select the state items that the table depends on."""
    listed = list(items)
    return HostRules(
        frozenset(address for item in listed if isinstance(item, HostLink) for address in item.addresses),
        frozenset(item for item in listed if isinstance(item, HostPort)),
        frozenset(item for item in listed if isinstance(item, NodePort)),
        frozenset(item for item in listed if isinstance(item, NodePortVip)),
        frozenset(item for item in listed if isinstance(item, ExternalAddress) and item.scope != "host"),
        frozenset(item for item in listed if isinstance(item, FrontendSources)),
    )


def host_table(rules: HostRules, config: HostConfig) -> str:
    """Return the commands that replace the table, whatever is there."""
    lines = [f"table inet {HOST_TABLE} {{"]
    for family in (4, 6):
        lines += _host_port_maps(effective_host_ports(rules, family), family)
        lines += _node_port_map(rules, family)
        for name, addresses in scope_sets(rules).items():
            lines += _address_set(f"{name}{family}", (each for each in addresses if each.family == family), family)
        lines += _source_sets(rules, family)
    lines += [
        "chain tenant_ingress {",
        "type filter hook prerouting priority raw; policy accept;",
        # After masquerading, a workload's packet to the VXLAN port would look like one of this node's tunnels.
        f"iifname {_TENANT_LINKS} udp dport {config.vxlan_port} drop",
        # Replies to loopback host ports still have the address that the host called from (CVE-2020-8558).
        f"iifname {_TENANT_LINKS} ip daddr {_LOOPBACKS[4]} drop",
        "}",
        # A drop here is final. An accepted packet still goes through the chains of others (`accept_rules`).
        "chain forward {",
        "type filter hook forward priority filter - 10; policy accept;",
        f"oifname {_TENANT_LINKS} ct state established,related accept",
        f"oifname {_TENANT_LINKS} ct status dnat accept",
        *(f"oifname {_TENANT_LINKS} {ip} daddr @{_EXTERNAL_IPS}{family} accept" for family, ip in IP.items()),
        *(
            f"iifname {_TENANT_LINKS} oifname {_TENANT_LINKS} {ip} daddr @{_SHARED_IPS}{family} accept"
            for family, ip in IP.items()
        ),
        # Everything else from outside, and between tenants, is dropped; also to private addresses of a tenant.
        f"oifname {_TENANT_LINKS} drop",
        "}",
        "chain snat_egress {",
        "type nat hook postrouting priority srcnat; policy accept;",
        *(
            f"oifname {_TENANT_LINKS} ip saddr {_LOOPBACKS[4]} snat ip to {address}"
            for address in _loopback_sources(rules)
        ),
        *(
            f"iifname {_TENANT_LINKS} oifname {_TENANT_LINKS} ct status dnat snat {ip} to {HOST_HAIRPIN[family]}"
            for family, ip in IP.items()
        ),
        f"iifname {_TENANT_LINKS} oifname {_TENANT_LINKS} accept",
        *(f"iifname {_TENANT_LINKS} {IP[subnet.family]} daddr {subnet} accept" for subnet in config.nat_exclude),
        f"iifname {_TENANT_LINKS} masquerade",
        "}",
        # Before `host_dnat`: the host may have the address itself, and then no other chain sees it.
        *_source_check("source_check", "prerouting"),
        *_source_check("source_check_local", "output"),
        # Only for addresses of the host itself: forwarded packets are never caught (CVE-2019-9946).
        "chain host_dnat {",
        "type nat hook prerouting priority dstnat; policy accept;",
        *_reserved_return(config),
        "fib daddr type local jump port_dnat",
        "}",
        "chain host_dnat_local {",
        "type nat hook output priority -100; policy accept;",
        *_reserved_return(config),
        *(f"ip daddr {_LOOPBACKS[4]} {_host_port_by_ip(4, number)}" for number in PORTED),
        "fib daddr type local jump port_dnat",
        "}",
        "chain port_dnat {",
        *_port_lookups(config.node_port_subnets),
        "}",
        "}",
    ]
    return replace_table(f"inet {HOST_TABLE}", "\n".join(lines) + "\n")


def scope_sets(rules: HostRules) -> dict[str, set[Address]]:
    """Return the addresses by the set that admits them."""
    return {name: {each.address for each in rules.external if each.scope == scope} for name, scope in _SCOPES.items()}


def allowed_sources(rules: HostRules, family: int) -> dict[tuple[Address, int, int], AddressSet]:
    """Return the sources of each restricted frontend of a family, by address, protocol and port.

    Pods and others may have different frontends there. Here they are one: what both allow passes.
    """
    allowed: dict[tuple[Address, int, int], AddressSet] = {}
    for each in rules.sources:
        address, number, service_port, _ = each.frontend
        if address.family == family:
            sources, place = address_set(each.sources), (address, number, service_port)
            if place in allowed:
                sources = address_set(overlap(allowed[place].ranges, sources.ranges))
            allowed[place] = sources
    return allowed


def _source_check(chain: str, hook: str) -> list[str]:
    return [
        f"chain {chain} {{",
        # Behind conntrack (-200), so that replies pass, and before `host_dnat` (-100).
        f"type filter hook {hook} priority -105; policy accept;",
        "ct state != new accept",
        *(
            f"{_frontend(ip)} @restricted{family} {_frontend(ip)} . {ip} saddr != @service_sources{family} drop"
            for family, ip in IP.items()
        ),
        "}",
    ]


def _frontend(ip: str) -> str:
    return f"{ip} daddr . meta l4proto . th dport"


def effective_host_ports(rules: HostRules, family: int) -> list[HostPort]:
    """Return the host ports of a family in a stable order; of several with the same key the first one."""
    # Sorted backwards, so that the first of a key overwrites the others.
    by_key = {}
    for each in sorted((item for item in rules.host_ports if item.family == family), key=str, reverse=True):
        by_key[each.address, each.protocol, each.port] = each
    return [*by_key.values()][::-1]


def effective_node_ports(rules: HostRules, family: int) -> dict[tuple[int, int], Address]:
    """Return the VIP of each node port, by protocol and port. If several tenants ask for one, the first has it."""
    vips = {
        vip.tenant: address for vip in rules.node_port_vips for address in vip.addresses if address.family == family
    }
    ports = sorted(rules.node_ports, key=lambda each: each.tenant, reverse=True)
    return {(each.protocol, each.port): vips[each.tenant] for each in ports if each.tenant in vips}


def _address_set(name: str, addresses: Iterable[Address], family: int) -> Iterator[str]:
    yield f"set {name} {{"
    yield f"type {ADDRESS_TYPES[family]}"
    if texts := sorted({str(address) for address in addresses}):
        yield f"elements = {{ {', '.join(texts)} }}"
    yield "}"


def _source_sets(rules: HostRules, family: int) -> Iterator[str]:
    frontend = f"{ADDRESS_TYPES[family]} . inet_proto . inet_service"
    allowed = {
        f"{address} . {number} . {service_port}": sources
        for (address, number, service_port), sources in allowed_sources(rules, family).items()
    }
    for name, kind, texts in (
        ("restricted", frontend, sorted(allowed)),
        (
            "service_sources",
            f"{frontend} . {ADDRESS_TYPES[family]}; flags interval",
            sorted(f"{each} . {span}" for each, sources in allowed.items() for span in sources.ranges),
        ),
    ):
        yield f"set {name}{family} {{"
        yield f"type {kind}"
        if texts:
            yield f"elements = {{ {', '.join(texts)} }}"
        yield "}"


def _node_port_map(rules: HostRules, family: int) -> Iterator[str]:
    vips = effective_node_ports(rules, family)
    yield f"map node_ports{family} {{"
    yield f"type inet_proto . inet_service : {ADDRESS_TYPES[family]}"
    if vips:
        texts = (f"{number} . {node_port} : {vip}" for (number, node_port), vip in sorted(vips.items()))
        yield f"elements = {{ {', '.join(texts)} }}"
    yield "}"


def _host_port_maps(ports: list[HostPort], family: int) -> Iterator[str]:
    address_type = ADDRESS_TYPES[family]
    for name, first_field, chosen in (
        ("host_ports", "", [each for each in ports if each.address is None]),
        ("host_ports_by_ip", f"{address_type} . ", [each for each in ports if each.address is not None]),
    ):
        yield f"map {name}{family} {{"
        yield f"type {first_field}inet_proto . inet_service : {address_type} . inet_service"
        if chosen:
            yield f"elements = {{ {', '.join(map(_host_port_text, chosen))} }}"
        yield "}"


def _host_port_text(item: HostPort) -> str:
    address = "" if item.address is None else f"{item.address} . "
    return f"{address}{item.protocol} . {item.port} : {item.target} . {item.target_port}"


def _port_lookups(node_port_subnets: Iterable[Subnet]) -> Iterator[str]:
    """Yield the rules of `port_dnat`: host ports of one address, host ports of all, node ports. Loopback has none."""
    for family, ip in IP.items():
        yield f"{ip} daddr {_LOOPBACKS[family]} return"
        yield from (_host_port_by_ip(family, number) for number in PORTED)
        yield from (_host_port_dnat(family, number, name="host_ports") for number in PORTED)
        node_port_dnat = f"dnat {ip} to meta l4proto . th dport map @node_ports{family}"
        subnets = [str(subnet) for subnet in node_port_subnets if subnet.family == family]
        if subnets:
            yield f"{ip} daddr {{ {', '.join(subnets)} }} {node_port_dnat}"
        elif not node_port_subnets:
            yield f"meta nfproto ipv{family} {node_port_dnat}"


def _reserved_return(config: HostConfig) -> Iterator[str]:
    """Yield the rule that leaves the host's own listeners alone, whatever is mapped."""
    if config.reserved_ports:
        ports = ", ".join(f"{number} . {reserved}" for number, reserved in config.reserved_ports)
        yield f"fib daddr type local meta l4proto . th dport {{ {ports} }} return"


def _host_port_by_ip(family: int, number: int) -> str:
    return _host_port_dnat(family, number, name="host_ports_by_ip", first_field=f"{IP[family]} daddr . ")


def _host_port_dnat(family: int, number: int, *, name: str, first_field: str = "") -> str:
    # nft only accepts a port to translate to where the protocol is given before it.
    return (
        f"meta nfproto ipv{family} meta l4proto {protocol_name(number)} "
        f"dnat {IP[family]} to {first_field}meta l4proto . th dport map @{name}{family}"
    )


def _loopback_sources(rules: HostRules) -> list[Address]:
    """Return the address that replaces 127.0.0.0/8 when the host calls a loopback host port: one or none."""
    return sorted(each for each in rules.host_ips if each.family == 4)[:1]


def accept_rules(family: str, table: str, chain: str) -> str:
    """Return commands that let our packets pass somebody else's chain that drops by default."""
    return "".join(
        f'insert rule {family} {table} {chain} {match} {_TENANT_LINKS} accept comment "{COMMENT}"\n'
        for match in ("iifname", "oifname")
    )


class HostEntry(NamedTuple):
    """An element, and the set or map of the host table it is in."""

    name: str
    element: Element


def sharing_key(item: object) -> object:
    """Return what state items that may produce the same entry have in common."""
    match item:
        case HostPort() | NodePort():
            return item.protocol, item.port
        case ExternalAddress():
            return item.address
    return None


def host_ruleset_entries(rules: HostRules) -> frozenset[HostEntry]:
    """Return all entries of a table made by these rules, except the sources of frontends."""
    return frozenset(_entries(rules))


def _entries(rules: HostRules) -> Iterator[HostEntry]:
    for family in (4, 6):
        yield from map(_host_port_entry, effective_host_ports(rules, family))
        for (number, node_port), vip in effective_node_ports(rules, family).items():
            element = Element(key=key(protocol(number), port(node_port)), value=pack_address(vip))
            yield HostEntry(f"node_ports{family}", element)
    for name, addresses in scope_sets(rules).items():
        for address in addresses:
            yield HostEntry(f"{name}{address.family}", Element(key=pack_address(address)))


def _host_port_entry(item: HostPort) -> HostEntry:
    value = key(pack_address(item.target), port(item.target_port))
    l4 = protocol(item.protocol), port(item.port)
    if item.address is None:
        return HostEntry(f"host_ports{item.family}", Element(key=key(*l4), value=value))
    element = Element(key=key(pack_address(item.address), *l4), value=value)
    return HostEntry(f"host_ports_by_ip{item.family}", element)


def apply_host_entries(netlink: NetlinkSocket, *, drop: Set[HostEntry], put: Set[HostEntry]) -> None:
    """Delete and add entries in one transaction; `NetlinkError` if the table is not as expected."""
    requests = [
        request
        for entries, make in ((drop, drop_elements), (put, put_elements))
        for name in sorted({entry.name for entry in entries})
        for request in make(
            SetName(NFPROTO_INET, HOST_TABLE, name), [each.element for each in entries if each.name == name]
        )
    ]
    apply_changes(netlink, requests)
