"""What a caller may ask for beside an interface: capabilities, labels and static settings of the network configuration.

Sources of the same thing, strongest first: `runtimeConfig`, `args.cni`, `CNI_ARGS` (P-11, P-45). Labels written into
the configuration by its administrator bind: an argument that says otherwise is refused, never silently lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from weft.cni.arguments import Arguments, parse_addresses, parse_mac
from weft.cni.documents import Document
from weft.cni.errors import CniError, Code
from weft.cni.result import Dns, IPAddress, parse_dns

ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
"""The capability by which containerd and CRI-O hand over a pod's annotations."""

CAPABILITIES = ("aliases", "bandwidth", "dns", "ips", "mac", "portMappings", ANNOTATIONS)
"""The capabilities that a configuration of ours declares."""

_ALIAS = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")
_PROTOCOLS = frozenset({"tcp", "udp", "sctp"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PortMapping:
    """A port of the host (on one of its addresses, or on all) that leads to a port of the container."""

    host_port: int
    container_port: int
    protocol: str
    host_address: IPAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Limits in bits per second and bursts in bits; 0 is no limit. Ingress is towards the container."""

    ingress_rate: int = 0
    ingress_burst: int = 0
    egress_rate: int = 0
    egress_burst: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for; empty where nothing was. `dns` is None when nobody spoke of it, and binds when empty."""

    addresses: tuple[IPAddress, ...] = ()
    mac: str = ""
    bandwidth: Bandwidth | None = None
    port_mappings: tuple[PortMapping, ...] = ()
    dns: Dns | None = None
    aliases: tuple[str, ...] = ()
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def parse_wishes(config: Document, arguments: Arguments, *, network: str) -> Wishes:
    """All wishes of a request; what cannot be read is code 7, what we can never do is code 2."""
    if ipam := config.child("ipam").text("type"):
        raise CniError(Code.UNSUPPORTED_FIELD, f"ipam.type {ipam!r} is not supported: addresses are our own to give")
    runtime = config.child("runtimeConfig")
    args = config.child("args")
    cni = args.child("cni")
    try:
        addresses = parse_addresses(runtime.texts("ips")) or parse_addresses(cni.texts("ips")) or arguments.addresses
        mac = parse_mac(runtime.text("mac")) or parse_mac(cni.text("mac")) or arguments.mac
    except ValueError as error:
        raise CniError(Code.BAD_CONFIG, f"the requested address cannot be read: {error}") from error
    return Wishes(
        addresses=addresses,
        mac=mac,
        bandwidth=_bandwidth(runtime) if "bandwidth" in runtime else None,
        port_mappings=tuple(_port_mapping(each.in_any_case()) for each in runtime.children("portMappings")),
        dns=_dns(config, runtime),
        aliases=_aliases(runtime, network=network),
        labels=_labels(config, {**_mesos_labels(args), **_listed_labels(cni), **arguments.labels}),
        annotations=runtime.mapping(ANNOTATIONS),
    )


def _bandwidth(runtime: Document) -> Bandwidth:
    limits = runtime.child("bandwidth").in_any_case()
    return Bandwidth(
        ingress_rate=limits.number("ingressrate") or 0,
        ingress_burst=limits.number("ingressburst") or 0,
        egress_rate=limits.number("egressrate") or 0,
        egress_burst=limits.number("egressburst") or 0,
    )


def _port_mapping(mapping: Document) -> PortMapping:
    protocol = mapping.text("protocol").lower() or "tcp"
    if protocol not in _PROTOCOLS:
        raise mapping.fault("protocol", "tcp, udp or sctp")
    try:
        host_address = ip_address(text) if (text := mapping.text("hostip")) else None
    except ValueError as error:
        raise mapping.fault("hostip", "an address") from error
    return PortMapping(
        host_port=_port(mapping, "hostport"),
        container_port=_port(mapping, "containerport"),
        protocol=protocol,
        host_address=host_address,
    )


def _port(mapping: Document, name: str) -> int:
    port = mapping.number(name)
    if port is None or not 1 <= port <= 65_535:
        raise mapping.fault(name, "a port from 1 to 65535")
    return port


def _dns(config: Document, runtime: Document) -> Dns | None:
    """The runtime's word, else the configuration's if it gives any member, be it an empty list (P-10)."""
    if "dns" in runtime:
        spoken = runtime.child("dns").in_any_case()
        return Dns(
            nameservers=spoken.texts("servers"), search=spoken.texts("searches"), options=spoken.texts("options")
        )
    written = config.child("dns")
    if any(name in written for name in ("nameservers", "domain", "search", "options")):
        return parse_dns(written)
    return None


def _aliases(runtime: Document, *, network: str) -> tuple[str, ...]:
    """A list of names, or podman's form: lists by network name."""
    listed = isinstance(runtime.raw("aliases"), list)
    aliases = runtime.texts("aliases") if listed else runtime.child("aliases").texts(network)
    if unfit := [alias for alias in aliases if not _ALIAS.fullmatch(alias)]:
        raise CniError(Code.BAD_CONFIG, f"{runtime.place('aliases')}: {unfit[0]!r:.80} is not a name")
    return aliases


def _listed_labels(holder: Document) -> dict[str, str]:
    return {each.text("key"): each.text("value") for each in holder.children("labels")}


def _mesos_labels(args: Document) -> dict[str, str]:
    return _listed_labels(args.child("org.apache.mesos").child("network_info").child("labels"))


def _labels(config: Document, asked: Mapping[str, str]) -> Mapping[str, str]:
    bound = config.mapping("labels")
    for key, value in bound.items():
        if asked.get(key, value) != value:
            raise CniError(
                Code.BAD_CONFIG, f"label {key} is {value!r} by the network configuration: {asked[key]!r:.80} is refused"
            )
    return {**asked, **bound}
