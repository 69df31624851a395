"""Wishes about an attachment's traffic: ports of the host that lead to it, and how fast it goes (CNI conventions)."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document

PORTS, RATES = "portMappings", "bandwidth"
PROTOCOLS = ("tcp", "udp", "sctp")

_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMapping:
    """A port of the host that leads to a port of the container; of one of the host's addresses, or of all."""

    protocol: str
    host_port: int
    container_port: int
    host_ip: IPv4Address | IPv6Address | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bits per second and bits at once, into the container and out of it; 0 is no limit."""

    ingress_rate: int = 0
    ingress_burst: int = 0
    egress_rate: int = 0
    egress_burst: int = 0


NO_LIMITS = Bandwidth()


def parse_ports(runtime: Document) -> tuple[PortMapping, ...]:
    """The wished ports of the host; code 7 when they cannot be read, code 2 for what we never do."""
    return tuple(_parse_port(each.in_any_case()) for each in runtime.children(PORTS))


def _parse_port(wish: Document) -> PortMapping:
    protocol = wish.text("protocol").lower() or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise wish.fault("protocol", f"one of {', '.join(PROTOCOLS)}")
    ports = []
    for name in ("hostport", "containerport"):
        number = wish.number(name) or 0
        if not 0 < number <= _LAST_PORT:
            raise wish.fault(name, f"a port from 1 to {_LAST_PORT}")
        ports.append(number)
    try:
        host_ip = ip_address(wish.text("hostip")) if wish.text("hostip") else None
    except ValueError as error:
        raise wish.fault("hostip", "an address") from error
    if host_ip is not None and host_ip.version == 6 and host_ip.is_loopback:
        # The kernel never lets a packet with this source leave the host, whatever is set.
        raise CniError(Code.UNSUPPORTED_FIELD, f"{wish.place('hostip')}: ::1 does not lead to containers")
    return PortMapping(protocol=protocol, host_port=ports[0], container_port=ports[1], host_ip=host_ip)


def parse_bandwidth(runtime: Document) -> Bandwidth:
    """The wished rates; code 7 when they cannot be read. A burst without a rate asks for nothing."""
    wish = runtime.child(RATES).in_any_case()
    into, out = (wish.number(f"{way}rate") or 0 for way in ("ingress", "egress"))
    return Bandwidth(
        ingress_rate=into,
        ingress_burst=(wish.number("ingressburst") or 0) if into else 0,
        egress_rate=out,
        egress_burst=(wish.number("egressburst") or 0) if out else 0,
    )
