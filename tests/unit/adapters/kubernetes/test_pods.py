"""The pod informer of a node: cached pods, pods that are not cached yet, and pods that reuse a name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.kube_script import HANG, Scripted, event, listing, pod

from weft.adapters.kubernetes import pods as pods_module
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.pods import NodePods
from weft.domain.errors import NotFound, Unavailable
from weft.domain.model import PodPort
from weft.lab.waiting import until
from weft.ports.orchestrator import PodRef
from weft.runtime.tasks import background

PATH = "/api/v1/pods"


@asynccontextmanager
async def informer(client_config: ClientConfig) -> AsyncIterator[NodePods]:
    async with NodePods(client_config, node="n1") as pods, background(pods.run(), name="pods"):
        await pods.in_sync.wait()
        yield pods


async def test_a_watched_pod_is_found_in_the_cache_without_a_request(
    server: Scripted, client_config: ClientConfig
) -> None:
    ports = [{"name": "http", "containerPort": 80}, {"containerPort": 9}]
    dns = [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]
    spec: dict[str, Any] = {
        "containers": [{"name": "c", "ports": ports}],
        "initContainers": [{"name": "i", "ports": dns}],
    }
    server.lists[PATH] = [listing(5, pod("a", metadata={"labels": {"app": "web"}}, **spec))]
    async with informer(client_config) as pods:
        before = len(server.requests)
        found = await pods.find(PodRef("default", "a", "uid-a"))
        assert len(server.requests) <= before + 1  # no GET of the pod: at most the watch has started
    assert found.ref == PodRef("default", "a", "uid-a")
    assert found.labels == {"app": "web"}
    assert found.ports == (PodPort("http", 6, 80), PodPort("dns", 17, 53))


async def test_a_pod_that_is_not_cached_is_requested(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5)]
    server.objects["/api/v1/namespaces/default/pods/a"] = pod("a", metadata={"labels": {"app": "web"}})
    server.objects["/api/v1/namespaces/blue"] = {"metadata": {"name": "blue", "labels": {"io.contiv.tenant": "blue"}}}
    async with informer(client_config) as pods:
        assert pods.cached(PodRef("default", "a")) is None
        assert (await pods.find(PodRef("default", "a", "uid-a"))).labels == {"app": "web"}
        assert await pods.find_namespace("blue") == {"io.contiv.tenant": "blue"}
        with pytest.raises(NotFound, match="namespace red does not exist"):
            await pods.find_namespace("red")
        with pytest.raises(NotFound, match="pod default/b does not exist"):
            await pods.find(PodRef("default", "b", "uid-b"))


async def test_a_new_pod_with_the_same_name_is_distinguished_by_its_uid(
    server: Scripted, client_config: ClientConfig
) -> None:
    """A StatefulSet recreates a pod under the same name: only the UID differs."""
    server.lists[PATH] = [listing(5, pod("a"))]
    server.objects["/api/v1/namespaces/default/pods/a"] = pod("a")
    async with informer(client_config) as pods:
        assert pods.cached(PodRef("default", "a", "uid-before")) is None
        with pytest.raises(NotFound, match="was replaced"):
            await pods.find(PodRef("default", "a", "uid-before"))
        assert pods.cached(PodRef("default", "a")) is not None  # runtimes of old name no UID


async def test_a_static_pod_is_found_by_the_uid_of_its_kubelet(server: Scripted, client_config: ClientConfig) -> None:
    shadow = pod("a", metadata={"annotations": {"kubernetes.io/config.mirror": "abc123"}})
    server.lists[PATH] = [listing(5, shadow)]
    async with informer(client_config) as pods:
        assert (await pods.find(PodRef("default", "a", "abc123"))).ref.uid == "uid-a"


async def test_updates_and_deletions_change_the_cache(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5, pod("a"))]
    relabelled = pod("a", 6, metadata={"labels": {"app": "db"}})
    server.watches[PATH] = [
        [event("MODIFIED", relabelled), event("ADDED", pod("b", 7)), event("DELETED", pod("b", 8)), HANG]
    ]
    async with informer(client_config) as pods:
        await until(lambda: (known := pods.cached(PodRef("default", "a"))) is not None and bool(known.labels))
        assert pods.cached(PodRef("default", "b")) is None
        assert pods.changed.is_set()


async def test_cached_pods_stay_available_without_the_server(
    server: Scripted, client_config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "GET_TIMEOUT_S", 0.3)
    server.lists[PATH] = [listing(5, pod("a"))]
    async with informer(client_config) as pods:
        server.accepts = lambda _: False
        server.lists["/api/v1/namespaces/default/pods/b"] = [500]
        assert (await pods.find(PodRef("default", "a", "uid-a"))).ref.name == "a"
        server.accepts = bool
        with pytest.raises(Unavailable, match=r"did not return pod default/b within 0\.3 s"):
            await pods.find(PodRef("default", "b", "uid-b"))


async def test_equal_events_are_one_event_with_a_count(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5)]
    ref = PodRef("default", "a", "uid-a")
    async with informer(client_config) as pods:
        for message in ("no network blue", "no network blue", "no network red"):
            pods.record_event(ref, reason="FailedAttach", message=message)
        await until(lambda: len(server.posted) == 3)
    (_, path, first), (method, patched, count), (_, _, other) = server.posted
    assert path == "/api/v1/namespaces/default/events"
    assert first["involvedObject"]["uid"] == "uid-a"
    assert (first["reason"], first["message"], first["type"]) == ("FailedAttach", "no network blue", "Warning")
    assert (method, patched, count["count"]) == ("PATCH", f"{path}/{first['metadata']['name']}", 2)
    assert other["metadata"]["name"] != first["metadata"]["name"]
