"""What a caller may ask for beside an interface: capabilities, labels and static settings of the network configuration.

Sources of the same thing, strongest first: `runtimeConfig`, `args.cni`, `CNI_ARGS` (P-11, P-45). Labels written into
the configuration by its administrator bind: an argument that says otherwise is refused, never silently lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.cni.arguments import Arguments, parse_addresses, parse_mac
from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document
from weft.cni.portmap_bandwidth import NO_LIMITS, PORTS, RATES, Bandwidth, PortMapping, parse_bandwidth, parse_ports
from weft.cni.result import Dns, IPAddress, parse_dns

# The capability by which containerd and CRI-O hand over a pod's annotations.
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"

# The capabilities that a configuration of ours declares.
CAPABILITIES = ("aliases", RATES, "dns", "ips", "mac", PORTS, ANNOTATIONS)

_ALIAS = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What was asked for; empty where nothing was. `dns` is None when nobody spoke of it, and binds when empty."""

    addresses: tuple[IPAddress, ...] = ()
    mac: str = ""
    dns: Dns | None = None
    aliases: tuple[str, ...] = ()
    ports: tuple[PortMapping, ...] = ()
    bandwidth: Bandwidth = NO_LIMITS
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def parse_wishes(config: Document, arguments: Arguments, *, network: str) -> Capabilities:
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
    return Capabilities(
        addresses=addresses,
        mac=mac,
        dns=_dns(config, runtime),
        aliases=_aliases(runtime, network=network),
        ports=parse_ports(runtime),
        bandwidth=parse_bandwidth(runtime),
        labels=_labels(config, {**_mesos_labels(args), **_listed_labels(cni), **arguments.labels}),
        annotations=runtime.mapping(ANNOTATIONS),
    )


def _dns(config: Document, runtime: Document) -> Dns | None:
    """The runtime's word, else the configuration's; a word is any member, be it an empty list (P-10)."""
    spoken = runtime.child("dns").in_any_case()
    if any(name in spoken for name in ("servers", "searches", "options")):
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
