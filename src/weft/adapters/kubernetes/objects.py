"""The objects of Kubernetes' API, as far as they mean something here. Members that are not named are left unread."""

from __future__ import annotations

from typing import Literal

import msgspec

# On the shadow of a static pod: the UID by which its kubelet, and so the CNI call, knows it.
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
# On a slice: whose it is.
SERVICE_LABEL = "kubernetes.io/service-name"
_FOREIGN_LABELS = ("service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless")


class Object(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of all that is read."""


class Metadata(Object, frozen=True, kw_only=True):
    """Who an object is."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def is_foreign(self) -> bool:
        """Whether a label, whatever its value, leaves the balancing of it to somebody else than kube-proxy."""
        return any(label in self.labels for label in _FOREIGN_LABELS)


class Named(Object, frozen=True, kw_only=True):
    """Any object, by its metadata alone."""

    metadata: Metadata

    @property
    def key(self) -> tuple[str, str]:
        return self.metadata.namespace, self.metadata.name


class ContainerPort(Object, frozen=True, kw_only=True):
    """A port that a container tells of."""

    container_port: int
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class Container(Object, frozen=True, kw_only=True):
    """One of a pod's containers."""

    ports: tuple[ContainerPort, ...] = ()


class PodSpec(Object, frozen=True, kw_only=True):
    """What a pod is made of. An init container that restarts always runs beside the others, with its ports."""

    node_name: str = ""
    host_network: bool = False
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()


class Pod(Named, frozen=True, kw_only=True):
    """A v1 Pod."""

    spec: PodSpec = PodSpec()

    def is_meant_by(self, uid: str) -> bool:
        """Whether a runtime that names this UID means this very pod; runtimes of old name none."""
        return not uid or uid in (self.metadata.uid, self.metadata.annotations.get(MIRROR_ANNOTATION))


class Namespace(Named, frozen=True, kw_only=True):
    """A v1 Namespace."""
