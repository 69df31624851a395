"""Reflector: lists one resource of the Kubernetes API in pages, then watches it from the list's resource version.

- A watch resumes from the resource version of the last event or bookmark, so a closed stream loses nothing.
- When the server has compacted that version (410, as the reply or as an event), the reflector relists. Objects missing
  from the new list are deleted, so no deletion is lost.
- When the server is unreachable or denies access, the reflector retries. An object that cannot be decoded is logged and
  skipped; the others are delivered (W46).
- When a resource has several API versions, the reflector uses the first one that the server has. It decides this with
  each list, so the server may be upgraded meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from weft.adapters.kubernetes.api import Api, Status, error_from_status
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Compacted, NotFound, Unavailable, WeftError
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("kubernetes")

# Objects per page of a list; client-go uses the same size.
PAGE = 500
# Server-side timeout of a watch. Short, so that a dead connection is detected soon after.
WATCH_S = 50
# Extra time before the client gives up on a watch that the server should have ended.
_READ_MARGIN_S = 20.0
# Longest pause between attempts while the server denies access: an administrator has to change RBAC first.
_DENIED_CAP_S = 30.0

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class ApiResource(Generic[T]):
    """One API version of a resource: its path, the decoder of its objects, and an optional field selector."""

    path: str
    decode: Callable[[bytes], T]
    selector: str = ""


class Sink(Protocol[T_contra]):
    """Receives the objects of one resource. Called from the event loop; must not raise."""

    def replace(self, objects: Sequence[T_contra]) -> None:
        """Full list: objects that are not in it are deleted."""
        ...

    def put(self, value: T_contra) -> None:
        """Object added or modified."""
        ...

    def remove(self, value: T_contra) -> None:
        """Object deleted; `value` is its last state."""
        ...


class _ListMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    # Decoded one by one: an object that we cannot decode must not fail the whole list.
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct, frozen=True):
    """Any object, for its resource version alone: bookmarks have nothing else."""

    metadata: _ListMetadata


_decode_list = msgspec.json.Decoder(_List).decode
_decode_event = msgspec.json.Decoder(_WatchEvent).decode
_decode_status = msgspec.json.Decoder(Status).decode
_decode_versioned = msgspec.json.Decoder(_Versioned).decode


class Reflector(Generic[T]):
    """Keeps a sink in sync with one resource while `run` runs. `resources` are its API versions, preferred first."""

    def __init__(self, api: Api, resources: Sequence[ApiResource[T]], sink: Sink[T]) -> None:
        self._api = api
        self._resources = resources
        self._sink = sink
        self._resource = resources[0]
        # Where the next watch starts; empty means that a list is needed first.
        self._resource_version = ""
        # Set once the sink has received a full list.
        self.in_sync = asyncio.Event()
        # Why list or watch fails now; empty while they succeed.
        self.fault = ""

    async def run(self) -> None:
        """List and watch until cancelled."""
        backoff = Backoff()
        denied = Backoff(first=1.0, cap=_DENIED_CAP_S)
        while True:
            before = self._resource_version
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
                continue
            except Compacted:
                log.info("resource version too old, relisting", path=self._resource.path)
                self._resource_version = ""
                pause = backoff
            except Unavailable as error:
                self._set_fault(error.message)
                pause = backoff
            except WeftError as error:
                self._set_fault(error.message)
                # Relist: by the time access is granted again, the old resource version may be compacted.
                self._resource_version = ""
                pause = denied
            if self._resource_version and self._resource_version != before:
                backoff.reset()
                denied.reset()
            await pause.pause()

    def _set_fault(self, fault: str) -> None:
        # Log once per reason: the server may be unreachable for hours.
        if fault and fault != self.fault:
            log.warning("watch failed", path=self._resource.path, reason=fault)
        self.fault = fault

    async def _list(self) -> None:
        for resource in self._resources[:-1]:
            self._resource = resource
            try:
                return await self._list_pages()
            except NotFound:
                continue  # the server is too old for this API version
        self._resource = self._resources[-1]
        return await self._list_pages()

    async def _list_pages(self) -> None:
        objects: list[T] = []
        continue_query = ""
        while True:
            path = self._path(f"limit={PAGE}", continue_query)
            page = decode_reply(_decode_list, await self._api.get(path))
            objects += (value for item in page.items or () if (value := self._decode(bytes(item))) is not None)
            if not page.metadata.continue_:
                break
            continue_query = f"continue={quote(page.metadata.continue_, safe='')}"
        self._sink.replace(objects)
        # All pages have the same resource version: the server serves them from one snapshot.
        self._resource_version = page.metadata.resource_version
        self._set_fault("")
        self.in_sync.set()

    async def _watch(self) -> None:
        """Deliver events until the server ends the stream."""
        # Jitter, so that the watches of many agents do not end at the same moment.
        seconds = random.randint(WATCH_S * 3 // 4, WATCH_S)  # noqa: S311
        query = (
            f"watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={quote(self._resource_version)}"
        )
        got_event = False
        lines = self._api.stream_lines(self._path(query), read_timeout=seconds + _READ_MARGIN_S)
        async with aclosing(lines):
            async for line in lines:
                self._deliver(decode_reply(_decode_event, line))
                self._set_fault("")
                got_event = True
        if not got_event:
            # Some proxies close an idle watch at once; without a pause this would be a busy loop.
            await Backoff(first=0.2).pause()

    def _deliver(self, event: _WatchEvent) -> None:
        if event.type == "ERROR":
            status = decode_reply(_decode_status, bytes(event.object))
            raise error_from_status(status.code, bytes(event.object))
        # The version advances even if the object cannot be decoded; otherwise the next watch would replay it forever.
        version = decode_reply(_decode_versioned, bytes(event.object)).metadata.resource_version
        self._resource_version = version or self._resource_version
        if event.type == "BOOKMARK":
            return
        value = self._decode(bytes(event.object))
        if value is None:
            return
        if event.type == "DELETED":
            self._sink.remove(value)
        else:
            self._sink.put(value)

    def _decode(self, data: bytes) -> T | None:
        try:
            return self._resource.decode(data)
        except (*UNDECODABLE, WeftError, ValueError) as error:
            log.error(
                "failed to decode object",
                path=self._resource.path,
                reason=str(error)[:300],
                start=data[:200].decode("utf-8", "replace"),
            )
            return None

    def _path(self, *queries: str) -> str:
        selector = [f"fieldSelector={quote(self._resource.selector, safe='')}"] if self._resource.selector else []
        return f"{self._resource.path}?{'&'.join(filter(None, [*selector, *queries]))}"


def decode_reply(decode: Callable[[bytes], T], data: bytes) -> T:
    """Decode a reply of the API server; `Unavailable` when it is malformed, as a proxy's error page is."""
    try:
        return decode(data)
    except UNDECODABLE as error:
        raise Unavailable(f"malformed reply from the API server: {error}") from error
