"""Security identities: pods, endpoints, hosts, the API server and the world, as the ends of flows.

A workload is a Kubernetes pod or a Contiv endpoint. Beside workloads there are the host (one per node), the API server
and the world (any other address). A workload's namespace is a field set by Weft, never one of its labels: no label that
a user writes can move it into another namespace (CVE-2023-39347, CVE-2023-41333).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NewType

import msgspec

from weft.domain.addresses import Address, parse_address
from weft.domain.ids import DEFAULT_TENANT, GroupKey, GroupName, TenantName
from weft.domain.model import Endpoint, PodPort

# `namespace/pod`, `tenant:network:endpoint`, `host:node`, `apiserver`, or a world address.
IdentityKey = NewType("IdentityKey", str)

# The API server sets it on every namespace.
NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
API_SERVER_KEY = IdentityKey("apiserver")


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes pod on the pod network. A pod with `hostNetwork` is not a pod here: its traffic is the host's.

    The orchestrator adapter derives `tenant` and `group` from the pod's `io.contiv.*` labels.
    """

    namespace: str
    name: str
    labels: dict[str, str] = {}
    ips: tuple[str, ...] = ()
    ports: tuple[PodPort, ...] = ()
    node: str = ""
    tenant: TenantName = DEFAULT_TENANT
    group: str = ""


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A Kubernetes namespace. Its label `kubernetes.io/metadata.name` is always its name, whatever `labels` says."""

    name: str
    labels: dict[str, str] = {}

    @property
    def effective_labels(self) -> dict[str, str]:
        # The name wins over a label with this key: a forged label must not select another namespace.
        return self.labels | {NAMESPACE_NAME_LABEL: self.name}


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The host of a node, with all its addresses towards pods."""

    node: str
    addresses: tuple[str, ...] = ()


class ApiServer(msgspec.Struct, frozen=True, kw_only=True):
    """The Kubernetes API server, with its addresses."""

    addresses: tuple[str, ...] = ()


class Kind(StrEnum):
    """The kind of an identity."""

    WORKLOAD = "workload"
    HOST = "host"
    API_SERVER = "apiserver"
    WORLD = "world"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a flow. `namespace` is empty outside Kubernetes; `tenant` is empty for non-workloads."""

    kind: Kind
    key: IdentityKey
    addresses: tuple[Address, ...]
    tenant: str = ""
    group: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = {}
    ports: tuple[PodPort, ...] = ()
    node: str = ""

    @property
    def group_key(self) -> GroupKey:
        return GroupKey(TenantName(self.tenant), GroupName(self.group))

    def address(self, version: int) -> Address | None:
        """Return the first address of this IP version, or None."""
        for address in self.addresses:
            if address.family == version:
                return address
        return None

    def has_named_port(self, name: str, *, protocol: int, port: int) -> bool:
        """Return whether the identity has a port of this name, protocol and number."""
        return any(known.port == port and known.name == name and known.protocol == protocol for known in self.ports)


def pod_key(namespace: str, name: str) -> IdentityKey:
    return IdentityKey(f"{namespace}/{name}")


def host_key(node: str) -> IdentityKey:
    return IdentityKey(f"host:{node}")


def identity_of_pod(pod: Pod) -> Identity:
    return Identity(
        kind=Kind.WORKLOAD,
        key=pod_key(pod.namespace, pod.name),
        addresses=_addresses(*pod.ips, field="ips"),
        tenant=pod.tenant,
        group=pod.group,
        namespace=pod.namespace,
        labels=pod.labels,
        ports=pod.ports,
        node=pod.node,
    )


def identity_of_endpoint(endpoint: Endpoint) -> Identity:
    return Identity(
        kind=Kind.WORKLOAD,
        key=IdentityKey(str(endpoint.key)),
        addresses=_addresses(endpoint.ip_address, endpoint.ipv6_address, field="ipAddress"),
        tenant=endpoint.tenant,
        group=endpoint.group,
        # A Contiv container has no namespace, so no NetworkPolicy selects it.
        namespace=endpoint.pod.namespace if endpoint.pod else "",
        labels=endpoint.labels,
        ports=endpoint.pod.ports if endpoint.pod else (),
        node=endpoint.host,
    )


def identity_of_host(host: Host) -> Identity:
    return Identity(
        kind=Kind.HOST,
        key=host_key(host.node),
        addresses=_addresses(*host.addresses, field="addresses"),
        node=host.node,
    )


def identity_of_api_server(server: ApiServer) -> Identity:
    return Identity(
        kind=Kind.API_SERVER, key=API_SERVER_KEY, addresses=_addresses(*server.addresses, field="addresses")
    )


def identity_of_world(address: Address) -> Identity:
    return Identity(kind=Kind.WORLD, key=IdentityKey(str(address)), addresses=(address,))


def _addresses(*texts: str, field: str) -> tuple[Address, ...]:
    return tuple(parse_address(text, field=field) for text in texts if text)
