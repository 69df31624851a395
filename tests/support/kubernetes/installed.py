"""Weft in a bare cluster, as its manifest brings it there: one file, and an image on every node."""

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
_LIFE = '# certificate-life: "604800"'
# Lines of the manifest that become settings: for who has no kube-proxy, for the impatient, for who has an etcd.
_ETCD = "# etcd-endpoints: http://192.0.2.20:2379"


async def bring_image(cluster: Cluster, *, version: str = weft.__version__) -> str:
    """Have our image on all nodes, as Weft of that version; its name as manifests write it."""
    name = f"weft:{version}"
    archive = cluster.lab.directory / "weft.tar"
    write_own_image(archive, name=f"docker.io/library/{name}", version=version)
    for node in cluster.nodes.values():
        await node.import_image(archive)
    archive.unlink()
    return name


def manifest_for(cluster: Cluster, *, etcd: str = "") -> Path:
    """The whole manifest, with settings for this cluster: where its API server is, and certificates for 20 seconds.

    The store is in netmaster, unless an etcd is named.
    """
    text = WHOLE.read_text()
    settings = {_NAMED_SERVERS: f"api-servers: {cluster.server.url}", _LIFE: 'certificate-life: "20"'}
    if etcd:
        settings[_ETCD] = f"etcd-endpoints: {etcd}"
    for line, setting in settings.items():
        assert line in text
        text = text.replace(line, setting)
    path = cluster.lab.directory / "weft.yaml"
    path.write_text(text)
    return path


async def netctl(cluster: Cluster, *words: str) -> str:
    """What netctl prints where netmaster is."""
    return await cluster.kubectl("exec", "-n", "kube-system", "deploy/weft-netmaster", "--", "netctl", *words)


async def own_pods(cluster: Cluster, app: str, *, count: int) -> list[Any]:
    """The pods of one of our programs, once there are so many, none is about to go, and all are ready."""

    async def look() -> list[Any]:
        return await cluster.api.items(f"{OWN_PODS}?labelSelector=app%3D{app}")

    def complete(pods: list[Any]) -> bool:
        return len(pods) == count and all(map(_serves, pods))

    return await eventually(look, complete, within=WITHIN)


def _serves(pod: Any) -> bool:
    return holds(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]
