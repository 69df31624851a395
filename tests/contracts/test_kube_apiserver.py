"""The kube-apiserver of the tests is persistent and enforces RBAC."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.kubernetes.api_server import running_api_server

PODS = "/api/v1/namespaces/default/pods"


@pytest.mark.timeout(240)
async def test_objects_survive_a_kill_of_the_api_server(kube_apiserver: Path, tmp_path: Path) -> None:
    """RBAC is enforced too."""
    async with running_api_server(tmp_path, programs=kube_apiserver) as server:
        async with server.client() as admin, server.client("eve", "guests") as guest:
            container = {"name": "c", "image": "none"}
            pod = {
                "metadata": {"name": "a", "labels": {"io.contiv.tenant": "blue"}},
                "spec": {"containers": [container]},
            }
            await admin.create(PODS, pod)
            with pytest.raises(AssertionError, match="cannot list resource"):
                await guest.get(PODS)
        await server.start()
        async with server.client() as admin:
            (stored,) = await admin.items(PODS)
            assert stored["metadata"]["labels"] == {"io.contiv.tenant": "blue"}
            await admin.delete(f"{PODS}/a?gracePeriodSeconds=0")
            assert await admin.find(f"{PODS}/a") is None
