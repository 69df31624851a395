"""Parses what a request asks for: runtime capabilities, labels, and static settings of the network configuration.

Order of precedence: `runtimeConfig`, `args.cni`, `CNI_ARGS` (P-11, P-45). Labels in the network configuration are the
administrator's: a different value in an argument is rejected, never silently dropped.
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

# The capability by which containerd and CRI-O pass a pod's annotations.
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"

# The capabilities that our network configuration declares: runtimes pass only declared ones.
CAPABILITIES = ("aliases", RATES, "dns", "ips", "mac", PORTS, ANNOTATIONS)

# Host names, and underscores as podman writes them.
_ALIAS = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The requested capabilities; empty where absent. `dns` is None when absent; an empty one is a request for none."""

    addresses: tuple[IPAddress, ...] = ()
    mac: str = ""
    dns: Dns | None = None
    aliases: tuple[str, ...] = ()
    ports: tuple[PortMapping, ...] = ()
    bandwidth: Bandwidth = NO_LIMITS
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def parse_capabilities(config: Document, arguments: Arguments, *, network: str) -> Capabilities:
    """The capabilities of a request; code 7 for what cannot be read, code 2 for what is not supported."""
    # A configured IPAM plugin would never be called: rejected, so that its ranges are not believed to be in use.
    if ipam := config.child("ipam").text("type"):
        raise CniError(Code.UNSUPPORTED_FIELD, f"ipam.type {ipam!r} is not supported: weft allocates addresses itself")
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
    """The runtime's, else the configuration's. Any member counts, even an empty list (P-10)."""
    requested = runtime.child("dns").in_any_case()
    if any(name in requested for name in ("servers", "searches", "options")):
        return Dns(
            nameservers=requested.texts("servers"),
            search=requested.texts("searches"),
            options=requested.texts("options"),
        )
    configured = config.child("dns")
    if any(name in configured for name in ("nameservers", "domain", "search", "options")):
        return parse_dns(configured)
    return None


def _aliases(runtime: Document, *, network: str) -> tuple[str, ...]:
    """A list of names, or podman's form: lists by network name."""
    listed = isinstance(runtime.raw("aliases"), list)
    aliases = runtime.texts("aliases") if listed else runtime.child("aliases").texts(network)
    if invalid := [alias for alias in aliases if not _ALIAS.fullmatch(alias)]:
        raise CniError(Code.BAD_CONFIG, f"{runtime.place('aliases')}: {invalid[0]!r:.80} is not a name")
    return aliases


def _listed_labels(holder: Document) -> dict[str, str]:
    return {each.text("key"): each.text("value") for each in holder.children("labels")}


def _mesos_labels(args: Document) -> dict[str, str]:
    # Mesos' network/cni isolator puts the labels of the task's NetworkInfo here.
    return _listed_labels(args.child("org.apache.mesos").child("network_info").child("labels"))


def _labels(config: Document, requested: Mapping[str, str]) -> Mapping[str, str]:
    binding = config.mapping("labels")
    for key, value in binding.items():
        if requested.get(key, value) != value:
            raise CniError(
                Code.BAD_CONFIG,
                f"label {key} is {value!r} by the network configuration: {requested[key]!r:.80} is rejected",
            )
    return {**requested, **binding}
