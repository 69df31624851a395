"""The table of the host's own namespace, in nft's own language (pure): who may pass between tenants, host and world.

It is made in one transaction, so what is there is always whole; what its maps hold is changed by `host_maps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from weft.domain.addresses import Address, Range, Subnet
from weft.domain.host_access.state import Audience, ExternalAddress, HostLink, HostPort, NodePort, NodePortVip
from weft.domain.policy.model.protocols import PORTED, protocol_name
from weft.domain.policy.model.ranges import AddressSet, address_set

HOST_TABLE = "weft_host"
# Begins the name of the host's end of every link to a tenant.
HOST_PREFIX = "wefth-"
# The mark of our rules in chains of others.
COMMENT = "weft"

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_LOOPBACKS = {4: "127.0.0.0/8", 6: "::1"}
_OURS = f'"{HOST_PREFIX}*"'
_OUTER, _SHARED, OUTER_FROM = "outer", "shared", "outer_from"
_AUDIENCES: dict[str, Audience] = {_OUTER: "world", _SHARED: "tenants"}
# Who a workload is to others, or to itself, that it reaches by a port of its own host. Nobody has these addresses.
TURNED = {4: "169.254.1.3", 6: "fd77:6566:7400:3::1"}


class HostRules(msgspec.Struct, frozen=True):
    """What the table depends on. `doors` are those of the tenants of node ports, `own` are addresses of the host."""

    own: frozenset[Address] = frozenset()
    ports: frozenset[HostPort] = frozenset()
    node_ports: frozenset[NodePort] = frozenset()
    doors: frozenset[NodePortVip] = frozenset()
    reaches: frozenset[ExternalAddress] = frozenset()


class HostSurroundings(msgspec.Struct, frozen=True):
    """What an operator says about the host. `unmasked` are targets that see workloads as they are.

    Node ports are those of the host's addresses in `node_port_subnets`; without any, of all. `vtep` is the end of the
    node's tunnels.
    """

    vtep: Address
    vxlan_port: int
    unmasked: tuple[Subnet, ...] = ()
    node_port_subnets: tuple[Subnet, ...] = ()


def rules_of(parts: Iterable[object]) -> HostRules:
    """What some parts mean to the table."""
    listed = list(parts)
    return HostRules(
        frozenset(address for each in listed if isinstance(each, HostLink) for address in each.addresses),
        frozenset(each for each in listed if isinstance(each, HostPort)),
        frozenset(each for each in listed if isinstance(each, NodePort)),
        frozenset(each for each in listed if isinstance(each, NodePortVip)),
        frozenset(each for each in listed if isinstance(each, ExternalAddress) and each.scope != "host"),
    )


def host_table(rules: HostRules, host: HostSurroundings) -> str:
    """The commands that make the table, whatever is there."""
    vtep_word = _WORDS[host.vtep.family]
    lines = [f"table inet {HOST_TABLE} {{"]
    for family in (4, 6):
        lines += _maps(leading_ports(rules, family), family)
        lines += _node_port_map(rules, family)
        for name, addresses in audience_sets(rules).items():
            lines += _address_set(f"{name}{family}", (each for each in addresses if each.family == family), family)
        lines += _source_set(rules, family)
    lines += [
        "chain arriving {",
        "type filter hook prerouting priority raw; policy accept;",
        # Nobody asks whose connection a tunnel's packet is, and the host's table of connections would be full of them.
        f"{vtep_word} daddr {host.vtep} udp dport {host.vxlan_port} iifname != {_OURS} notrack accept",
        # Masked as its node, a workload's packet would pass for one out of a tunnel.
        f"iifname {_OURS} udp dport {host.vxlan_port} drop",
        # Answers to calls of loopback ports are still for the address that the host called from.
        f"iifname {_OURS} ip daddr {_LOOPBACKS[4]} drop",
        "}",
        "chain tunnels_out {",
        "type filter hook output priority raw; policy accept;",
        f"{vtep_word} saddr {host.vtep} udp dport {host.vxlan_port} notrack",
        "}",
        "chain forward {",
        "type filter hook forward priority filter - 10; policy accept;",
        f"oifname {_OURS} ct state established,related accept",
        f"oifname {_OURS} ct status dnat accept",
        *(f"oifname {_OURS} {word} daddr @{_OUTER}{family} accept" for family, word in _WORDS.items()),
        *(
            f"oifname {_OURS} {word} daddr . {word} saddr @{OUTER_FROM}{family} accept"
            for family, word in _WORDS.items()
        ),
        *(f"iifname {_OURS} oifname {_OURS} {word} daddr @{_SHARED}{family} accept" for family, word in _WORDS.items()),
        # Nobody else from outside opens connections to workloads past us, and tenants do not meet on the host either,
        # not even by private addresses (H3).
        f"oifname {_OURS} drop",
        "}",
        "chain way_out {",
        "type nat hook postrouting priority srcnat; policy accept;",
        *(f"oifname {_OURS} ip saddr {_LOOPBACKS[4]} snat ip to {own}" for own in _speakers(rules)),
        *(
            f"iifname {_OURS} oifname {_OURS} ct status dnat snat {word} to {TURNED[family]}"
            for family, word in _WORDS.items()
        ),
        f"iifname {_OURS} oifname {_OURS} accept",
        *(f"iifname {_OURS} {_WORDS[each.family]} daddr {each} accept" for each in host.unmasked),
        f"iifname {_OURS} masquerade",
        "}",
        "chain called {",
        "type nat hook prerouting priority dstnat; policy accept;",
        "fib daddr type local jump published",
        "}",
        "chain calls {",
        "type nat hook output priority -100; policy accept;",
        *(f"ip daddr {_LOOPBACKS[4]} {_at_address(4, number)}" for number in PORTED),
        "fib daddr type local jump published",
        "}",
        "chain published {",
        *_lookups(host.node_port_subnets),
        "}",
        "}",
    ]
    return f"add table inet {HOST_TABLE}\ndelete table inet {HOST_TABLE}\n" + "\n".join(lines) + "\n"


def audience_sets(rules: HostRules) -> dict[str, set[Address]]:
    """Who gets to which addresses from anywhere, by the names of the sets."""
    return {
        name: {each.address for each in rules.reaches if each.scope == scope} - outer_sources(rules).keys()
        for name, scope in _AUDIENCES.items()
    }


def outer_sources(rules: HostRules) -> dict[Address, AddressSet]:
    """From where the world gets to addresses that not everybody may ask, whoever else has them."""
    found: defaultdict[Address, list[Range]] = defaultdict(list)
    for each in rules.reaches:
        if each.sources is not None:
            found[each.address] += each.sources
    return {address: address_set(ranges) for address, ranges in found.items()}


def leading_ports(rules: HostRules, family: int) -> list[HostPort]:
    """The ports of a family, in an order of their own; of several at one place the first."""
    found = {}
    for each in sorted((port for port in rules.ports if port.family == family), key=str, reverse=True):
        found[each.address, each.protocol, each.port] = each
    return [*found.values()][::-1]


def leading_doors(rules: HostRules, family: int) -> dict[tuple[int, int], Address]:
    """Where node ports lead, by protocol and number. The first tenant has one that several ask for."""
    doors = {door.tenant: address for door in rules.doors for address in door.addresses if address.family == family}
    ports = sorted(rules.node_ports, key=lambda each: each.tenant, reverse=True)
    return {(each.protocol, each.port): doors[each.tenant] for each in ports if each.tenant in doors}


def _address_set(name: str, addresses: Iterable[Address], family: int) -> Iterator[str]:
    yield f"set {name} {{"
    yield f"type {_ADDRESS_TYPES[family]}"
    if texts := sorted({str(address) for address in addresses}):
        yield f"elements = {{ {', '.join(texts)} }}"
    yield "}"


def _source_set(rules: HostRules, family: int) -> Iterator[str]:
    kind = _ADDRESS_TYPES[family]
    some = ((address, span) for address, sources in outer_sources(rules).items() for span in sources.ranges)
    texts = sorted(f"{address} . {span}" for address, span in some if address.family == family)
    yield f"set {OUTER_FROM}{family} {{"
    yield f"type {kind} . {kind}; flags interval"
    if texts:
        yield f"elements = {{ {', '.join(texts)} }}"
    yield "}"


def _node_port_map(rules: HostRules, family: int) -> Iterator[str]:
    leading = leading_doors(rules, family)
    yield f"map node_ports{family} {{"
    yield f"type inet_proto . inet_service : {_ADDRESS_TYPES[family]}"
    if leading:
        texts = (f"{protocol} . {port} : {door}" for (protocol, port), door in sorted(leading.items()))
        yield f"elements = {{ {', '.join(texts)} }}"
    yield "}"


def _maps(ports: list[HostPort], family: int) -> Iterator[str]:
    kind = _ADDRESS_TYPES[family]
    for name, lead, some in (
        ("ports", "", [each for each in ports if each.address is None]),
        ("ports_at", f"{kind} . ", [each for each in ports if each.address is not None]),
    ):
        yield f"map {name}{family} {{"
        yield f"type {lead}inet_proto . inet_service : {kind} . inet_service"
        if some:
            yield f"elements = {{ {', '.join(map(_element, some))} }}"
        yield "}"


def _element(port: HostPort) -> str:
    at = "" if port.address is None else f"{port.address} . "
    return f"{at}{port.protocol} . {port.port} : {port.target} . {port.target_port}"


def _lookups(node_port_subnets: Iterable[Subnet]) -> Iterator[str]:
    """Ports of one address first, node ports last. Who calls loopback from elsewhere gets nowhere."""
    for family, word in _WORDS.items():
        yield f"{word} daddr {_LOOPBACKS[family]} return"
        yield from (_at_address(family, number) for number in PORTED)
        yield from (_port_lookup(family, number, name="ports") for number in PORTED)
        leading = f"dnat {word} to meta l4proto . th dport map @node_ports{family}"
        chosen = [str(subnet) for subnet in node_port_subnets if subnet.family == family]
        if chosen:
            yield f"{word} daddr {{ {', '.join(chosen)} }} {leading}"
        elif not node_port_subnets:
            yield f"meta nfproto ipv{family} {leading}"


def _at_address(family: int, protocol: int) -> str:
    """The rule for ports that are those of one address."""
    return _port_lookup(family, protocol, name="ports_at", lead=f"{_WORDS[family]} daddr . ")


def _port_lookup(family: int, protocol: int, *, name: str, lead: str = "") -> str:
    # nft takes a target's port for one only where it has been told the protocol.
    return (
        f"meta nfproto ipv{family} meta l4proto {protocol_name(protocol)} "
        f"dnat {_WORDS[family]} to {lead}meta l4proto . th dport map @{name}{family}"
    )


def _speakers(rules: HostRules) -> list[Address]:
    """As whom the host speaks to workloads that it called at a port of loopback."""
    return sorted(each for each in rules.own if each.family == 4)[:1]


def passing_rules(family: str, table: str, chain: str) -> str:
    """What lets our packets pass a chain of others that drops what it does not know."""
    return "".join(
        f'insert rule {family} {table} {chain} {way} {_OURS} accept comment "{COMMENT}"\n'
        for way in ("iifname", "oifname")
    )
