"""Client configuration of the API server: from a kubeconfig, Contiv's `contiv.json`, or the pod's service account.

Files that rotate (tokens, client certificates) are only named here. The API client reloads them when they change.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Invalid

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

T = TypeVar("T")

# Levels of a kubeconfig; kubectl writes five.
_MAX_DEPTH = 50
# Members of clusters and users that are read.
_TEXTS = frozenset(
    f"{name}{suffix}"
    for name in ("server", "token", "tokenFile", "certificate-authority", "client-certificate", "client-key")
    for suffix in ("", "-data")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Servers, CA and client credentials. A `Path` is a file that may rotate; `bytes` are inline and never change."""

    servers: tuple[str, ...]
    ca: Path | bytes | None = None
    cert: Path | bytes | None = None
    # Secrets stay out of `repr`, and so out of logs and tracebacks.
    key: Path | bytes | None = field(default=None, repr=False)
    token: Path | str = field(default="", repr=False)

    def at(self, servers: tuple[str, ...]) -> ClientConfig:
        """The same credentials at these servers; unchanged when `servers` is empty."""
        return replace(self, servers=servers) if servers else self


def load_client_config(
    *,
    kubeconfig: Path | None,
    contiv: Path | None,
    environ: Mapping[str, str],
    servers: tuple[str, ...] = (),
    account: Path = SERVICE_ACCOUNT,
) -> ClientConfig:
    """The kubeconfig or contiv.json if given, else the in-cluster configuration. `servers` override its servers."""
    if kubeconfig is not None:
        return read_kubeconfig(kubeconfig).at(servers)
    if contiv is not None:
        return read_contiv_json(contiv, account=account).at(servers)
    return read_in_cluster_config(account, environ, servers)


class _Named(msgspec.Struct, frozen=True):
    name: str
    cluster: dict[str, Any] = {}
    user: dict[str, Any] | None = None
    context: dict[str, Any] = {}


class _Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    current_context: str = ""
    clusters: tuple[_Named, ...] = ()
    users: tuple[_Named, ...] = ()
    contexts: tuple[_Named, ...] = ()


def read_kubeconfig(path: Path) -> ClientConfig:
    """Cluster and user of the current context. Paths are relative to the kubeconfig's folder, as for kubectl."""
    config = _read(path, _Kubeconfig, as_yaml=True)
    context = _pick(config.contexts, config.current_context, path=path, field="current-context").context
    cluster = _pick(config.clusters, context.get("cluster", ""), path=path, field="context.cluster").cluster
    user = _pick(config.users, context.get("user", ""), path=path, field="context.user").user or {}
    for member, value in [*cluster.items(), *user.items()]:
        if member in _TEXTS and not isinstance(value, str):
            raise Invalid(f"{path}: {member} is not a text", field=member)
    if not cluster.get("server"):
        raise Invalid(f"{path}: the cluster has no server: give its URL", field="cluster.server")
    if cluster.get("insecure-skip-tls-verify"):
        raise Invalid(f"{path}: insecure-skip-tls-verify is not supported: give certificate-authority", field="cluster")
    # Refused, not ignored: with other credentials than the user meant, requests would fail in obscure ways.
    for member in ("exec", "auth-provider", "username"):
        if member in user:
            raise Invalid(f"{path}: user.{member} is not supported: give a token or a client certificate", field="user")
    token: Path | str = user.get("token", "")
    if file := user.get("tokenFile"):
        token = path.parent / file
    return ClientConfig(
        servers=(cluster["server"],),
        ca=_material(cluster, "certificate-authority", path=path),
        cert=_material(user, "client-certificate", path=path),
        key=_material(user, "client-key", path=path),
        token=token,
    )


class _Contiv(msgspec.Struct, frozen=True):
    """Contiv's keys (contiv 1.7); the others are ignored."""

    K8S_API_SERVER: str = ""
    K8S_CA: str = ""
    K8S_CERT: str = ""
    K8S_KEY: str = ""
    K8S_TOKEN: str = ""
    SVC_SUBNET: str = ""


def read_contiv_json(path: Path, *, account: Path = SERVICE_ACCOUNT) -> ClientConfig:
    """Contiv's `contiv.json`. Without a certificate and a token in it, the pod's service account is used."""
    config = _read(path, _Contiv)
    servers = tuple(filter(None, (url.strip() for url in config.K8S_API_SERVER.split(","))))
    if not servers:
        raise Invalid(f"{path}: K8S_API_SERVER is missing: give the API server's URL", field="K8S_API_SERVER")
    if bool(config.K8S_CERT) != bool(config.K8S_KEY):
        raise Invalid(f"{path}: K8S_CERT and K8S_KEY go together", field="K8S_CERT")
    token: Path | str = config.K8S_TOKEN
    if not config.K8S_CERT and not token:
        token = account / "token"
    return ClientConfig(
        servers=servers,
        ca=_file(config.K8S_CA),
        cert=_file(config.K8S_CERT),
        key=_file(config.K8S_KEY),
        token=token,
    )


def read_in_cluster_config(directory: Path, environ: Mapping[str, str], servers: tuple[str, ...] = ()) -> ClientConfig:
    """The pod's service account, at the API server of the environment variables that every pod has."""
    if not (directory / "token").is_file():
        raise Invalid(
            f"mode kubernetes needs access to the API server: give --kubeconfig, or run in a pod (no {directory})",
            field="--kubeconfig",
        )
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not servers and not host:
        raise Invalid("no API server is known: give --kubernetes-servers", field="--kubernetes-servers")
    default = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return ClientConfig(servers=servers or (default,), ca=directory / "ca.crt", token=directory / "token")


def _read(path: Path, kind: type[T], *, as_yaml: bool = False) -> T:
    try:
        text = path.read_bytes()
        if not as_yaml:
            return msgspec.json.decode(text, type=kind)
        _check_depth(text)
        return msgspec.yaml.decode(text, type=kind)
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error
    except (*UNDECODABLE, yaml.YAMLError, ValueError) as error:
        raise Invalid(f"{path} is not readable: {error}") from error


def _check_depth(text: bytes) -> None:
    """`ValueError` for YAML that is nested so deeply that building its objects would overflow libyaml's C stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):  # events: their number bounds the work, not their depth
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def _pick(entries: tuple[_Named, ...], name: str, *, path: Path, field: str) -> _Named:
    found = next((entry for entry in entries if entry.name == name), None)
    if found is None:
        raise Invalid(f"{path}: there is no {name!r}, which {field} names", field=field)
    return found


def _material(members: Mapping[str, Any], name: str, *, path: Path) -> Path | bytes | None:
    """Inline data if present, else the file: kubectl has the same precedence."""
    if data := members.get(f"{name}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise Invalid(f"{path}: {name}-data is not base64", field=f"{name}-data") from error
    file = members.get(name)
    return path.parent / file if file else None


def _file(text: str) -> Path | None:
    return Path(text) if text else None
