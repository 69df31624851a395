"""Results of ADD: one type, encoded and parsed in the shape of every version of the specification.

| version | shape |
|---|---|
| 0.1.0, 0.2.0 | `ip4`, `ip6`: one address of each family, with its gateway and the family's routes |
| 0.3.0 – 0.4.0 | lists `interfaces`, `ips` (each with `version`), `routes` |
| 1.0.0 | the same without `version` |
| 1.1.0 | interfaces have MTU, socket and PCI id; routes have MTU, MSS, priority, table and scope |

What a version cannot express is omitted (C-130), but 0.1.0 and 0.2.0 cannot express a result without an address.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
    ip_network,
)

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document
from weft.cni.versions import SpecVersion, parse_version

IPAddress = IPv4Address | IPv6Address
IPInterface = IPv4Interface | IPv6Interface
IPNetwork = IPv4Network | IPv6Network
Json = dict[str, object]

# Made once: `json.dumps` with arguments builds an encoder for each call.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An interface; `sandbox` is the container's network namespace, empty on the host."""

    name: str
    mac: str = ""
    sandbox: str = ""
    mtu: int | None = None
    socket_path: str = ""
    pci_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address with its prefix; `interface` is an index into the result's interfaces."""

    address: IPInterface
    gateway: IPAddress | None = None
    interface: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route; without a gateway it goes through the gateway of its family's address."""

    target: IPNetwork
    gateway: IPAddress | None = None
    mtu: int | None = None
    advmss: int | None = None
    priority: int | None = None
    table: int | None = None
    scope: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dns:
    """The DNS settings of the container."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of an attachment."""

    interfaces: tuple[Interface, ...] = ()
    addresses: tuple[Address, ...] = ()
    routes: tuple[Route, ...] = ()
    dns: Dns = Dns()


def encode_result(result: Result, version: SpecVersion) -> bytes:
    """The result in the shape of `version` (C-043). Code 1 when that version cannot express it."""
    members: Json = {"cniVersion": version.value}
    members |= _families(result) if version < SpecVersion.V0_3_0 else _lists(result, version)
    if result.dns != Dns():
        members["dns"] = _present(
            nameservers=list(result.dns.nameservers),
            domain=result.dns.domain,
            search=list(result.dns.search),
            options=list(result.dns.options),
        )
    return _ENCODER.encode(members).encode() + b"\n"


def parse_result(value: object, *, version: SpecVersion, where: str = "result") -> Result:
    """The result in a JSON value; code 7 when it is invalid. `version` applies if the value has none (C-120)."""
    document = Document.of(value, where=where)
    # Runtimes pass the result of an earlier version as they cached it.
    if "cniVersion" in document:
        version = parse_version(document.raw("cniVersion"))
    dns = parse_dns(document.child("dns"))
    if version < SpecVersion.V0_3_0:
        families = [document.child(family) for family in ("ip4", "ip6") if family in document]
        return Result(
            addresses=tuple(
                Address(address=_interface(family, "ip"), gateway=_address(family, "gateway")) for family in families
            ),
            routes=tuple(_route(route) for family in families for route in family.children("routes")),
            dns=dns,
        )
    interfaces = tuple(
        Interface(
            name=each.text("name"),
            mac=each.text("mac"),
            sandbox=each.text("sandbox"),
            mtu=each.number("mtu"),
            socket_path=each.text("socketPath"),
            pci_id=each.text("pciID"),
        )
        for each in document.children("interfaces")
    )
    return Result(
        interfaces=interfaces,
        addresses=tuple(_listed_address(each, interfaces=len(interfaces)) for each in document.children("ips")),
        routes=tuple(_route(each) for each in document.children("routes")),
        dns=dns,
    )


def parse_dns(document: Document) -> Dns:
    """The `dns` member of a result or of a network configuration."""
    return Dns(
        nameservers=document.texts("nameservers"),
        domain=document.text("domain"),
        search=document.texts("search"),
        options=document.texts("options"),
    )


def _families(result: Result) -> Json:
    # These versions have one address per family: the first.
    members: Json = {}
    for family in (4, 6):
        first = next((each for each in result.addresses if each.address.version == family), None)
        if first is not None:
            routes = [_route_members(route) for route in result.routes if route.target.version == family]
            members[f"ip{family}"] = _present(ip=str(first.address), gateway=_text(first.gateway), routes=routes)
    if not members:
        raise CniError(
            Code.INCOMPATIBLE_VERSION, "CNI versions before 0.3.0 cannot express a result without an address"
        )
    return members


def _lists(result: Result, version: SpecVersion) -> Json:
    newest = version >= SpecVersion.V1_1_0
    interfaces = [
        {"name": each.name}
        | _present(mac=each.mac, sandbox=each.sandbox)
        | (_present(mtu=each.mtu, socketPath=each.socket_path, pciID=each.pci_id) if newest else {})
        for each in result.interfaces
    ]
    addresses = [
        ({"version": str(each.address.version)} if version < SpecVersion.V1_0_0 else {})
        | _present(interface=each.interface, address=str(each.address), gateway=_text(each.gateway))
        for each in result.addresses
    ]
    routes = [
        _route_members(each)
        | (
            _present(mtu=each.mtu, advmss=each.advmss, priority=each.priority, table=each.table, scope=each.scope)
            if newest
            else {}
        )
        for each in result.routes
    ]
    return _present(interfaces=interfaces, ips=addresses, routes=routes)


def _route_members(route: Route) -> Json:
    return {"dst": str(route.target)} | _present(gw=_text(route.gateway))


def _present(**members: object) -> Json:
    """The members that are not empty. Numbers never are: interface index 0 must be written (C-046)."""
    return {name: value for name, value in members.items() if value not in (None, "", [])}


def _text(address: IPAddress | None) -> str:
    return "" if address is None else str(address)


def _listed_address(document: Document, *, interfaces: int) -> Address:
    index = document.number("interface")
    if index is not None and index >= interfaces:
        raise document.fault("interface", f"an index into {interfaces} interfaces")
    return Address(address=_interface(document, "address"), gateway=_address(document, "gateway"), interface=index)


def _route(document: Document) -> Route:
    try:
        # Not strict: plugins write destinations with host bits set.
        target = ip_network(document.text("dst"), strict=False)
    except ValueError as error:
        raise document.fault("dst", "a network") from error
    return Route(
        target=target,
        gateway=_address(document, "gw"),
        mtu=document.number("mtu"),
        advmss=document.number("advmss"),
        priority=document.number("priority"),
        table=document.number("table"),
        scope=document.number("scope"),
    )


def _address(document: Document, name: str) -> IPAddress | None:
    try:
        return ip_address(text) if (text := document.text(name)) else None
    except ValueError as error:
        raise document.fault(name, "an address") from error


def _interface(document: Document, name: str) -> IPInterface:
    text = document.text(name)
    try:
        # `ip_interface` takes a bare address for a host route, which CNI does not mean.
        if "/" not in text:
            raise ValueError("the prefix is missing")
        return ip_interface(text)
    except ValueError as error:
        raise document.fault(name, "an address with its prefix") from error
