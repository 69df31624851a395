"""Kubernetes' Service and EndpointSlice as values, and as documents of the store (docs/design/services.md).

The values are what its API server gives, as far as it means something here: other members are left unread. The
documents say beside it whose they are. Whoever feeds the cluster from an API server writes them; nodes only read.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import field

from weft.domain.ids import TenantName
from weft.domain.model import Value

Protocol = Literal["TCP", "UDP", "SCTP"]
TrafficPolicy = Literal["Cluster", "Local"]

HEADLESS = "None"
_AFFINITY_S = 10800


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Base of what is read; absent members have Kubernetes' defaults."""


class ServicePort(_Value, frozen=True, kw_only=True):
    """A port of a service. Which port of a pod it leads to is in the slices."""

    name: str = ""
    protocol: Protocol = "TCP"
    port: int
    node_port: int = 0


class ClientAffinity(_Value, frozen=True, kw_only=True):
    """For how long a client is remembered."""

    timeout_seconds: int = _AFFINITY_S


class AffinityConfig(_Value, frozen=True, kw_only=True):
    """What goes with `sessionAffinity`."""

    client_ip: ClientAffinity = field(name="clientIP", default=ClientAffinity())


class ServiceSpec(_Value, frozen=True, kw_only=True):
    """What a service wants. `type` says nothing about balancing: what is set is carried out."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] = "ClusterIP"
    external_name: str = ""
    cluster_ips: tuple[str, ...] = field(name="clusterIPs", default=())
    external_ips: tuple[str, ...] = field(name="externalIPs", default=())
    ports: tuple[ServicePort, ...] = ()
    session_affinity: Literal["None", "ClientIP"] = "None"
    session_affinity_config: AffinityConfig | None = None
    internal_traffic_policy: TrafficPolicy = "Cluster"
    external_traffic_policy: TrafficPolicy = "Cluster"
    load_balancer_source_ranges: tuple[str, ...] = ()
    health_check_node_port: int = 0


class Ingress(_Value, frozen=True, kw_only=True):
    """Where a load balancer is."""

    ip: str = ""


class LoadBalancer(_Value, frozen=True, kw_only=True):
    """What somebody gave to a service of type LoadBalancer."""

    ingress: tuple[Ingress, ...] = ()


class ServiceStatus(_Value, frozen=True, kw_only=True):
    """What a service has got."""

    load_balancer: LoadBalancer = LoadBalancer()


class DeclaredService(_Value, frozen=True, kw_only=True):
    """A v1 Service."""

    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


class Conditions(_Value, frozen=True, kw_only=True):
    """How a pod is; what nobody has said about `ready` is taken for true."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(_Value, frozen=True, kw_only=True):
    """A pod behind a service. Its addresses are all the same pod: the first one is enough."""

    addresses: tuple[str, ...]
    conditions: Conditions = Conditions()
    node_name: str = ""
    # What it is called below the name of a headless service.
    hostname: str = ""


class SlicePort(_Value, frozen=True, kw_only=True):
    """Where the pods of a slice are asked for a port of the service, by its name."""

    name: str = ""
    protocol: Protocol = "TCP"
    port: int | None = None


class EndpointSlice(_Value, frozen=True, kw_only=True):
    """A discovery.k8s.io/v1 EndpointSlice."""

    address_type: Literal["IPv4", "IPv6", "FQDN"]
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class KubeService(Value, frozen=True, kw_only=True):
    """A Service of Kubernetes, as the cluster is told of it. Its fronts are in the space of its tenant."""

    tenant: TenantName = field(name="tenantName")
    namespace: str
    name: str
    shared: bool = False
    # Whether somebody else balances it: it has its name here, and nothing more.
    foreign: bool = False
    # Whether it is where pods ask for names: every tenant has it for itself, and its own netdns answers.
    names: bool = False
    service: DeclaredService


class KubeSlice(Value, frozen=True, kw_only=True):
    """An EndpointSlice of Kubernetes, as the cluster is told of it, with the service that it belongs to."""

    tenant: TenantName = field(name="tenantName")
    namespace: str
    service_name: str
    name: str
    # Whether it is not for balancing: it tells only what names lead to.
    foreign: bool = False
    slice: EndpointSlice
