"""API documents of pods for tests. Each pod serves its own name over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The image that every node has: busybox.
IMAGE = "weft.test/box:1"

PORT = 8080

_SERVE = f"hostname > /tmp/index.html && echo serving && exec httpd -f -p {PORT} -h /tmp"


def pod(name: str, *, node: str = "", labels: Mapping[str, str] | None = None, **container: object) -> dict[str, Any]:
    """A pod, on a node or wherever it is scheduled; further members of its container by name."""
    spec = _spec(container) | ({"nodeName": node} if node else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels or {}}, "spec": spec}


def deployment(name: str, *, replicas: int, **container: object) -> dict[str, Any]:
    """A Deployment whose pods are spread over the nodes."""
    labels = {"app": name}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": labels},
    }
    template = {"metadata": {"labels": labels}, "spec": _spec(container) | {"topologySpreadConstraints": [spread]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def daemon_set(name: str, **container: object) -> dict[str, Any]:
    """A DaemonSet: a pod on every node."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": _spec(container)}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": name}, "spec": spec}


def _spec(container: Mapping[str, object]) -> dict[str, Any]:
    serving = {"name": "box", "image": IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", _SERVE]}
    ready = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
    return {
        "terminationGracePeriodSeconds": 0,
        "containers": [{**serving, "readinessProbe": ready, **container}],
    }
