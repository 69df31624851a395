"""The Kubernetes orchestrator: pods, informers and discovery over one API server configuration."""

from __future__ import annotations

import os
from pathlib import Path

from weft.adapters.kubernetes.cluster_informers import KubeInformers
from weft.adapters.kubernetes.credentials import load_client_config
from weft.adapters.kubernetes.netmaster_discovery import KubeDiscovery
from weft.adapters.kubernetes.pods import NodePods


class KubernetesCluster:
    """See `weft.ports.orchestrator.Orchestrator`. `Invalid` when no API server is configured."""

    def __init__(self, *, kubeconfig: Path | None, contiv: Path | None, servers: tuple[str, ...]) -> None:
        self._config = load_client_config(kubeconfig=kubeconfig, contiv=contiv, environ=os.environ, servers=servers)

    def pods(self, *, node: str) -> NodePods:
        return NodePods(self._config, node=node)

    def informers(self) -> KubeInformers:
        return KubeInformers(self._config)

    def discovery(self) -> KubeDiscovery:
        return KubeDiscovery(self._config)
