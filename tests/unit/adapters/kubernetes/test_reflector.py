"""The reflector keeps its sink in sync, whatever server and network do to a watch (W46)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from tests.support.kube_script import ABORT, HANG, Scripted, bookmark, event, listing, pod

from weft.adapters.kubernetes.api import Api
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.objects import Pod
from weft.adapters.kubernetes.reflector import ApiResource, Reflector
from weft.lab.waiting import until
from weft.runtime.tasks import background

PATH = "/api/v1/pods"
PODS = ApiResource(PATH, msgspec.json.Decoder(Pod).decode, selector="spec.nodeName=n1")


class RecordingSink:
    """A sink that records names and versions, and every deletion, by an event or by a full list."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.gone: list[str] = []

    def replace(self, objects: Sequence[Pod]) -> None:
        listed = {each.metadata.name: each.metadata.resource_version for each in objects}
        self.gone += sorted(self.versions.keys() - listed.keys())
        self.versions = listed

    def put(self, value: Pod) -> None:
        self.versions[value.metadata.name] = value.metadata.resource_version

    def remove(self, value: Pod) -> None:
        self.gone.append(value.metadata.name)
        self.versions.pop(value.metadata.name, None)


@asynccontextmanager
async def reflecting(
    client_config: ClientConfig, *resources: ApiResource[Pod]
) -> AsyncIterator[tuple[RecordingSink, Reflector[Pod]]]:
    kept = RecordingSink()
    async with Api(client_config) as api:
        reflector = Reflector(api, resources or (PODS,), kept)
        async with background(reflector.run(), name="reflector"):
            yield kept, reflector


async def test_a_paged_list_is_followed_by_events(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5, pod("a", 1), rest="more"), listing(5, pod("b", 2))]
    server.watches[PATH] = [
        [event("ADDED", pod("c", 6)), event("MODIFIED", pod("a", 7)), event("DELETED", pod("b", 8)), HANG]
    ]
    async with reflecting(client_config) as (kept, reflector):
        await until(lambda: kept.versions == {"a": "7", "c": "6"})
        assert kept.gone == ["b"]
        assert reflector.in_sync.is_set()
        assert not reflector.fault
    assert server.requests[:3] == [f"list {PATH}", f"list {PATH} more", f"watch {PATH} from 5"]
    assert set(server.tokens) == {"Bearer secret"}


async def test_a_watch_resumes_from_the_last_bookmark(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5)]
    server.watches[PATH] = [[event("ADDED", pod("a", 6)), bookmark(8000)], [event("ADDED", pod("b", 8001)), HANG]]
    async with reflecting(client_config) as (kept, _):
        await until(lambda: set(kept.versions) == {"a", "b"})
    assert f"watch {PATH} from 8000" in server.requests
    assert server.requests.count(f"list {PATH}") == 1


async def test_a_compacted_resource_version_causes_a_relist_with_its_deletions(
    server: Scripted, client_config: ClientConfig
) -> None:
    """410, as an ERROR event and as the reply."""
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    server.lists[PATH] = [listing(5, pod("a"), pod("b")), listing(90, pod("b", 80)), listing(200, pod("c", 190))]
    server.watches[PATH] = [[event("ERROR", gone)], [410], [HANG]]
    async with reflecting(client_config) as (kept, _):
        await until(lambda: kept.versions == {"c": "190"})
        assert kept.gone == ["a", "b"]
    assert server.requests.count(f"list {PATH}") == 3


async def test_a_truncated_line_and_a_broken_connection_lose_nothing(
    server: Scripted, client_config: ClientConfig
) -> None:
    server.lists[PATH] = [listing(5)]
    half = msgspec.json.encode(event("ADDED", pod("b", 7)))[:40]
    server.watches[PATH] = [
        [event("ADDED", pod("a", 6)), half, ABORT],
        [event("ADDED", pod("b", 7)), HANG],
    ]
    async with reflecting(client_config) as (kept, reflector):
        await until(lambda: kept.versions == {"a": "6", "b": "7"})
        assert not reflector.fault
    assert f"watch {PATH} from 6" in server.requests


async def test_an_undecodable_object_affects_no_other(server: Scripted, client_config: ClientConfig) -> None:
    """W46: a watch that ends on an error event, and one object that hides all others."""
    broken = pod("x", 7) | {"spec": {"containers": "none"}}
    server.lists[PATH] = [listing(5, broken, pod("a", 1))]
    server.watches[PATH] = [[event("ADDED", broken), event("SURPRISE", pod("b", 8)), HANG]]
    async with reflecting(client_config) as (kept, _):
        await until(lambda: kept.versions == {"a": "1", "b": "8"})


async def test_denied_access_is_retried(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [403, listing(5, pod("a"))]
    async with reflecting(client_config) as (kept, reflector):
        await until(lambda: "403" in reflector.fault)
        assert not reflector.in_sync.is_set()
        await until(lambda: set(kept.versions) == {"a"})
        assert not reflector.fault


async def test_the_first_api_version_that_the_server_has_is_used(server: Scripted, client_config: ClientConfig) -> None:
    server.lists[PATH] = [listing(5, pod("a"))]
    newer = ApiResource("/apis/newer/v1/pods", PODS.decode)
    async with reflecting(client_config, newer, PODS) as (kept, _):
        await until(lambda: set(kept.versions) == {"a"})
    assert server.requests[:2] == ["list /apis/newer/v1/pods", f"list {PATH}"]


async def test_a_failing_server_causes_no_relist(server: Scripted, client_config: ClientConfig) -> None:
    """Otherwise a thousand nodes would relist at once when a server restarts."""
    server.lists[PATH] = [listing(5, pod("a"))]
    server.watches[PATH] = [*([[503]] * 5), [event("ADDED", pod("b", 6)), HANG]]
    async with reflecting(client_config) as (kept, _):
        await until(lambda: set(kept.versions) == {"a", "b"})
    assert server.requests.count(f"list {PATH}") == 1


async def test_a_server_restored_from_a_backup_is_relisted(server: Scripted, client_config: ClientConfig) -> None:
    """An API server over an older copy of its data rejects resource versions that it has not reached."""
    server.lists[PATH] = [listing(500, pod("a")), listing(40, pod("b"))]
    server.watches[PATH] = [[504, "Timeout: Too large resource version: 500, current: 40"], [HANG]]
    async with reflecting(client_config) as (kept, _):
        await until(lambda: set(kept.versions) == {"b"})
