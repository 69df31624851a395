"""Parses the capabilities `portMappings` and `bandwidth` (CNI conventions)."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document

# Names of capabilities.
PORTS, RATES = "portMappings", "bandwidth"
PROTOCOLS = ("tcp", "udp", "sctp")

_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMapping:
    """A host port that is forwarded to a container port; on one of the host's addresses, or on all."""

    protocol: str
    host_port: int
    container_port: int
    host_ip: IPv4Address | IPv6Address | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Rates in bits per second and bursts in bits, into the container and out of it; 0 means unlimited."""

    ingress_rate: int = 0
    ingress_burst: int = 0
    egress_rate: int = 0
    egress_burst: int = 0


NO_LIMITS = Bandwidth()


def parse_ports(runtime: Document) -> tuple[PortMapping, ...]:
    """The port mappings; code 7 when they cannot be read, code 2 for what is not supported."""
    return tuple(_parse_port(each.in_any_case()) for each in runtime.children(PORTS))


def _parse_port(mapping: Document) -> PortMapping:
    # Callers write it in upper or lower case, or leave it out.
    protocol = mapping.text("protocol").lower() or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise mapping.fault("protocol", f"one of {', '.join(PROTOCOLS)}")
    ports = []
    for name in ("hostport", "containerport"):
        number = mapping.number(name) or 0
        if not 0 < number <= _LAST_PORT:
            raise mapping.fault(name, f"a port from 1 to {_LAST_PORT}")
        ports.append(number)
    try:
        host_ip = ip_address(mapping.text("hostip")) if mapping.text("hostip") else None
    except ValueError as error:
        raise mapping.fault("hostip", "an address") from error
    if host_ip is not None and host_ip.version == 6 and host_ip.is_loopback:
        # For IPv4 the sysctl route_localnet allows it; IPv6 has none, the kernel drops such packets (RFC 4291, 2.5.3).
        raise CniError(Code.UNSUPPORTED_FIELD, f"{mapping.place('hostip')}: ::1 cannot be forwarded to containers")
    return PortMapping(protocol=protocol, host_port=ports[0], container_port=ports[1], host_ip=host_ip)


def parse_bandwidth(runtime: Document) -> Bandwidth:
    """The bandwidth; code 7 when it cannot be read. A burst without a rate has no effect."""
    limits = runtime.child(RATES).in_any_case()
    into, out = (limits.number(f"{direction}rate") or 0 for direction in ("ingress", "egress"))
    return Bandwidth(
        ingress_rate=into,
        ingress_burst=(limits.number("ingressburst") or 0) if into else 0,
        egress_rate=out,
        egress_burst=(limits.number("egressburst") or 0) if out else 0,
    )
