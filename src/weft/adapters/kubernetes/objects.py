"""Types of the Kubernetes API with the members that Weft uses. msgspec skips the others when decoding."""

from __future__ import annotations

from typing import Literal

import msgspec

# On the mirror pod of a static pod: the UID by which the kubelet, and so the CNI call, names it.
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
# On an EndpointSlice: the Service that it belongs to.
SERVICE_LABEL = "kubernetes.io/service-name"
# Kubernetes' labels for "kube-proxy must ignore this"; any value counts, an empty one too.
_FOREIGN_LABELS = ("service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless")


class Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the types."""


class Metadata(Object, frozen=True, kw_only=True):
    """An ObjectMeta."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def is_foreign(self) -> bool:
        """Whether a label leaves load balancing of the Service to another proxy than kube-proxy, and so not to Weft."""
        return any(label in self.labels for label in _FOREIGN_LABELS)


class Named(Object, frozen=True, kw_only=True):
    """Any object, with its metadata only."""

    metadata: Metadata

    @property
    def key(self) -> tuple[str, str]:
        return self.metadata.namespace, self.metadata.name


class ContainerPort(Object, frozen=True, kw_only=True):
    """A container's port; policies and Services may refer to it by name."""

    container_port: int
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class Container(Object, frozen=True, kw_only=True):
    """A container of a pod."""

    ports: tuple[ContainerPort, ...] = ()


class PodSpec(Object, frozen=True, kw_only=True):
    """A PodSpec. Init containers count: a sidecar is one with `restartPolicy: Always`, and has ports too."""

    node_name: str = ""
    host_network: bool = False
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()


class Pod(Named, frozen=True, kw_only=True):
    """A v1 Pod."""

    spec: PodSpec = PodSpec()

    def has_uid(self, uid: str) -> bool:
        """Whether this is the pod with the UID that a runtime sent; old runtimes send none, which fits any pod."""
        return not uid or uid in (self.metadata.uid, self.metadata.annotations.get(MIRROR_ANNOTATION))


class Namespace(Named, frozen=True, kw_only=True):
    """A v1 Namespace."""
