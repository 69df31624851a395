"""Install Weft in a bare cluster from its manifest and an image on every node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.kubernetes.cluster import WITHIN, Cluster, holds
from tests.support.kubernetes.manifests import WHOLE
from tests.support.kubernetes.own_image import write_own_image

import weft
from weft.lab.waiting import eventually

OWN_PODS = "/api/v1/namespaces/kube-system/pods"
_NAMED_SERVERS = "# api-servers: https://192.0.2.10:6443"
_LIFE = '# certificate-lifetime: "604800"'
# Commented lines of the manifest that are enabled: without kube-proxy, short certificates, with etcd.
_ETCD = "# etcd-endpoints: http://192.0.2.20:2379"


async def import_weft_image(cluster: Cluster, *, version: str = weft.__version__) -> str:
    """Import our image on all nodes as this version of Weft; return its name for manifests."""
    name = f"weft:{version}"
    archive = cluster.lab.directory / "weft.tar"
    write_own_image(archive, name=f"docker.io/library/{name}", version=version)
    for node in cluster.nodes.values():
        await node.import_image(archive)
    archive.unlink()
    return name


def manifest_for(cluster: Cluster, *, etcd: str = "") -> Path:
    """The manifest with settings for this cluster: its API server, and certificates that expire after 20 seconds.

    The store is in netmaster unless an etcd is given.
    """
    text = WHOLE.read_text()
    settings = {_NAMED_SERVERS: f"api-servers: {cluster.server.url}", _LIFE: 'certificate-lifetime: "20"'}
    if etcd:
        settings[_ETCD] = f"etcd-endpoints: {etcd}"
    for line, setting in settings.items():
        assert line in text
        text = text.replace(line, setting)
    path = cluster.lab.directory / "weft.yaml"
    path.write_text(text)
    return path


async def netctl(cluster: Cluster, *words: str) -> str:
    """The output of netctl in the netmaster pod."""
    return await cluster.kubectl("exec", "-n", "kube-system", "deploy/weft-netmaster", "--", "netctl", *words)


async def own_pods(cluster: Cluster, app: str, *, count: int) -> list[Any]:
    """Wait until one of our programs has this many pods, none terminating and all ready."""

    async def read() -> list[Any]:
        return await cluster.api.items(f"{OWN_PODS}?labelSelector=app%3D{app}")

    def complete(pods: list[Any]) -> bool:
        return len(pods) == count and all(map(_serves, pods))

    return await eventually(read, complete, within=WITHIN)


def _serves(pod: Any) -> bool:
    return holds(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]
