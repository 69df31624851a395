"""netmaster's settings: Contiv's flags and variables (contiv 1.2, 1.4) and Weft's own, with defaults for one host."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft import __version__
from weft.domain.addresses import parse_subnet_v4
from weft.domain.errors import Invalid
from weft.drivers import EtcdStoreSettings, KubernetesSettings, StoreSettings
from weft.options import (
    COMMON_OPTIONS,
    KUBERNETES_OPTIONS,
    kubernetes_settings,
    readable_file,
    secret_file,
    store_settings,
)
from weft.runtime.settings import BadSettings, Option, count, host_port, one_of, read_settings, seconds

# Addresses to listen on, but not to be reached at.
WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared with, never bound


def _subnet(text: str) -> str:
    if text == "none":
        return ""
    try:
        subnet = parse_subnet_v4(text)
    except Invalid as error:
        raise ValueError(error.message) from error
    # One address for the gateway and at least one for an endpoint.
    if subnet.usable.size < 2:
        raise ValueError(f"{text!r} has no room for a gateway and an endpoint")
    return str(subnet)


OPTIONS = (
    *COMMON_OPTIONS,
    *KUBERNETES_OPTIONS,
    Option(name="external", flags=("--external-address", "--listen-url"), env="EXTERNAL_ADDRESS",
           default=("127.0.0.1", 9999), read=host_port, help="listen address of REST; 127.0.0.1:9999"),
    Option(name="internal", flags=("--internal-address", "--control-url"), env="INTERNAL_ADDRESS", default=None,
           read=host_port, help="address at which other masters reach this one; the external address"),
    Option(name="infra", flags=("--infra", "--infra-type"), env="INFRA", default="default", read=one_of("default"),
           help="default"),
    Option(name="plugin_name", flags=("--name", "--plugin-name"), env="PLUGIN_NAME", default="netplugin",
           help="driver name in Docker networks; netplugin"),
    Option(name="data_dir", flags=("--data-dir",), env="DATA_DIR", default=Path("/var/lib/weft"), read=Path,
           help="directory of the embedded store; /var/lib/weft"),
    Option(name="default_subnet", flags=("--default-subnet",), env="DEFAULT_SUBNET", default="10.224.0.0/16",
           read=_subnet, help="subnet of default-net at the first start, or none; 10.224.0.0/16"),
    Option(name="tls_cert", flags=("--tls-cert",), env="TLS_CERT", default=None, read=readable_file,
           help="TLS certificate of the listeners"),
    Option(name="tls_key", flags=("--tls-key",), env="TLS_KEY", default=None, read=readable_file,
           help="private key of --tls-cert"),
    Option(name="tls_ca", flags=("--tls-ca",), env="TLS_CA", default=None, read=readable_file,
           help="CA of the other masters, and of the nodes' client certificates without --node-ca"),
    Option(name="node_ca", flags=("--node-ca",), env="NODE_CA", default=None, read=readable_file,
           help="CA of the nodes' client certificates; that of --tls-ca"),
    Option(name="max_connections", flags=("--max-connections",), env="MAX_CONNECTIONS", default=20_000, read=count,
           help="connections of agents to the store in all; an agent has up to four; 20000"),
    Option(name="connections_per_source", flags=("--connections-per-source",), env="CONNECTIONS_PER_SOURCE",
           default=256, read=count, help="connections to REST from one address of another machine; 256"),
    Option(name="request_rate", flags=("--requests-per-second",), env="REQUESTS_PER_SECOND", default=500, read=count,
           help="requests from one address of another machine; this machine and other masters may send ten times "
                "as many; 500"),
    Option(name="token", flags=("--token-file",), env="TOKEN_FILE", read=secret_file,
           help="file with the bearer token that clients must send"),
    Option(name="store_socket", flags=("--store-socket",), env="STORE_SOCKET", default=None, read=Path,
           help="unix socket of the store for agents on this host; <data-dir>/store.sock"),
    Option(name="store_address", flags=("--store-address",), env="STORE_ADDRESS", default=None, read=host_port,
           help="host:port of the store for agents, with mutual TLS; off"),
    Option(name="join_address", flags=("--join-address",), env="JOIN_ADDRESS", default=None, read=host_port,
           help="host:port of node enrollment, which issues certificates for --store-address; off"),
    Option(name="certificate_lifetime", flags=("--certificate-lifetime",), env="CERTIFICATE_LIFETIME",
           default=604_800.0, read=seconds, help="lifetime of node certificates in seconds; 604800"),
    Option(name="leader_ttl", flags=("--leader-ttl",), env="LEADER_TTL", default=6.0, read=seconds,
           help="lease of the leader in seconds; when it expires, another master is elected; 6"),
    Option(name="single_machine", flags=("--single-machine",), env="SINGLE_MACHINE", default=False, read=None,
           help="with etcd: no master runs on another machine, so that a loopback address may be ours"),
    Option(name="offline_limit", flags=("--offline-limit",), env="OFFLINE_LIMIT", default=3600.0, read=seconds,
           help="seconds after which an unreachable node's endpoints are garbage-collected; 3600"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings:
    """All of netmaster's settings, validated."""

    mode: str
    netmode: str
    fwdmode: str
    store: StoreSettings
    kubernetes: KubernetesSettings | None
    log_level: str
    json_log: bool
    syslog: tuple[str, str, int] | None
    external: tuple[str, int]
    internal: tuple[str, int]
    plugin_name: str
    data_dir: Path
    default_subnet: str
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    node_ca: Path | None
    max_connections: int
    connections_per_source: int
    request_rate: int
    token: str = field(repr=False)
    store_socket: Path
    store_address: tuple[str, int] | None
    join_address: tuple[str, int] | None
    certificate_lifetime: float
    leader_ttl: float
    offline_limit: float

    @property
    def listeners(self) -> tuple[tuple[str, int], ...]:
        """The internal address gets its own listener unless the external one covers it (contiv 1.4)."""
        host, port = self.external
        covered = self.internal == self.external or (host in WILDCARDS and port == self.internal[1])
        return (self.external,) if covered else (self.external, self.internal)

    @property
    def own_address(self) -> str:
        """The address of this master for other masters, and its name in /info."""
        return format_host_port(self.internal)


