"""Kubernetes Services without Kubernetes: writes into the store what Kubernetes sync would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from weft.domain import codec, kinds
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice, ServiceObject
from weft.domain.store_types import Delete, DeleteAll, Put, Write
from weft.drivers import EtcdStoreSettings, open_store
from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab
from weft.ports.store import Store

NAMESPACE = "lab"
# Port of the backends.
TARGET_PORT = 8080


class KubeFeed:
    """Writes Services of one tenant, and waits until every node has applied them."""

    def __init__(self, lab: NetLab, store: Store, tenant: str) -> None:
        self._lab = lab
        self._store = store
        self._tenant = TenantName(tenant)

    async def put(
        self,
        name: str,
        *pods: Pod,
        addresses: Iterable[str] = (),
        transport: str = "TCP",
        node_port: int = 0,
        shared: bool = False,
        ingress: Iterable[str] = (),
        **spec: Any,
    ) -> None:
        """A service at port 80 with these pods, and other addresses, as backends; further members of `spec` by name."""
        port = {"name": "web", "protocol": transport, "port": 80, "nodePort": node_port}
        service = {
            "spec": {"ports": [port], **spec},
            "status": {"loadBalancer": {"ingress": [{"ip": text} for text in ingress]}},
        }
        document = KubeService(
            tenant=self._tenant,
            namespace=NAMESPACE,
            name=name,
            shared=shared,
            service=msgspec.convert(service, ServiceObject),
        )
        writes: list[Write] = [
            Put(kinds.KUBE_SERVICE.store_key(self._tenant, NAMESPACE, name), codec.encode(document)),
            *self._slices(name, pods, [*addresses], transport=transport),
        ]
        await self._commit(writes)

    def _slices(self, name: str, pods: tuple[Pod, ...], others: list[str], *, transport: str) -> Iterable[Write]:
        for family in (4, 6):
            endpoints = [{"addresses": [str(pod.address(family))], "nodeName": pod.host.name} for pod in pods]
            endpoints += [{"addresses": [text]} for text in others if (":" in text) == (family == 6)]
            ports = [{"name": "web", "protocol": transport, "port": TARGET_PORT}]
            piece = {"addressType": f"IPv{family}", "endpoints": endpoints, "ports": ports}
            document = KubeSlice(
                tenant=self._tenant,
                namespace=NAMESPACE,
                service_name=name,
                name=f"{name}-v{family}",
                slice=msgspec.convert(piece, EndpointSlice),
            )
            key = kinds.KUBE_SLICE.store_key(*kinds.KUBE_SLICE.key_parts(document))
            yield Put(key, codec.encode(document))

    async def remove(self, name: str) -> None:
        """Delete the Service."""
        await self._commit(
            [
                Delete(kinds.KUBE_SERVICE.store_key(self._tenant, NAMESPACE, name)),
                DeleteAll(kinds.KUBE_SLICE.store_prefix(self._tenant, NAMESPACE, name)),
            ]
        )

    async def remove_all(self) -> None:
        """Delete all Services of the tenant."""
        await self._commit(
            [DeleteAll(kind.store_prefix(self._tenant)) for kind in (kinds.KUBE_SERVICE, kinds.KUBE_SLICE)]
        )

    async def _commit(self, writes: Iterable[Write]) -> None:
        await self._store.commit([], [*writes])
        (await self._lab.rest.send("POST", "/api/v1/sync?wait=60")).accepted()


@asynccontextmanager
async def kube_feed(lab: NetLab, tenant: str) -> AsyncIterator[KubeFeed]:
    """A feed for a tenant of a lab on etcd; its objects are deleted at the end."""
    assert lab.etcd is not None
    async with open_store(EtcdStoreSettings(endpoints=lab.etcd.endpoints)) as store:
        feed = KubeFeed(lab, store, tenant)
        try:
            yield feed
        finally:
            await feed.remove_all()
