"""A kind of objects is followed through everything that a server and a network can do to a watch (W46)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from tests.support.kube_script import ABORT, HANG, Scripted, bookmark, event, listing, pod

from weft.adapters.kubernetes.api import Api
from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.objects import Pod
from weft.adapters.kubernetes.reflector import Reflector, ResourceVersion
from weft.lab.waiting import until
from weft.runtime.tasks import background

PATH = "/api/v1/pods"
FORM = ResourceVersion(PATH, msgspec.json.Decoder(Pod).decode, selector="spec.nodeName=n1")


class Kept:
    """A sink that remembers names and versions, and every deletion it was told of or found by a listing."""

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
async def following(access: Access, *forms: ResourceVersion[Pod]) -> AsyncIterator[tuple[Kept, Reflector[Pod]]]:
    kept = Kept()
    async with Api(access) as api:
        reflector = Reflector(api, forms or (FORM,), kept)
        async with background(reflector.run(), name="reflector"):
            yield kept, reflector


async def test_events_after_a_listing_in_pages(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5, pod("a", 1), rest="more"), listing(5, pod("b", 2))]
    server.watches[PATH] = [
        [event("ADDED", pod("c", 6)), event("MODIFIED", pod("a", 7)), event("DELETED", pod("b", 8)), HANG]
    ]
    async with following(access) as (kept, reflector):
        await until(lambda: kept.versions == {"a": "7", "c": "6"})
        assert kept.gone == ["b"]
        assert reflector.in_sync.is_set()
        assert not reflector.fault
    assert server.asked[:3] == [f"list {PATH}", f"list {PATH} more", f"watch {PATH} from 5"]
    assert set(server.tokens) == {"Bearer secret"}


async def test_a_watch_is_resumed_from_the_last_bookmark(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5)]
    server.watches[PATH] = [[event("ADDED", pod("a", 6)), bookmark(8000)], [event("ADDED", pod("b", 8001)), HANG]]
    async with following(access) as (kept, _):
        await until(lambda: set(kept.versions) == {"a", "b"})
    assert f"watch {PATH} from 8000" in server.asked
    assert server.asked.count(f"list {PATH}") == 1


async def test_lost_history_means_a_new_listing_with_its_deletions(server: Scripted, access: Access) -> None:
    """As an error event and as an answer: 410."""
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
    server.lists[PATH] = [listing(5, pod("a"), pod("b")), listing(90, pod("b", 80)), listing(200, pod("c", 190))]
    server.watches[PATH] = [[event("ERROR", gone)], [410], [HANG]]
    async with following(access) as (kept, _):
        await until(lambda: kept.versions == {"c": "190"})
        assert kept.gone == ["a", "b"]
    assert server.asked.count(f"list {PATH}") == 3


async def test_a_torn_line_and_a_cut_connection_lose_nothing(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5)]
    half = msgspec.json.encode(event("ADDED", pod("b", 7)))[:40]
    server.watches[PATH] = [
        [event("ADDED", pod("a", 6)), half, ABORT],
        [event("ADDED", pod("b", 7)), HANG],
    ]
    async with following(access) as (kept, reflector):
        await until(lambda: kept.versions == {"a": "6", "b": "7"})
        assert not reflector.fault
    assert f"watch {PATH} from 6" in server.asked


async def test_an_unreadable_object_harms_no_other(server: Scripted, access: Access) -> None:
    """W46: a watch that ends on an error event, and one object that hides all others."""
    broken = pod("x", 7) | {"spec": {"containers": "none"}}
    server.lists[PATH] = [listing(5, broken, pod("a", 1))]
    server.watches[PATH] = [[event("ADDED", broken), event("SURPRISE", pod("b", 8)), HANG]]
    async with following(access) as (kept, _):
        await until(lambda: kept.versions == {"a": "1", "b": "8"})


async def test_a_refusal_is_waited_out(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [403, listing(5, pod("a"))]
    async with following(access) as (kept, reflector):
        await until(lambda: "403" in reflector.fault)
        assert not reflector.in_sync.is_set()
        await until(lambda: set(kept.versions) == {"a"})
        assert not reflector.fault


async def test_the_first_form_that_the_server_has_is_followed(server: Scripted, access: Access) -> None:
    server.lists[PATH] = [listing(5, pod("a"))]
    newer = ResourceVersion("/apis/newer/v1/pods", FORM.read)
    async with following(access, newer, FORM) as (kept, _):
        await until(lambda: set(kept.versions) == {"a"})
    assert server.asked[:2] == ["list /apis/newer/v1/pods", f"list {PATH}"]


async def test_a_server_in_trouble_is_asked_for_the_same_again(server: Scripted, access: Access) -> None:
    """No new listing: a thousand nodes would come with one when a server is restarted."""
    server.lists[PATH] = [listing(5, pod("a"))]
    server.watches[PATH] = [*([[503]] * 5), [event("ADDED", pod("b", 6)), HANG]]
    async with following(access) as (kept, _):
        await until(lambda: set(kept.versions) == {"a", "b"})
    assert server.asked.count(f"list {PATH}") == 1


async def test_a_server_that_was_set_back_is_listed_anew(server: Scripted, access: Access) -> None:
    """An API server over an older copy of its data refuses versions that are still to come, for ever."""
    server.lists[PATH] = [listing(500, pod("a")), listing(40, pod("b"))]
    server.watches[PATH] = [[504, "Timeout: Too large resource version: 500, current: 40"], [HANG]]
    async with following(access) as (kept, _):
        await until(lambda: set(kept.versions) == {"b"})
