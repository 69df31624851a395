"""Settings that netmaster and netplugin share (contiv 1.2): modes, store, logs, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.domain.dns.names import CLUSTER_DOMAIN, dns_name
from weft.drivers import EtcdStoreSettings, KubernetesSettings, SqliteStoreSettings, StoreSettings
from weft.runtime.http_failover import is_exposed, is_plain
from weft.runtime.logs import LEVELS, read_syslog_url
from weft.runtime.settings import Option, comma_list, one_of, url_list


def readable_file(text: str) -> Path:
    """Parse the path of an existing file."""
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"file {text!r} does not exist")
    return path


def secret_file(text: str) -> str:
    """Parse the path of a file to the secret in it."""
    try:
        secret = readable_file(text).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{text!r} cannot be read: {error}") from error
    if not secret:
        raise ValueError(f"{text!r} is empty")
    return secret


def cluster_store(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse Contiv's `etcd://host:port` to the kind of store and its URLs."""
    kind, separator, hosts = text.partition("://")
    if kind not in {"etcd", "consul"} or not separator or not hosts:
        raise ValueError(f"{text!r} is not etcd://host:port; prefer --etcd-endpoints")
    return kind, tuple(f"http://{host}" for host in comma_list(hosts))


# Each help text ends with the default.
COMMON_OPTIONS = (
    Option(name="mode", flags=("--mode", "--plugin-mode", "--cluster-mode"), env="MODE", default="cni",
           read=one_of("cni", "kubernetes", "docker", "swarm-mode", "test"),
           help="cni, kubernetes, docker or swarm-mode; cni"),
    Option(name="netmode", flags=("--netmode", "--network-mode"), env="NET_MODE", default="vxlan",
           read=one_of("vlan", "vxlan"), help="vlan or vxlan; vxlan"),
    Option(name="fwdmode", flags=("--fwdmode", "--forward-mode"), env="FORWARD_MODE", default="routing",
           read=one_of("bridge", "routing"), help="bridge or routing; routing"),
    Option(name="etcd", flags=("--etcd-endpoints", "--etcd"), env="ETCD_ENDPOINTS", default=(), read=url_list,
           help="comma-separated etcd URLs; default: the embedded store"),
    Option(name="consul", flags=("--consul-endpoints", "--consul"), env="CONSUL_ENDPOINTS", default=(), read=url_list,
           help="comma-separated Consul URLs (not available yet)"),
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
    """Parse the DNS domain of the cluster."""
    domain = dns_name(text.strip("."))
    if not domain:
        raise ValueError(f"{text[:80]!r} is not a domain such as {CLUSTER_DOMAIN}")
    return domain


# The DNS zone of Kubernetes services and pods.
DOMAIN_OPTION = Option(
    name="domain", flags=("--domain",), env="DOMAIN", default=CLUSTER_DOMAIN, read=cluster_domain,
    help=f"the cluster's DNS domain, the same for netplugin and netdns; never forwarded upstream; {CLUSTER_DOMAIN}",
)  # fmt: skip

# Where Contiv kept its configuration of the API server (contiv 1.7).
CONTIV_JSON = Path("/var/contiv/config/contiv.json")

# Access to the Kubernetes API server.
KUBERNETES_OPTIONS = (
    Option(name="kubeconfig", flags=("--kubeconfig",), env="KUBECONFIG", default=None, read=readable_file,
           help="kubeconfig for mode kubernetes; default: contiv.json, else the pod's service account"),
    Option(name="contiv_json", flags=("--contiv-json",), env="CONTIV_JSON", default=None, read=readable_file,
           help=f"Contiv's file with K8S_API_SERVER and so on; {CONTIV_JSON} if it exists"),
    Option(name="kubernetes", flags=("--kubernetes-servers",), env="KUBERNETES_SERVERS", default=(), read=url_list,
           help="comma-separated URLs of API servers; they override those of the kubeconfig"),
)  # fmt: skip


def kubernetes_settings(given: Mapping[str, Any]) -> KubernetesSettings | None:
    """How to reach the API server in mode kubernetes, else None."""
    if given["mode"] != "kubernetes":
        return None
    contiv = given["contiv_json"] or (CONTIV_JSON if CONTIV_JSON.is_file() else None)
    return KubernetesSettings(kubeconfig=given["kubeconfig"], contiv=contiv, servers=given["kubernetes"])


def store_settings(given: Mapping[str, Any], faults: list[str], *, embedded: Path) -> StoreSettings:
    """The store: etcd if endpoints are set, else the embedded one. Faults are appended to `faults`."""
    kind, urls = given["cluster_store"]
    etcd = given["etcd"] or (urls if kind == "etcd" else ())
    consul = given["consul"] or (urls if kind == "consul" else ())
    if etcd and consul:
        faults.append("--etcd-endpoints and --consul-endpoints exclude each other: set one")
    elif consul:
        faults.append("--consul-endpoints: not available yet; use --etcd-endpoints or the embedded store")
    if bool(given["etcd_cert"]) != bool(given["etcd_key"]):
        faults.append("--etcd-cert and --etcd-key go together")
    if bool(given["etcd_user"]) != bool(given["etcd_password"]):
        faults.append("--etcd-user and --etcd-password-file go together")
    if given["etcd_user"] and (exposed := [url for url in etcd if is_exposed(url)]):
        faults.append(
            f"--etcd-endpoints: the password of --etcd-user would be sent in clear text to {exposed[0]}: "
            "use https:// and --etcd-ca"
        )
    if given["etcd_cert"] and (plain := [url for url in etcd if is_plain(url)]):
        faults.append(f"--etcd-cert: {plain[0]} has no TLS, so that the certificate would not be used: use https://")
    # The embedded store is the default, so that a single node needs no etcd.
    if not etcd:
        return SqliteStoreSettings(path=str(embedded))
    return EtcdStoreSettings(
        endpoints=etcd,
        user=given["etcd_user"],
        password=given["etcd_password"],
        **{name: str(given[f"etcd_{name}"] or "") for name in ("ca", "cert", "key")},
    )
