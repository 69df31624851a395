"""Event recorder: writes core/v1 Events, which `kubectl describe` and `kubectl events` show.

Recording never blocks the caller and never fails it. Equal events about an object are one Event with a count. Events
are dropped while the API server is unreachable.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from weft.adapters.kubernetes.api import Api
from weft.domain.errors import Conflict, WeftError
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("kubernetes")

COMPONENT = "weft"
# Events that may wait to be written; more are dropped.
_MAX_QUEUED = 100
# Event names whose count is remembered, so that a repeated event is a PATCH instead of a POST.
_MAX_COUNTED = 500
# Kubernetes rejects messages of more than 1,024 characters.
_MAX_MESSAGE = 1000


class Subject(NamedTuple):
    """The object that an Event is about (`involvedObject`)."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str = ""


class _Event(NamedTuple):
    subject: Subject
    reason: str
    message: str
    warning: bool


class EventRecorder:
    """`record_event` queues an event; `run` writes queued events to the API server."""

    def __init__(self, api: Api, *, host: str) -> None:
        """`host` becomes `source.host`: the node's name, or that of a component that runs on no particular node."""
        self._api = api
        self._host = host
        self._queue: asyncio.Queue[_Event] = asyncio.Queue(_MAX_QUEUED)
        self._counts: OrderedDict[str, int] = OrderedDict()

    def record_event(self, subject: Subject, *, reason: str, message: str, warning: bool = True) -> None:
        """Queue an event of type Warning, or Normal. `reason` is one word in CamelCase."""
        if not self._queue.full():
            self._queue.put_nowait(_Event(subject, reason, message[:_MAX_MESSAGE], warning))

    async def run(self) -> None:
        """Write events until cancelled."""
        # At most 10 a second: a node in trouble must not overload the API server.
        pace = Backoff(first=0.1, cap=0.1)
        while True:
            event = await self._queue.get()
            try:
                await self._write(event)
            except WeftError as error:
                about = f"{event.subject.kind} {event.subject.namespace}/{event.subject.name}"
                log.warning("event not recorded", about=about, reason=error.message)
            await pace.pause()

    async def _write(self, event: _Event) -> None:
        subject = event.subject
        # The name is a hash of the content, so that a restarted process finds the Event it wrote before.
        digest = zlib.crc32(f"{self._host} {subject.kind} {subject.uid} {event.reason} {event.message}".encode())
        # A name has up to 253 characters.
        name = f"{subject.name[:230]}.{digest:08x}"
        folder = f"/api/v1/namespaces/{subject.namespace}/events"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count = self._counts.pop(name, 0) + 1
        if count == 1:
            try:
                await self._api.post(folder, self._encode(event, name=name, now=now))
            except Conflict:
                count = 2  # written by an earlier run of this process
        if count > 1:
            patch = msgspec.json.encode({"count": count, "lastTimestamp": now})
            await self._api.merge_patch(f"{folder}/{name}", patch)
        self._counts[name] = count
        if len(self._counts) > _MAX_COUNTED:
            self._counts.popitem(last=False)

    def _encode(self, event: _Event, *, name: str, now: str) -> bytes:
        subject = event.subject
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": subject.namespace},
                "involvedObject": {
                    "apiVersion": subject.api_version, "kind": subject.kind,
                    "namespace": subject.namespace, "name": subject.name, "uid": subject.uid,
                },
                "reason": event.reason,
                "message": event.message,
                "type": "Warning" if event.warning else "Normal",
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "source": {"component": COMPONENT, "host": self._host},
            }
        )  # fmt: skip
