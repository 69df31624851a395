"""A kind of objects of the API, followed for ever: listed in pages, then watched from where the list ended.

- The watch is resumed from the last event or bookmark; a stream that ends, cleanly or not, loses nothing.
- Where the server has lost that history (410, in the answer or as an event) everything is listed anew, and what is not
  listed is gone: no deletion is missed.
- A server that is away, or that refuses us, is waited for. An object that cannot be read is passed over and told of in
  the log; the others go on (W46).
- Of several forms of a kind the first one that the server has is followed; that is found out with each listing, so a
  server may be upgraded meanwhile.
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

from weft.adapters.kubernetes.api import Api, Status, refusal
from weft.domain.errors import Compacted, NotFound, Unavailable, WeftError
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("kubernetes")

PAGE = 500
# How long a watch goes on before it is asked for anew; a connection that is dead is known to be so soon after.
WATCH_S = 50
# How long a watch may be silent after it should have ended.
_SILENCE_S = 20.0
# How rarely a server is asked that refuses us: somebody has to give us a right first.
_REFUSED_CAP_S = 30.0

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class ResourceVersion(Generic[T]):
    """Where a kind is found in the API, and how one of its objects is read. `selector` is a field selector."""

    path: str
    read: Callable[[bytes], T]
    selector: str = ""


class Sink(Protocol[T_contra]):
    """Whoever keeps the objects. Called from the event loop; must not raise."""

    def replace(self, objects: Sequence[T_contra]) -> None:
        """Everything there is; what is not listed is gone."""
        ...

    def put(self, value: T_contra) -> None:
        """An object is new, or another than before."""
        ...

    def remove(self, value: T_contra) -> None:
        """An object is gone; here it is as it was last."""
        ...


class _ListMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Marked(msgspec.Struct, frozen=True):
    metadata: _ListMetadata


_read_list = msgspec.json.Decoder(_List).decode
_read_event = msgspec.json.Decoder(_Event).decode
_read_status = msgspec.json.Decoder(Status).decode
_read_mark = msgspec.json.Decoder(_Marked).decode


class Reflector(Generic[T]):
    """Feeds a sink with a kind of objects. `run` does the work, for as long as it shall be followed."""

    def __init__(self, api: Api, forms: Sequence[ResourceVersion[T]], sink: Sink[T]) -> None:
        self._api = api
        self._forms = forms
        self._sink = sink
        self._form = forms[0]
        self._version = ""
        # Set once the sink has had a full listing.
        self.in_sync = asyncio.Event()
        # Why the API server does not tell us anything now; empty while it does.
        self.fault = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff = Backoff()
        refused = Backoff(first=1.0, cap=_REFUSED_CAP_S)
        while True:
            before = self._version
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                continue
            except Compacted:
                log.info("history is gone, listing anew", path=self._form.path)
                self._version = ""
                pause = backoff
            except Unavailable as error:
                self._note(error.message)
                pause = backoff
            except WeftError as error:
                self._note(error.message)
                self._version = ""  # what was refused may be another thing when it is allowed again
                pause = refused
            if self._version and self._version != before:
                backoff.reset()
                refused.reset()
            await pause.pause()

    def _note(self, fault: str) -> None:
        if fault and fault != self.fault:  # it may be away for long: once is enough
            log.warning("the API server does not tell", path=self._form.path, reason=fault)
        self.fault = fault

    async def _list(self) -> None:
        for form in self._forms[:-1]:
            self._form = form
            try:
                return await self._list_form()
            except NotFound:
                continue  # an older server: it has the next form
        self._form = self._forms[-1]
        return await self._list_form()

    async def _list_form(self) -> None:
        objects: list[T] = []
        rest = ""
        while True:
            page = decoded(_read_list, await self._api.get(self._path(f"limit={PAGE}", rest)))
            objects += (value for item in page.items or () if (value := self._read(bytes(item))) is not None)
            if not page.metadata.continue_:
                break
            rest = f"continue={quote(page.metadata.continue_, safe='')}"
        self._sink.replace(objects)
        self._version = page.metadata.resource_version
        self._note("")
        self.in_sync.set()

    async def _watch(self) -> None:
        """Hand on events until the server ends the stream."""
        seconds = random.randint(WATCH_S * 3 // 4, WATCH_S)  # noqa: S311  so that many do not come at once
        wish = f"watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={quote(self._version)}"
        heard = False
        async with aclosing(self._api.lines(self._path(wish), silence=seconds + _SILENCE_S)) as lines:
            async for line in lines:
                self._take(decoded(_read_event, line))
                self._note("")
                heard = True
        if not heard:
            await Backoff(first=0.2).pause()  # a stream that ends at once and says nothing must not be a busy loop

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = decoded(_read_status, bytes(event.object))
            raise refusal(status.code, bytes(event.object))
        self._version = decoded(_read_mark, bytes(event.object)).metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        value = self._read(bytes(event.object))
        if value is None:
            return
        if event.type == "DELETED":
            self._sink.remove(value)
        else:
            self._sink.put(value)

    def _read(self, data: bytes) -> T | None:
        try:
            return self._form.read(data)
        except (msgspec.MsgspecError, WeftError, ValueError) as error:
            log.error(
                "object not read",
                path=self._form.path,
                reason=str(error)[:300],
                start=data[:200].decode("utf-8", "replace"),
            )
            return None

    def _path(self, *queries: str) -> str:
        chosen = [f"fieldSelector={quote(self._form.selector, safe='')}"] if self._form.selector else []
        return f"{self._form.path}?{'&'.join(filter(None, [*chosen, *queries]))}"


def decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    """What the data say; `Unavailable` when they are none of what was asked for."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"the API server's words are not readable: {error}") from error
