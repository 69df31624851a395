"""IP protocols by number and name, and the text form `tcp/80` of a protocol with its port."""

from __future__ import annotations

from weft.domain.errors import Invalid

ICMP, TCP, UDP, ICMPV6, SCTP = 1, 6, 17, 58, 132

# Protocols with ports. For any other protocol a port has no meaning.
PORTED = (TCP, UDP, SCTP)

# `icmp` in a rule means the control messages of both families.
ICMP_EITHER = (ICMP, ICMPV6)

MAX_PORT = 65535

_NUMBERS = {"icmp": ICMP, "tcp": TCP, "udp": UDP, "icmpv6": ICMPV6, "sctp": SCTP}
_NAMES = {number: name for name, number in _NUMBERS.items()}


def protocol_number(text: str, *, field: str = "protocol") -> int:
    """Return the number of a protocol given by name (any case) or by decimal number 0..255, or raise `Invalid`."""
    number = _NUMBERS.get(text.lower())
    # `isdigit` alone accepts the digits of other scripts.
    if number is None and text.isascii() and text.isdigit() and len(text) <= 3:
        number = int(text)
    if number is None or number > 255:
        raise Invalid(f"protocol {text!r} is unknown: use {', '.join(_NUMBERS)} or a number to 255", field=field)
    return number


def protocol_name(number: int) -> str:
    """Return the name of a protocol, or its number as text if it has no name here."""
    return _NAMES.get(number, str(number))


def parse_service(text: str) -> tuple[int, int]:
    """Return protocol number and port of `tcp/80`, `icmp` or `ip/47`; the port is 0 if the protocol has no ports.

    A number alone is refused: whoever writes `80` means a port, and would get a verdict on IP protocol 80.
    """
    name, slash, port = text.partition("/")
    if not slash and name.isascii() and name.isdigit():
        raise Invalid(
            f"{text[:20]!r} has no protocol: write tcp/{text[:20]} (or ip/{text[:20]} for an IP protocol number)",
            field="service",
        )
    if slash and name.lower() == "ip":
        if (number := protocol_number(port)) in PORTED:
            raise Invalid(f"{text[:20]!r} lacks a port: write {protocol_name(number)}/80", field="port")
        return number, 0
    protocol = protocol_number(name)
    if not slash:
        if protocol in PORTED:
            raise Invalid(f"{text!r} lacks a port: write {name}/80", field="port")
        return protocol, 0
    return protocol, check_port(port, protocol=protocol)


def check_port(text: str, *, protocol: int) -> int:
    """Return the port number, or raise `Invalid`, also if the protocol has no ports."""
    if protocol not in PORTED:
        raise Invalid(f"{protocol_name(protocol)} has no ports", field="port")
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= MAX_PORT):
        raise Invalid(f"port {text!r} is not a number from 1 to {MAX_PORT}", field="port")
    return int(text)


def service_name(protocol: int, port: int) -> str:
    """Return the text that `parse_service` parses."""
    name = protocol_name(protocol)
    if protocol in PORTED:
        return f"{name}/{port}"
    return f"ip/{name}" if name.isdigit() else name
