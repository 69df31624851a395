"""Two lab hosts and a real API server, without kubelets: tests create pods in the API and call ADD themselves.

So a test controls when a runtime calls, and the state of the API server at that moment.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.kubernetes.api import Api
from tests.support.kubernetes.api_server import ApiServer, running_api_server
from tests.support.kubernetes.manifests import RBAC, apply, token_of

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab

NAMESPACE = "lab"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POLICIES = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


class KubeletlessCluster:
    """An open cluster: `api` may do everything, our programs may do what the manifest says."""

    def __init__(self, lab: NetLab, server: ApiServer, api: Api) -> None:
        self.lab = lab
        self.server = server
        self.api = api

    async def start(self) -> None:
        """Create RBAC and the namespace, and start netmaster in mode kubernetes and two hosts."""
        await apply(self.api, RBAC)
        await self.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        await self.lab.master.start("--mode=kubernetes", f"--contiv-json={await self._contiv('weft-netmaster')}")
        mode = ("--mode=kubernetes", "--contiv-socket=none", f"--contiv-json={await self._contiv('weft-netplugin')}")
        for name in ("one", "two"):
            await self.lab.host(name, *mode, "--node-ttl=30")  # the machine may be busy

    async def _contiv(self, account: str) -> Path:
        token = await token_of(self.api, account)
        keys = {"K8S_API_SERVER": self.server.url, "K8S_CA": str(self.server.authority.ca), "K8S_TOKEN": token}
        path = self.lab.directory / f"{account}.json"
        path.write_text(json.dumps(keys))
        return path

    async def create_pod(self, host: Host, name: str, labels: Mapping[str, str]) -> str:
        """Create a pod that is bound to a host; return its UID."""
        port = {"name": "http", "containerPort": 80}
        spec = {"nodeName": host.name, "containers": [{"name": "c", "image": "none", "ports": [port]}]}
        made = await self.api.create(PODS, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        uid: str = made["metadata"]["uid"]
        return uid

    async def attach(self, host: Host, name: str, uid: str) -> Pod:
        """Send the ADD that a kubelet would; `CniError` when it fails."""
        plain = host.attachment(name)
        attachment = replace(plain, args=(*plain.args, ("K8S_POD_UID", uid)))
        result = await host.cni.add(host.network, attachment)
        return host.attached(attachment, result)

    async def pod(self, host: Host, name: str, **labels: str) -> Pod:
        """A pod of the namespace `lab`, created and attached. Dots in names of labels are written as `__`."""
        named = {key.replace("__", "."): value for key, value in labels.items()}
        return await self.attach(host, name, await self.create_pod(host, name, named))

    async def relabel(self, name: str, **labels: str | None) -> None:
        await self.api.patch(f"{PODS}/{name}", {"metadata": {"labels": labels}})

    async def delete_pods(self, *names: str) -> None:
        """Delete pods from the API without a grace period."""
        for name in names:
            await self.api.delete(f"{PODS}/{name}?gracePeriodSeconds=0")

    async def policy(self, name: str, **spec: Any) -> None:
        """Create a NetworkPolicy."""
        await self.api.create(POLICIES, {"metadata": {"name": name}, "spec": spec})

    async def service(self, name: str, *pods: Pod, target_port: int = 8080) -> str:
        """Create a Service at port 80 with these backends; return its address."""
        ports = [{"name": "web", "port": 80, "targetPort": "http"}]
        made = await self.api.create(SERVICES, {"metadata": {"name": name}, "spec": {"ports": ports}})
        metadata = {"name": f"{name}-1", "labels": {"kubernetes.io/service-name": name}}
        piece = {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints(*pods)}
        await self.api.create(SLICES, {**piece, "ports": [{"name": "web", "port": target_port, "protocol": "TCP"}]})
        address: str = made["spec"]["clusterIP"]
        return address

    async def set_backends(self, name: str, *pods: Pod) -> None:
        """Replace the backends of a Service."""
        await self.api.patch(f"{SLICES}/{name}-1", {"endpoints": endpoints(*pods)})


def endpoints(*pods: Pod) -> list[dict[str, Any]]:
    return [
        {"addresses": [str(pod.address())], "conditions": {"ready": True}, "nodeName": pod.host.name} for pod in pods
    ]


@asynccontextmanager
async def open_kubeletless_cluster(lab: NetLab, *, programs: Path) -> AsyncIterator[KubeletlessCluster]:
    """A cluster on a lab that has no hosts yet."""
    async with AsyncExitStack() as stack:
        directory = lab.directory / "kubernetes"
        server = await stack.enter_async_context(running_api_server(directory, programs=programs, address=lab.address))
        api = await stack.enter_async_context(server.client())
        cluster = KubeletlessCluster(lab, server, api)
        await cluster.start()
        yield cluster
