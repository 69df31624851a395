"""The settings that netmaster and the agent have in common (contiv 1.2): modes, store and logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.domain.dns.cluster_names import CLUSTER_DOMAIN
from weft.domain.dns.names import dns_name
from weft.drivers import EtcdStoreSettings, KubernetesSettings, SqliteStoreSettings, StoreSettings
from weft.runtime.logs import LEVELS, read_syslog_url
from weft.runtime.settings import Option, comma_list, one_of, url_list


def readable_file(text: str) -> Path:
    """A reader of the path of a file that is there."""
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"there is no file {text!r}")
    return path


def secret_file(text: str) -> str:
    """A reader of the secret that a file holds."""
    try:
        secret = readable_file(text).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from error
    if not secret:
        raise ValueError(f"{text!r} is empty")
    return secret


def cluster_store(text: str) -> tuple[str, tuple[str, ...]]:
    """A reader of the original's `etcd://host:port`: the kind of store, and its URLs."""
    kind, separator, hosts = text.partition("://")
    if kind not in {"etcd", "consul"} or not separator or not hosts:
        raise ValueError(f"{text!r} is not etcd://host:port; better use --etcd-endpoints")
    return kind, tuple(f"http://{host}" for host in comma_list(hosts))


# What netmaster and the agent have in common.
COMMON_OPTIONS = (
    Option(name="mode", flags=("--mode", "--plugin-mode", "--cluster-mode"), env="MODE", default="cni",
           read=one_of("cni", "kubernetes", "docker", "swarm-mode", "test"),
           help="cni, kubernetes, docker or swarm-mode; cni"),
    Option(name="netmode", flags=("--netmode", "--network-mode"), env="NET_MODE", default="vxlan",
           read=one_of("vlan", "vxlan"), help="vlan or vxlan; vxlan"),
    Option(name="fwdmode", flags=("--fwdmode", "--forward-mode"), env="FORWARD_MODE", default="routing",
           read=one_of("bridge", "routing"), help="bridge or routing; routing"),
    Option(name="etcd", flags=("--etcd-endpoints", "--etcd"), env="ETCD_ENDPOINTS", default=(), read=url_list,
           help="comma list of etcd URLs; without it the embedded store is used"),
    Option(name="consul", flags=("--consul-endpoints", "--consul"), env="CONSUL_ENDPOINTS", default=(), read=url_list,
           help="comma list of Consul URLs (not available yet)"),
    Option(name="cluster_store", flags=("--cluster-store",), env="CLUSTER_STORE", default=("", ()), read=cluster_store,
           help="deprecated: etcd://host:port"),
    Option(name="etcd_user", flags=("--etcd-user",), env="ETCD_USER", help="etcd user name"),
    Option(name="etcd_password", flags=("--etcd-password-file",), env="ETCD_PASSWORD_FILE", read=secret_file,
           help="file with the etcd user's password"),
    Option(name="etcd_ca", flags=("--etcd-ca",), env="ETCD_CA", default=None, read=readable_file,
           help="CA that signed etcd's certificates"),
    Option(name="etcd_cert", flags=("--etcd-cert",), env="ETCD_CERT", default=None, read=readable_file,
           help="our client certificate for etcd"),
    Option(name="etcd_key", flags=("--etcd-key",), env="ETCD_KEY", default=None, read=readable_file,
           help="key of --etcd-cert"),
    Option(name="log_level", flags=("--log-level",), env="LOG_LEVEL", default="INFO", read=one_of(*LEVELS),
           help="DEBUG, INFO, WARN or ERROR"),
    Option(name="json_log", flags=("--use-json-log", "--json-log"), env="USE_JSON_LOG", default=False, read=None,
           help="log lines as JSON"),
    Option(name="use_syslog", flags=("--use-syslog", "--syslog"), env="USE_SYSLOG", default=False, read=None,
           help="log to syslog"),
    Option(name="syslog", flags=("--syslog-url",), env="SYSLOG_URL", default=("udp", "127.0.0.1", 514),
           read=read_syslog_url, help="udp://127.0.0.1:514"),
)  # fmt: skip


def cluster_domain(text: str) -> str:
    """A reader of a cluster's domain."""
    domain = dns_name(text.strip("."))
    if not domain:
        raise ValueError(f"{text[:80]!r} is not a domain such as {CLUSTER_DOMAIN}")
    return domain


# Below what Kubernetes' services and pods have their names.
DOMAIN_OPTION = Option(
    name="domain", flags=("--domain",), env="DOMAIN", default=CLUSTER_DOMAIN, read=cluster_domain,
    help=f"the cluster's domain, the same for netplugin and netdns, which is never asked outside; {CLUSTER_DOMAIN}",
)  # fmt: skip

# Where Contiv kept the way to the API server (contiv 1.7).
CONTIV_JSON = Path("/var/contiv/config/contiv.json")

# How a program reaches the API server.
KUBERNETES_OPTIONS = (
    Option(name="kubeconfig", flags=("--kubeconfig",), env="KUBECONFIG", default=None, read=readable_file,
           help="the way to the API server in mode kubernetes; without it as contiv.json says, or as a pod is told"),
    Option(name="contiv_json", flags=("--contiv-json",), env="CONTIV_JSON", default=None, read=readable_file,
           help=f"Contiv's file with K8S_API_SERVER and so on; {CONTIV_JSON} where it is there"),
    Option(name="kubernetes", flags=("--kubernetes-servers",), env="KUBERNETES_SERVERS", default=(), read=url_list,
           help="comma list of URLs of API servers, instead of those that the other settings name"),
)  # fmt: skip


def kubernetes_settings(given: Mapping[str, Any]) -> KubernetesSettings | None:
    """The way to the API server in mode kubernetes, else none."""
    if given["mode"] != "kubernetes":
        return None
    contiv = given["contiv_json"] or (CONTIV_JSON if CONTIV_JSON.is_file() else None)
    return KubernetesSettings(kubeconfig=given["kubeconfig"], contiv=contiv, servers=given["kubernetes"])


def store_settings(given: Mapping[str, Any], faults: list[str], *, embedded: Path) -> StoreSettings:
    """Which store: etcd where endpoints are named, else the embedded one. What is wrong is added to `faults`."""
    kind, urls = given["cluster_store"]
    etcd = given["etcd"] or (urls if kind == "etcd" else ())
    consul = given["consul"] or (urls if kind == "consul" else ())
    if etcd and consul:
        faults.append("--etcd-endpoints and --consul-endpoints exclude each other: give one")
    elif consul:
        faults.append("--consul-endpoints: not available yet; use --etcd-endpoints or the embedded store")
    if bool(given["etcd_cert"]) != bool(given["etcd_key"]):
        faults.append("--etcd-cert and --etcd-key go together")
    if bool(given["etcd_user"]) != bool(given["etcd_password"]):
        faults.append("--etcd-user and --etcd-password-file go together")
    if not etcd:
        return SqliteStoreSettings(path=str(embedded))
    return EtcdStoreSettings(
        endpoints=etcd,
        user=given["etcd_user"],
        password=given["etcd_password"],
        **{name: str(given[f"etcd_{name}"] or "") for name in ("ca", "cert", "key")},
    )
