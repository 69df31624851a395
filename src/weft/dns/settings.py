"""Settings of netdns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from weft import __version__
from weft.dns.upstream import DNS_PORT, Upstream
from weft.options import DOMAIN_OPTION
from weft.runtime.dns_control import SOCKET_NAME
from weft.runtime.logs import LEVELS
from weft.runtime.settings import Option, comma_list, host_port, one_of, read_settings

# A day: an address that moves must not stay in caches for longer.
_MAX_TTL = 86_400


def _upstreams(text: str) -> tuple[Upstream, ...]:
    return tuple(map(_upstream, comma_list(text)))


def _upstream(text: str) -> Upstream:
    try:
        ip_address(text)
    except ValueError:
        host, port = host_port(text)
    else:
        host, port = text, DNS_PORT
    try:
        ip_address(host)
    except ValueError as error:
        raise ValueError(f"{text!r} is not ADDRESS or ADDRESS:PORT") from error
    return Upstream(host, port)


def _ttl(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MAX_TTL:
        raise ValueError(f"{text!r} is not a number of seconds from 0 to {_MAX_TTL}")
    return int(text)


OPTIONS = (
    Option(name="run_dir", flags=("--run-dir",), env="RUN_DIR", default=Path("/run/weft"), read=Path,
           help="directory with the pinned tenant netns, the same as netplugin's; /run/weft"),
    Option(name="socket", flags=("--socket",), env="SOCKET", default=None, read=Path,
           help=f"control socket, on which the agent pushes zones; {SOCKET_NAME} in --run-dir"),
    Option(name="datapath", flags=("--datapath",), env="DATAPATH", default="linux", read=one_of("linux"),
           help="netplugin's datapath; linux"),
    DOMAIN_OPTION,
    Option(name="upstreams", flags=("--upstreams",), env="UPSTREAMS", default=(), read=_upstreams,
           help="comma list of upstream resolvers, ADDRESS or ADDRESS:PORT; those of --resolv-conf"),
    Option(name="resolv_conf", flags=("--resolv-conf",), env="RESOLV_CONF", default=Path("/etc/resolv.conf"), read=Path,
           help="file with the machine's resolvers; /etc/resolv.conf"),
    Option(name="ttl", flags=("--ttl",), env="TTL", default=30, read=_ttl,
           help="TTL of answers in seconds; 30"),
    Option(name="log_level", flags=("--log-level",), env="LOG_LEVEL", default="INFO", read=one_of(*LEVELS),
           help="DEBUG, INFO, WARN or ERROR"),
    Option(name="json_log", flags=("--use-json-log", "--json-log"), env="USE_JSON_LOG", default=False, read=None,
           help="log lines as JSON"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """All settings of netdns, validated."""

    run_dir: Path
    socket: Path
    datapath: str
    domain: str
    upstreams: tuple[Upstream, ...]
    resolv_conf: Path
    ttl: int
    log_level: str
    json_log: bool


def read_dns_settings(argv: Sequence[str], environ: Mapping[str, str]) -> DnsSettings:
    """The settings, or `BadSettings` with every fault."""
    options = read_settings("netdns", OPTIONS, argv=argv, environ=environ, version=f"netdns {__version__}")
    return DnsSettings(**options | {"socket": options["socket"] or options["run_dir"] / SOCKET_NAME})