def _enrollment_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Why node enrollment is not possible with these settings."""
    if values["mode"] != "kubernetes":
        yield "--join-address: needs --mode kubernetes, as nodes are authenticated by Kubernetes tokens"
    # Both are published to the agents and become SANs of our certificate.
    for flag, address in (("--store-address", values["store_address"]), ("--join-address", values["join_address"])):
        try:
            if address is None or ipaddress.ip_address(address[0]).is_unspecified:
                yield f"{flag} must be an address at which agents reach this netmaster: it is published to them"
        except ValueError:
            yield f"{flag}: {address[0]!r} is a name: give an IP address, which is published to the agents"


def format_host_port(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a listener on the host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_master_settings(argv: Sequence[str], environ: Mapping[str, str]) -> MasterSettings:
    """Read and validate the settings; `BadSettings` with every fault."""
    values = read_settings("netmaster", OPTIONS, argv=argv, environ=environ, version=f"netmaster {__version__}")
    faults: list[str] = []
    store = store_settings(values, faults, embedded=values["data_dir"] / "weft.db")
    if values["join_address"]:
        faults += _enrollment_faults(values)
    elif values["store_address"] and not (values["tls_cert"] and (values["node_ca"] or values["tls_ca"])):
        faults.append(
            "--store-address needs --tls-cert, --tls-key and --node-ca or --tls-ca, or --join-address: nodes are "
            "authenticated by their certificates"
        )
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        faults.append("--tls-cert and --tls-key go together")
    internal, token = values["internal"] or values["external"], values["token"]
    if internal[0] in WILDCARDS:
        faults.append(
            f"{format_host_port(internal)} is not an address that other masters can reach: give --internal-address"
        )
    # Every machine has this address: followers would forward to themselves, and masters would have the same name.
    if isinstance(store, EtcdStoreSettings) and is_loopback(internal[0]) and not values["single_machine"]:
        faults.append(
            f"{format_host_port(internal)} is loopback, and with etcd other masters must reach this one: give "
            "--internal-address host:port, or --single-machine if none runs on another machine"
        )
    if token and (len(token) < 16 or not token.isascii() or not token.isprintable()):
        faults.append("--token-file: the token must be at least 16 printable ASCII characters")
    # REST can change everything: beyond loopback it needs encryption and authentication.
    for host, port in dict.fromkeys((values["external"], internal)):
        if not is_loopback(host) and not (values["tls_cert"] and token):
            faults.append(
                f"{format_host_port((host, port))} is not loopback: give --tls-cert, --tls-key and --token-file"
            )
    if faults:
        raise BadSettings(faults)
    return MasterSettings(
        **{name: values[name] for name in (
            "mode", "netmode", "fwdmode", "log_level", "json_log", "external", "plugin_name", "data_dir",
            "default_subnet", "tls_cert", "tls_key", "tls_ca", "token", "store_address", "join_address",
            "certificate_lifetime", "leader_ttl", "offline_limit", "max_connections", "connections_per_source",
            "request_rate",
        )},
        node_ca=values["node_ca"] or values["tls_ca"],
        store=store,
        kubernetes=kubernetes_settings(values),
        syslog=values["syslog"] if values["use_syslog"] else None,
        internal=internal,
        store_socket=values["store_socket"] or values["data_dir"] / "store.sock",
    )  # fmt: skip
