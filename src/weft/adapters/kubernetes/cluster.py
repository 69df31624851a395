"""A Kubernetes cluster, by the way to its API server."""

from __future__ import annotations

import os
from pathlib import Path

from weft.adapters.kubernetes.cluster_informers import ClusterDeclarations
from weft.adapters.kubernetes.credentials import find_access
from weft.adapters.kubernetes.netmaster_discovery import ClusterMeeting
from weft.adapters.kubernetes.pods import NodePods


class KubernetesCluster:
    """See `weft.ports.orchestrator.Orchestrator`. `Invalid` when no way leads to the API server."""

    def __init__(self, *, kubeconfig: Path | None, contiv: Path | None, servers: tuple[str, ...]) -> None:
        self._access = find_access(kubeconfig=kubeconfig, contiv=contiv, environ=os.environ, servers=servers)

    def pods(self, *, node: str) -> NodePods:
        return NodePods(self._access, node=node)

    def declarations(self) -> ClusterDeclarations:
        return ClusterDeclarations(self._access)

    def meeting(self) -> ClusterMeeting:
        return ClusterMeeting(self._access)
