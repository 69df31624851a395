"""What is declared for the whole cluster, from the API server: namespaces, NetworkPolicies, Services, EndpointSlices.

Each becomes the document that is kept of it; what means nothing here is left out, so that it makes no news either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from weft.adapters.kubernetes.api import ApiClient
from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.events import Events, Subject
from weft.adapters.kubernetes.objects import Metadata, Named
from weft.adapters.kubernetes.policies import read_policy
from weft.adapters.kubernetes.reflector import Reflector, ResourceVersion
from weft.adapters.kubernetes.slices import read_endpoints, read_slice, read_slice_v1beta1
from weft.domain import kinds
from weft.domain.ids import DEFAULT_TENANT
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import DeclaredService, KubeService, KubeSlice
from weft.domain.model import Value
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.ports.orchestrator import ResourceHandler

T = TypeVar("T", bound=Value)

SHARED_ANNOTATION = "weft/shared"
NAMES_ANNOTATION = "weft/names"
# Who is said to tell what became of a policy, whichever netmaster leads.
TELLER = "netmaster"
# The API server itself.
_ALWAYS_SHARED = ("default", "kubernetes")
_DNS_LABEL = ("k8s-app", "kube-dns")


class _Service(DeclaredService, frozen=True, kw_only=True):
    """A v1 Service with its metadata."""

    metadata: Metadata


class _OldSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a server before 1.20 says instead of `clusterIPs`."""

    cluster_ip: str = msgspec.field(name="clusterIP", default="")


class _OldService(msgspec.Struct, frozen=True):
    spec: _OldSpec = _OldSpec()


_named = msgspec.json.Decoder(Named).decode
_service = msgspec.json.Decoder(_Service).decode
_old_service = msgspec.json.Decoder(_OldService).decode


def read_namespace(data: bytes) -> KubeNamespace:
    """A v1 Namespace."""
    metadata = _named(data).metadata
    return KubeNamespace(name=metadata.name, labels=metadata.labels)


def read_service(data: bytes) -> KubeService:
    """A v1 Service. Its tenant is for whoever knows its namespace to fill in."""
    found = _service(data)
    metadata, spec = found.metadata, found.spec
    if not spec.cluster_ips and (address := _old_service(data).spec.cluster_ip):
        spec = msgspec.structs.replace(spec, cluster_ips=(address,))
    label, value = _DNS_LABEL
    answers_names = metadata.annotations.get(NAMES_ANNOTATION) == "true"
    return KubeService(
        tenant=DEFAULT_TENANT,
        namespace=metadata.namespace,
        name=metadata.name,
        names=answers_names,
        foreign=metadata.is_foreign,
        shared=not answers_names
        and (
            (metadata.namespace, metadata.name) == _ALWAYS_SHARED
            or metadata.labels.get(label) == value
            or metadata.annotations.get(SHARED_ANNOTATION) == "true"
        ),
        service=DeclaredService(spec=spec, status=found.status),
    )


NAMESPACES = (ResourceVersion("/api/v1/namespaces", read_namespace),)
POLICIES: tuple[ResourceVersion[KubePolicy], ...] = (
    ResourceVersion("/apis/networking.k8s.io/v1/networkpolicies", read_policy),
)
SERVICES = (ResourceVersion("/api/v1/services", read_service),)
SLICES: tuple[ResourceVersion[KubeSlice | None], ...] = (
    ResourceVersion("/apis/discovery.k8s.io/v1/endpointslices", read_slice),
    ResourceVersion("/apis/discovery.k8s.io/v1beta1/endpointslices", read_slice_v1beta1),
    ResourceVersion("/api/v1/endpoints", read_endpoints),
)


class KindHandler(Generic[T]):
    """Hands the documents of one kind on. Those that belong to nobody are left out."""

    def __init__(self, kind: Kind[T], keeper: ResourceHandler) -> None:
        self._kind = kind
        self._keeper = keeper

    def replace(self, objects: Sequence[T | None]) -> None:
        self._keeper.replace(self._kind, [value for value in objects if value is not None])

    def put(self, value: T | None) -> None:
        if value is not None:
            self._keeper.put(self._kind, value)

    def remove(self, value: T | None) -> None:
        if value is not None:
            self._keeper.remove(self._kind, value)


class ClusterDeclarations(ApiClient):
    """See `weft.ports.orchestrator.ClusterInformers`."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._events = Events(self._api, host=TELLER)
        self._reflectors: list[Reflector[Any]] = []

    @property
    def faults(self) -> list[str]:
        return [each.fault for each in self._reflectors if each.fault]

    def tell_of_policy(self, *, namespace: str, name: str, uid: str, reason: str, message: str, fault: bool) -> None:
        subject = Subject("networking.k8s.io/v1", "NetworkPolicy", namespace, name, uid)
        self._events.tell(subject, reason=reason, message=message, fault=fault)

    async def run(self, keeper: ResourceHandler) -> None:
        self._reflectors = [
            Reflector(self._api, NAMESPACES, KindHandler(kinds.KUBE_NAMESPACE, keeper)),
            Reflector(self._api, POLICIES, KindHandler(kinds.KUBE_POLICY, keeper)),
            Reflector(self._api, SERVICES, KindHandler(kinds.KUBE_SERVICE, keeper)),
            Reflector(self._api, SLICES, KindHandler(kinds.KUBE_SLICE, keeper)),
        ]
        async with asyncio.TaskGroup() as tasks:
            for each in self._reflectors:
                tasks.create_task(each.run())
            tasks.create_task(self._events.run())
