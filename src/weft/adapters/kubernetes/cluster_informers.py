"""Cluster-wide informers: Namespaces, NetworkPolicies, Services and EndpointSlices.

Each object becomes the document that netmaster stores. Members that Weft does not use are dropped, so that changes of
them cause no writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.events import EventRecorder, Subject
from weft.adapters.kubernetes.objects import Metadata, Named
from weft.adapters.kubernetes.policies import decode_policy
from weft.adapters.kubernetes.reflector import ApiResource, Reflector
from weft.adapters.kubernetes.slices import decode_endpoints, decode_slice, decode_slice_v1beta1
from weft.domain import kinds
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice, ServiceObject
from weft.domain.model import Value
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.ports.orchestrator import ResourceHandler

T = TypeVar("T", bound=Value)

SHARED_ANNOTATION = "weft/shared"
DNS_ANNOTATION = "weft/dns"
# `source.host` of Events about policies. The same for every netmaster, so that a new leader continues the same Event.
EVENT_HOST = "netmaster"
# The API server's own Service: pods of every tenant need it.
_ALWAYS_SHARED = ("default", "kubernetes")
# The label of cluster DNS, CoreDNS included.
_DNS_LABEL = ("k8s-app", "kube-dns")


class _Service(ServiceObject, frozen=True, kw_only=True):
    """A v1 Service with its metadata."""

    metadata: Metadata


class _OldSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The member that a server before 1.20 has instead of `clusterIPs`."""

    cluster_ip: str = msgspec.field(name="clusterIP", default="")


class _OldService(msgspec.Struct, frozen=True):
    spec: _OldSpec = _OldSpec()


_decode_named = msgspec.json.Decoder(Named).decode
_decode_service = msgspec.json.Decoder(_Service).decode
_decode_old_service = msgspec.json.Decoder(_OldService).decode


def decode_namespace(data: bytes) -> KubeNamespace:
    """Decode a v1 Namespace."""
    metadata = _decode_named(data).metadata
    return KubeNamespace(name=metadata.name, labels=metadata.labels)


def decode_service(data: bytes) -> KubeService:
    """Decode a v1 Service. The caller sets the tenant, which follows from the namespace's label."""
    decoded = _decode_service(data)
    metadata, spec = decoded.metadata, decoded.spec
    if not spec.cluster_ips and (address := _decode_old_service(data).spec.cluster_ip):
        spec = msgspec.structs.replace(spec, cluster_ips=(address,))
    label, value = _DNS_LABEL
    is_dns = metadata.annotations.get(DNS_ANNOTATION) == "true"
    return KubeService(
        tenant=DEFAULT_TENANT,
        namespace=metadata.namespace,
        name=metadata.name,
        cluster_dns=is_dns,
        foreign=metadata.is_foreign,
        # A tenant's own DNS service is never shared: its answers are that tenant's.
        shared=not is_dns
        and (
            (metadata.namespace, metadata.name) == _ALWAYS_SHARED
            or metadata.labels.get(label) == value
            or metadata.annotations.get(SHARED_ANNOTATION) == "true"
        ),
        service=ServiceObject(spec=spec, status=decoded.status),
    )


NAMESPACES = (ApiResource("/api/v1/namespaces", decode_namespace),)
POLICIES: tuple[ApiResource[KubePolicy], ...] = (
    ApiResource("/apis/networking.k8s.io/v1/networkpolicies", decode_policy),
)
SERVICES = (ApiResource("/api/v1/services", decode_service),)
# Preferred first: v1 since 1.21, v1beta1 since 1.17, Endpoints before that.
SLICES: tuple[ApiResource[KubeSlice | None], ...] = (
    ApiResource("/apis/discovery.k8s.io/v1/endpointslices", decode_slice),
    ApiResource("/apis/discovery.k8s.io/v1beta1/endpointslices", decode_slice_v1beta1),
    ApiResource("/api/v1/endpoints", decode_endpoints),
)


class KindHandler(Generic[T]):
    """Passes documents of one kind to a `ResourceHandler`. None, a slice that belongs to no Service, is skipped."""

    def __init__(self, kind: Kind[T], handler: ResourceHandler) -> None:
        self._kind = kind
        self._handler = handler

    def replace(self, objects: Sequence[T | None]) -> None:
        self._handler.replace(self._kind, [value for value in objects if value is not None])

    def put(self, value: T | None) -> None:
        if value is not None:
            self._handler.put(self._kind, value)

    def remove(self, value: T | None) -> None:
        if value is not None:
            self._handler.remove(self._kind, value)


class KubeInformers(ApiClient):
    """See `weft.ports.orchestrator.ClusterInformers`."""

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._events = EventRecorder(self._api, host=EVENT_HOST)
        self._reflectors: list[Reflector[Any]] = []

    @property
    def faults(self) -> list[str]:
        return [reflector.fault for reflector in self._reflectors if reflector.fault]

    def record_policy_event(
        self, *, namespace: str, name: str, uid: str, reason: str, message: str, warning: bool
    ) -> None:
        subject = Subject("networking.k8s.io/v1", "NetworkPolicy", namespace, name, uid)
        self._events.record_event(subject, reason=reason, message=message, warning=warning)

    async def run(self, handler: ResourceHandler) -> None:
        self._reflectors = [
            Reflector(self._api, NAMESPACES, KindHandler(kinds.KUBE_NAMESPACE, handler)),
            Reflector(self._api, POLICIES, KindHandler(kinds.KUBE_POLICY, handler)),
            Reflector(self._api, SERVICES, KindHandler(kinds.KUBE_SERVICE, handler)),
            Reflector(self._api, SLICES, KindHandler(kinds.KUBE_SLICE, handler)),
        ]
        async with asyncio.TaskGroup() as tasks:
            for reflector in self._reflectors:
                tasks.create_task(reflector.run())
            tasks.create_task(self._events.run())
