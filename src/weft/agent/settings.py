"""Settings of netplugin: Contiv's flags and variables (contiv 1.2, 1.3) with defaults for one machine, and ours."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weft import __version__
from weft.agent.node_ip import default_address
from weft.cni.chains import CONF_DIR
from weft.cni.wire import SOCKET_PATH
from weft.domain.addresses import BITS, Address, Subnet, parse_address, parse_subnet
from weft.domain.errors import Invalid
from weft.domain.ids import MAX_LONG_NAME, NodeName, check_name
from weft.domain.policy.model.protocols import TCP, UDP, protocol_number
from weft.drivers import OVS_DIR, KubernetesSettings, RemoteStoreSettings, SqliteStoreSettings, StoreSettings
from weft.options import (
    COMMON_OPTIONS,
    DOMAIN_OPTION,
    KUBERNETES_OPTIONS,
    kubernetes_settings,
    readable_file,
    store_settings,
)
from weft.runtime.dns_control import SOCKET_NAME
from weft.runtime.settings import BadSettings, Option, comma_list, host_port, one_of, read_settings, seconds

# The store socket of a netmaster on the same machine.
DEFAULT_NETMASTER = "unix:/var/lib/weft/store.sock"
# What netmaster listens on: join, store and REST.
NETMASTER_PORTS = (9997, 9998, 9999)
# Contiv's path (contiv 1.7).
CONTIV_SOCKET = "/run/contiv/contiv-cni.sock"


def _address(text: str) -> Address:
    try:
        return parse_address(text, field="address")
    except Invalid as error:
        raise ValueError(error.message) from error


def _node_name(text: str) -> NodeName:
    try:
        return NodeName(check_name(text, field="name", limit=MAX_LONG_NAME))
    except Invalid as error:
        raise ValueError(error.message) from error


def _port(text: str) -> int:
    # `host_port` has the range check.
    return host_port(f"any:{text}")[1]


def _subnets(text: str) -> tuple[Subnet, ...]:
    def read(item: str) -> Subnet:
        family = 6 if ":" in item else 4
        subnet = parse_subnet(item, field="subnet", family=family, shortest=0, longest=BITS[family])
        return subnet._replace(span=subnet.whole)

    try:
        return tuple(map(read, comma_list(text)))
    except Invalid as error:
        raise ValueError(error.message) from error


def _reserved_ports(text: str) -> tuple[tuple[int, int], ...]:
    """Protocol number and port of `9998`, which is TCP, `tcp/9998` or `udp/4789`."""
    return tuple(map(_reserved_port, comma_list(text)))


def _reserved_port(text: str) -> tuple[int, int]:
    protocol, slash, port = text.rpartition("/")
    try:
        return protocol_number(protocol if slash else "tcp"), _port(port)
    except Invalid as error:
        raise ValueError(error.message) from error


def _masters(text: str) -> tuple[str, ...]:
    items = comma_list(text)
    for item in items:
        kind, _, rest = item.partition(":")
        if kind == "https":
            host_port(rest.removeprefix("//"))
        elif kind != "unix" or not rest.startswith("/"):
            raise ValueError(f"{item!r} is neither unix:/PATH nor https://HOST:PORT")
    return items


def _loopback(text: str) -> tuple[str, int] | None:
    if text == "none":
        return None
    host, port = host_port(text)
    try:
        if ip_address(host).is_loopback:
            return host, port
    except ValueError:
        pass  # a host name may resolve to any address
    raise ValueError(f"{text!r} is not on loopback: it is served without TLS, so only as 127.0.0.1 or ::1")


OPTIONS = (
    *COMMON_OPTIONS,
    *KUBERNETES_OPTIONS,
    Option(name="host", flags=("--host", "--host-label"), env="HOST", default=None, read=_node_name,
           help="name of this node; the kernel's host name"),
    Option(name="ctrl_ip", flags=("--ctrl-ip",), env="CONTROL_IP", default=None, read=_address,
           help="address of this agent; the one towards other machines"),
    Option(name="vtep_ip", flags=("--vtep-ip",), env="VTEP_IP", default=None, read=_address,
           help="address of the tunnel endpoint (VTEP); the one towards other machines"),
    Option(name="vlan_uplinks", flags=("--vlan-uplinks", "--vlan-if"), env="VLAN_UPLINKS", default=(), read=comma_list,
           help="comma list of interfaces; required with --netmode vlan"),
    Option(name="vxlan_port", flags=("--vxlan-port",), env="VXLAN_PORT", default=4789, read=_port,
           help="UDP port of the tunnels; 4789"),
    Option(name="nat_exclude", flags=("--nat-exclude",), env="NAT_EXCLUDE", default=(), read=_subnets,
           help="comma list of external subnets to which pods are not masqueraded; none"),
    Option(name="node_port_subnets", flags=("--nodeport-addresses",), env="NODEPORT_ADDRESSES", default=(),
           read=_subnets, help="comma list of subnets; node ports are open on the host's addresses in them; all"),
    Option(name="reserved_host_ports", flags=("--reserved-host-ports",), env="RESERVED_HOST_PORTS",
           default=tuple((6, port) for port in NETMASTER_PORTS), read=_reserved_ports,
           help="comma list of [PROTOCOL/]PORT that no pod or service gets on the host, besides this agent's own and "
                "those of its store; 9997,9998,9999"),
    Option(name="datapath", flags=("--datapath",), env="DATAPATH", default="linux",
           read=one_of("linux", "ovs"), help="linux or ovs; linux"),
    Option(name="ovs_dir", flags=("--ovs-dir",), env="OVS_DIR", default=OVS_DIR, read=Path,
           help="directory of Open vSwitch's sockets, with --datapath ovs; /run/openvswitch"),
    Option(name="netmaster", flags=("--netmaster",), env="NETMASTER", default=(DEFAULT_NETMASTER,), read=_masters,
           help=f"store endpoints at netmaster, without etcd: unix:PATH or https://HOST:PORT,…; {DEFAULT_NETMASTER}"),
    Option(name="tls_ca", flags=("--tls-ca",), env="TLS_CA", default=None, read=readable_file,
           help="CA of the masters, with --netmaster https://…"),
    Option(name="tls_cert", flags=("--tls-cert",), env="TLS_CERT", default=None, read=readable_file,
           help="certificate of this node: SAN URI weft:name:NODE, or OU weft:nodes and CN NODE"),
    Option(name="tls_key", flags=("--tls-key",), env="TLS_KEY", default=None, read=readable_file,
           help="key of --tls-cert"),
    Option(name="join_token", flags=("--join-token",), env="JOIN_TOKEN", default=None, read=Path,
           help="file with the token for enrollment at the netmaster that Kubernetes discovery finds; "
                "instead of --netmaster and --tls-…"),
    Option(name="cni_socket", flags=("--cni-socket",), env="CNI_SOCKET", default=Path(SOCKET_PATH), read=Path,
           help=f"socket for the CNI plugin; {SOCKET_PATH}"),
    Option(name="cni_conf_dir", flags=("--cni-conf-dir",), env="CNI_CONF_DIR", default=CONF_DIR, read=Path,
           help=f"directory with the CNI configurations of the runtime; invalid chains are rejected; {CONF_DIR}"),
    Option(name="contiv_socket", flags=("--contiv-socket",), env="CONTIV_SOCKET", default="", read=str,
           help=f"socket for Contiv's CNI protocol, or none; {CONTIV_SOCKET} in mode kubernetes, else none"),
    Option(name="rest_address", flags=("--rest-address",), env="REST_ADDRESS", default=("127.0.0.1", 9090),
           read=_loopback, help="loopback address of REST and metrics, or none; 127.0.0.1:9090"),
    Option(name="dns_socket", flags=("--dns-socket",), env="DNS_SOCKET", default="", read=str,
           help=f"control socket of netdns, or none to disable DNS; {SOCKET_NAME} in --run-dir"),
    DOMAIN_OPTION,
    Option(name="run_dir", flags=("--run-dir",), env="RUN_DIR", default=Path("/run/weft"), read=Path,
           help="directory with the pinned tenant netns; /run/weft"),
    Option(name="data_dir", flags=("--data-dir",), env="DATA_DIR", default=Path("/var/lib/weft"), read=Path,
           help="directory of the attachment log; /var/lib/weft"),
    Option(name="node_ttl", flags=("--node-ttl",), env="NODE_TTL", default=2.0, read=seconds,
           help="seconds after which this node counts as unreachable; 2"),
    Option(name="offline_limit", flags=("--offline-limit",), env="OFFLINE_LIMIT", default=3600.0, read=seconds,
           help="seconds for which pods may start while the store is unreachable; at most netmaster's; 3600"),
    Option(name="stale_after", flags=("--stale-after",), env="STALE_AFTER", default=10.0, read=seconds,
           help="seconds for which this node may lag behind the store and stay ready; 10"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """All settings of netplugin, validated."""

    mode: str
    store: StoreSettings
    join_token: Path | None
    kubernetes: KubernetesSettings | None
    log_level: str
    json_log: bool
    syslog: tuple[str, str, int] | None
    host: NodeName
    ctrl_ip: Address
    vtep_ip: Address
    vxlan_port: int
    vlan_uplinks: tuple[str, ...]
    nat_exclude: tuple[Subnet, ...]
    node_port_subnets: tuple[Subnet, ...]
    # Protocol and port of the listeners that nothing may be mapped over: ours, and those the operator names.
    reserved_host_ports: tuple[tuple[int, int], ...]
    datapath: str
    ovs_dir: Path
    cni_socket: Path
    cni_conf_dir: Path
    contiv_socket: Path | None
    rest_address: tuple[str, int] | None
    dns_socket: Path | None
    domain: str
    run_dir: Path
    data_dir: Path
    node_ttl: float
    offline_limit: float
    stale_after: float


def read_agent_settings(argv: Sequence[str], environ: Mapping[str, str]) -> AgentSettings:
    """The settings, or `BadSettings` with every fault."""
    values = read_settings("netplugin", OPTIONS, argv=argv, environ=environ, version=f"netplugin {__version__}")
    faults: list[str] = []
    store = store_settings(values, faults, embedded=values["data_dir"])
    host = values["host"]
    if host is None:
        try:
            host = _node_name(socket.gethostname())
        except ValueError as error:
            faults.append(f"--host: the host name is not a valid node name, give one: {error}")
    if values["netmode"] == "vlan" and not values["vlan_uplinks"]:
        faults.append("--vlan-uplinks is required with --netmode vlan")
    if values["netmode"] == "vlan" and values["datapath"] == "linux":
        faults.append("--netmode vlan: the linux datapath carries no VLAN tags; use vxlan")
    if values["join_token"] and values["mode"] != "kubernetes":
        faults.append("--join-token needs --mode kubernetes: netmaster is discovered through Kubernetes")
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        faults.append("--tls-cert and --tls-key go together")
    join_token = None
    if isinstance(store, SqliteStoreSettings):  # the embedded store is netmaster's: an agent reaches it by netmaster
        store = _remote(values, str(host))
        join_token = values["join_token"]
    if faults:
        raise BadSettings(faults)
    # Detecting an address may take seconds (a slow resolver), so it is skipped when both are given.
    default = _explicit_address(values) or default_address()
    return AgentSettings(
        # Settings that are taken over as they are.
        **{name: values[name] for name in (
            "mode", "log_level", "json_log", "vxlan_port", "vlan_uplinks", "nat_exclude", "node_port_subnets",
            "datapath", "ovs_dir", "cni_socket", "cni_conf_dir", "rest_address", "domain", "run_dir", "data_dir",
            "node_ttl", "offline_limit", "stale_after",
        )},
        store=store,
        reserved_host_ports=_all_reserved(values, store),
        join_token=join_token,
        kubernetes=kubernetes_settings(values),
        contiv_socket=_contiv_socket(values),
        dns_socket=_dns_socket(values),
        syslog=values["syslog"] if values["use_syslog"] else None,
        host=host,
        ctrl_ip=values["ctrl_ip"] or default,
        vtep_ip=values["vtep_ip"] or default,
    )  # fmt: skip


def _all_reserved(values: Mapping[str, Any], store: StoreSettings) -> tuple[tuple[int, int], ...]:
    """The ports of our own listeners and of the store, which may be on this host, and those of the option."""
    own = [(UDP, values["vxlan_port"])]
    if values["rest_address"]:
        own.append((TCP, values["rest_address"][1]))
    endpoints: tuple[str, ...] = getattr(store, "endpoints", ())
    own += [(TCP, port) for endpoint in endpoints if (port := urlsplit(endpoint).port)]
    return tuple(sorted({*own, *values["reserved_host_ports"]}))


def _explicit_address(values: Mapping[str, Any]) -> Address | None:
    return values["ctrl_ip"] if values["ctrl_ip"] and values["vtep_ip"] else None


def _contiv_socket(values: Mapping[str, Any]) -> Path | None:
    # Empty: not given. "none" turns the socket off.
    text = values["contiv_socket"] or (CONTIV_SOCKET if values["mode"] == "kubernetes" else "none")
    return None if text == "none" else Path(text)


def _dns_socket(values: Mapping[str, Any]) -> Path | None:
    text = values["dns_socket"] or str(values["run_dir"] / SOCKET_NAME)
    return None if text == "none" else Path(text)


def _remote(values: Mapping[str, Any], host: str) -> RemoteStoreSettings:
    files = {name: str(values[f"tls_{name}"] or "") for name in ("ca", "cert", "key")}
    return RemoteStoreSettings(endpoints=values["netmaster"], node=host, **files)
