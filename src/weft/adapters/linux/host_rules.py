"""The table of the host's own namespace, in nft's own language (pure): who may pass between tenants, host and world.

It is made anew in one transaction at every change, so what is there is always whole; the kernel keeps the connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.domain.addresses import Subnet
from weft.domain.hosting.parts import HostPort
from weft.domain.policy.protocols import PORTED, protocol_name

HOST_TABLE = "weft_host"
HOST_PREFIX = "wefth-"
"""Begins the name of the host's end of every link to a tenant."""
COMMENT = "weft"
"""The mark of our rules in chains of others."""

_ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
_WORDS = {4: "ip", 6: "ip6"}
_LOOPBACKS = {4: "127.0.0.0/8", 6: "::1"}
_OURS = f'"{HOST_PREFIX}*"'


def host_table(ports: Iterable[HostPort], *, vxlan_port: int, unmasked: Iterable[Subnet] = ()) -> str:
    """The commands that make the table, whatever is there. `unmasked` are targets that see workloads as they are."""
    listed, excluded = sorted(ports, key=str), list(unmasked)
    lines = [f"table inet {HOST_TABLE} {{"]
    for family in (4, 6):
        lines += _maps([port for port in listed if port.family == family], family)
    lines += [
        "chain arriving {",
        # Masked as its node, a workload's packet would pass for one out of a tunnel.
        "type filter hook prerouting priority filter - 10; policy accept;",
        f"iifname {_OURS} udp dport {vxlan_port} drop",
        "}",
        "chain forward {",
        "type filter hook forward priority filter - 10; policy accept;",
        # Tenants do not meet on the host either, not even by private addresses (H3).
        f"iifname {_OURS} oifname {_OURS} drop",
        f"oifname {_OURS} ct state established,related accept",
        f"oifname {_OURS} ct status dnat accept",
        f"oifname {_OURS} drop",  # nobody from outside opens connections to workloads past us
        "}",
        "chain way_out {",
        "type nat hook postrouting priority srcnat; policy accept;",
        *(f"iifname {_OURS} {_WORDS[each.family]} daddr {each} accept" for each in excluded),
        f"iifname {_OURS} masquerade",
        "}",
        "chain called {",
        "type nat hook prerouting priority dstnat; policy accept;",
        "fib daddr type local jump published",
        "}",
        "chain calls {",
        "type nat hook output priority -100; policy accept;",
        "fib daddr type local jump published",
        "}",
        "chain published {",
        *_lookups(),
        "}",
        "}",
    ]
    return f"add table inet {HOST_TABLE}\ndelete table inet {HOST_TABLE}\n" + "\n".join(lines) + "\n"


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


def _lookups() -> Iterator[str]:
    """Ports of one address first. Connections over loopback never leave the host, so they are not translated."""
    for family, word in _WORDS.items():
        yield f"{word} daddr {_LOOPBACKS[family]} return"
        for name, lead in (("ports_at", f"{word} daddr . "), ("ports", "")):
            # nft takes a target's port for one only where it has been told the protocol.
            for number in PORTED:
                yield (
                    f"meta nfproto ipv{family} meta l4proto {protocol_name(number)} "
                    f"dnat {word} to {lead}meta l4proto . th dport map @{name}{family}"
                )


def passing_rules(family: str, table: str, chain: str) -> str:
    """What lets our packets pass a chain of others that drops what it does not know."""
    return "".join(
        f'insert rule {family} {table} {chain} {way} {_OURS} accept comment "{COMMENT}"\n'
        for way in ("iifname", "oifname")
    )
