"""Kubernetes Service and EndpointSlice as typed values, and the store objects that hold them.

The values have the API fields that Weft uses; other fields are ignored. The store objects add the tenant. The leading
netmaster writes them from the API server; nodes only read them. See docs/design/services.md.
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
# The API's default of timeoutSeconds: three hours.
_AFFINITY_S = 10800


class _Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The base of API values. Absent fields have Kubernetes' defaults."""


class ServicePort(_Value, frozen=True, kw_only=True):
    """A port of a service. The slices hold the target ports."""

    name: str = ""
    protocol: Protocol = "TCP"
    port: int
    node_port: int = 0


class ClientAffinity(_Value, frozen=True, kw_only=True):
    """The session affinity timeout."""

    timeout_seconds: int = _AFFINITY_S


class AffinityConfig(_Value, frozen=True, kw_only=True):
    """The configuration of `sessionAffinity`."""

    client_ip: ClientAffinity = field(name="clientIP", default=ClientAffinity())


class ServiceSpec(_Value, frozen=True, kw_only=True):
    """The desired state of a service. Load balancing ignores `type` and uses whatever fields are set."""

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
    """An ingress point of a load balancer."""

    ip: str = ""


class LoadBalancer(_Value, frozen=True, kw_only=True):
    """The status that a load balancer controller sets."""

    ingress: tuple[Ingress, ...] = ()


class ServiceStatus(_Value, frozen=True, kw_only=True):
    """The status of a service."""

    load_balancer: LoadBalancer = LoadBalancer()


class ServiceObject(_Value, frozen=True, kw_only=True):
    """Spec and status of a v1 Service."""

    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


class Conditions(_Value, frozen=True, kw_only=True):
    """The conditions of an endpoint. The API defines absent `ready` as true."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(_Value, frozen=True, kw_only=True):
    """An endpoint of a service. Only the first address counts: the API defines all as the same endpoint."""

    addresses: tuple[str, ...]
    conditions: Conditions = Conditions()
    node_name: str = ""
    # Its DNS label below the name of a headless service.
    hostname: str = ""


class SlicePort(_Value, frozen=True, kw_only=True):
    """The target port of a slice's endpoints for the service port of this name."""

    name: str = ""
    protocol: Protocol = "TCP"
    port: int | None = None


class EndpointSlice(_Value, frozen=True, kw_only=True):
    """A discovery.k8s.io/v1 EndpointSlice."""

    address_type: Literal["IPv4", "IPv6", "FQDN"]
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


class KubeService(Value, frozen=True, kw_only=True):
    """A Kubernetes Service in the store. Its frontends are in the tenant's netns."""

    tenant: TenantName = field(name="tenantName")
    namespace: str
    name: str
    shared: bool = False
    # Whether another service proxy handles it, by label: Weft serves its DNS name only.
    foreign: bool = False
    # Whether it is the cluster DNS service: every tenant has it, served by its own netdns.
    cluster_dns: bool = False
    service: ServiceObject


class KubeSlice(Value, frozen=True, kw_only=True):
    """A Kubernetes EndpointSlice in the store, with the service that it belongs to."""

    tenant: TenantName = field(name="tenantName")
    namespace: str
    service_name: str
    name: str
    # Whether another service proxy handles it, by label: Weft uses it for DNS only.
    foreign: bool = False
    slice: EndpointSlice
