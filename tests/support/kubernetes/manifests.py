"""Apply the shipped manifests to a new cluster, and get tokens of their service accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tests.support.kubernetes.api import Api
from tests.support.paths import ROOT

PACKAGING = ROOT / "packaging" / "kubernetes"
RBAC = PACKAGING / "rbac.yaml"
DNS = PACKAGING / "dns.yaml"
# All of Weft.
WHOLE = PACKAGING / "weft.yaml"
UNINSTALL = PACKAGING / "uninstall.yaml"


async def apply(api: Api, manifest: Path) -> None:
    """Create every object of a manifest."""
    for document in _documents(manifest):
        await api.create(_folder(document), document)


def _documents(manifest: Path) -> list[dict[str, Any]]:
    return [msgspec.yaml.decode(text) for text in manifest.read_text().split("\n---\n")]


def _folder(document: dict[str, Any]) -> str:
    version, namespace = document["apiVersion"], document["metadata"].get("namespace")
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{document['kind'].lower()}s"


async def token_of(api: Api, account: str, *, namespace: str = "kube-system", pod: str = "", scope: str = "") -> str:
    """A new token of a service account, as the kubelet would mount it into a pod; bound to `pod` if given.

    Its audience is the API server, or `scope` if given.
    """
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    spec: dict[str, object] = {"audiences": [scope]} if scope else {}
    if pod:
        spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod}
    answer = await api.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec})
    token: str = answer["status"]["token"]
    return token
