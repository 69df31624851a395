"""A node's pods: known from the watch, asked for when they are not, never mixed up with one of the same name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.kube_script import HANG, Scripted, event, listing, pod

from weft.adapters.kubernetes import pods as pods_module
from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.pods import NodePods
from weft.domain.errors import NotFound, Unavailable
from weft.domain.model import PodPort
from weft.lab.waiting import until
from weft.ports.orchestrator import PodRef
from weft.runtime.tasks import background

PATH = "/api/v1/pods"


@asynccontextmanager
async def following(access: Access) -> AsyncIterator[NodePods]:
    async with NodePods(access, node="n1") as pods, background(pods.run(), name="pods"):
        await pods.in_sync.wait()
        yield pods


async def test_a_pod_that_was_heard_of_is_known_without_a_word(server: Scripted, access: Access) -> None:
    ports = [{"name": "http", "containerPort": 80}, {"containerPort": 9}]
    dns = [{"name": "dns", "containerPort": 53, "protocol": "UDP"}]
    spec: dict[str, Any] = {
        "containers": [{"name": "c", "ports": ports}],
        "initContainers": [{"name": "i", "ports": dns}],
    }
    server.lists[PATH] = [listing(5, pod("a", metadata={"labels": {"app": "web"}}, **spec))]
    async with following(access) as pods:
        asked = len(server.asked)
        found = await pods.find(PodRef("default", "a", "uid-a"))
        assert len(server.asked) <= asked + 1  # no question about the pod: at most the watch has begun
    assert found.ref == PodRef("default", "a", "uid-a")
    assert found.labels == {"app": "web"}
    assert found.ports == (PodPort("http", 6, 80), PodPort("dns", 17, 53))


async def test_a_pod_that_was_not_heard_of_is_asked_for(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5)]
    server.objects["/api/v1/namespaces/default/pods/a"] = pod("a", metadata={"labels": {"app": "web"}})
    server.objects["/api/v1/namespaces/blue"] = {"metadata": {"name": "blue", "labels": {"io.contiv.tenant": "blue"}}}
    async with following(access) as pods:
        assert pods.known(PodRef("default", "a")) is None
        assert (await pods.find(PodRef("default", "a", "uid-a"))).labels == {"app": "web"}
        assert await pods.find_namespace("blue") == {"io.contiv.tenant": "blue"}
        with pytest.raises(NotFound, match="namespace red does not exist"):
            await pods.find_namespace("red")
        with pytest.raises(NotFound, match="pod default/b does not exist"):
            await pods.find(PodRef("default", "b", "uid-b"))


async def test_a_pod_of_the_same_name_is_another(server: Scripted, access: Access) -> None:
    """A StatefulSet's pod comes back under its name: the UID tells it from the one before."""
    server.lists[PATH] = [listing(5, pod("a"))]
    server.objects["/api/v1/namespaces/default/pods/a"] = pod("a")
    async with following(access) as pods:
        assert pods.known(PodRef("default", "a", "uid-before")) is None
        with pytest.raises(NotFound, match="another one by now"):
            await pods.find(PodRef("default", "a", "uid-before"))
        assert pods.known(PodRef("default", "a")) is not None  # runtimes of old name no UID


async def test_a_static_pod_is_known_by_the_uid_of_its_kubelet(server: Scripted, access: Access) -> None:
    shadow = pod("a", metadata={"annotations": {"kubernetes.io/config.mirror": "abc123"}})
    server.lists[PATH] = [listing(5, shadow)]
    async with following(access) as pods:
        assert (await pods.find(PodRef("default", "a", "abc123"))).ref.uid == "uid-a"


async def test_news_and_ends_are_followed(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5, pod("a"))]
    relabelled = pod("a", 6, metadata={"labels": {"app": "db"}})
    server.watches[PATH] = [
        [event("MODIFIED", relabelled), event("ADDED", pod("b", 7)), event("DELETED", pod("b", 8)), HANG]
    ]
    async with following(access) as pods:
        await until(lambda: (known := pods.known(PodRef("default", "a"))) is not None and bool(known.labels))
        assert pods.known(PodRef("default", "b")) is None
        assert pods.news.is_set()


async def test_without_the_server_the_known_stay_known(
    server: Scripted, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods_module, "ASK_WITHIN_S", 0.3)
    server.lists[PATH] = [listing(5, pod("a"))]
    async with following(access) as pods:
        server.accepts = lambda _: False
        server.lists["/api/v1/namespaces/default/pods/b"] = [500]
        assert (await pods.find(PodRef("default", "a", "uid-a"))).ref.name == "a"
        server.accepts = bool
        with pytest.raises(Unavailable, match=r"did not tell of pod default/b within 0\.3 s"):
            await pods.find(PodRef("default", "b", "uid-b"))


async def test_the_same_fault_is_one_event_that_counts(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5)]
    ref = PodRef("default", "a", "uid-a")
    async with following(access) as pods:
        for message in ("no network blue", "no network blue", "no network red"):
            pods.tell(ref, reason="FailedAttach", message=message)
        await until(lambda: len(server.posted) == 3)
    (_, path, first), (method, patched, count), (_, _, other) = server.posted
    assert path == "/api/v1/namespaces/default/events"
    assert first["involvedObject"]["uid"] == "uid-a"
    assert (first["reason"], first["message"], first["type"]) == ("FailedAttach", "no network blue", "Warning")
    assert (method, patched, count["count"]) == ("PATCH", f"{path}/{first['metadata']['name']}", 2)
    assert other["metadata"]["name"] != first["metadata"]["name"]
