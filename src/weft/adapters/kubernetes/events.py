"""What became of an object, told to whoever asks `kubectl describe` or `kubectl events`: Events of the core API.

Telling is never waited for and never in the way: it happens beside the work, the same words about the same object are
one Event that counts, and while the API server is away they are forgotten.
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
# So many may wait to be told; more than that are left out.
_QUEUE = 100
_REMEMBERED = 500
# Kubernetes takes at most 1,024 characters of a message.
_LONGEST = 1000


class Subject(NamedTuple):
    """What an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str = ""


class _Told(NamedTuple):
    subject: Subject
    reason: str
    message: str
    fault: bool


class Events:
    """`tell` takes what happened; `run` tells it to the API server, for ever."""

    def __init__(self, api: Api, *, host: str) -> None:
        """`host` is who tells: the name of a node, or of a program that is on no node."""
        self._api = api
        self._host = host
        self._waiting: asyncio.Queue[_Told] = asyncio.Queue(_QUEUE)
        self._counts: OrderedDict[str, int] = OrderedDict()

    def tell(self, subject: Subject, *, reason: str, message: str, fault: bool = True) -> None:
        """Something happened to an object, or went wrong. `reason` is one word in camel case."""
        if not self._waiting.full():
            self._waiting.put_nowait(_Told(subject, reason, message[:_LONGEST], fault))

    async def run(self) -> None:
        """Tell for ever."""
        pace = Backoff(first=0.1, cap=0.1)  # a node in trouble must not add to the API server's
        while True:
            told = await self._waiting.get()
            try:
                await self._write(told)
            except WeftError as error:
                about = f"{told.subject.kind} {told.subject.namespace}/{told.subject.name}"
                log.warning("event not told", about=about, reason=error.message)
            await pace.pause()

    async def _write(self, told: _Told) -> None:
        subject = told.subject
        mark = zlib.crc32(f"{self._host} {subject.kind} {subject.uid} {told.reason} {told.message}".encode())
        name = f"{subject.name[:230]}.{mark:08x}"
        folder = f"/api/v1/namespaces/{subject.namespace}/events"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count = self._counts.pop(name, 0) + 1
        if count == 1:
            try:
                await self._api.post(folder, self._event(told, name=name, now=now))
            except Conflict:
                count = 2  # told before we were started
        if count > 1:
            await self._api.merge(f"{folder}/{name}", msgspec.json.encode({"count": count, "lastTimestamp": now}))
        self._counts[name] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    def _event(self, told: _Told, *, name: str, now: str) -> bytes:
        subject = told.subject
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": subject.namespace},
                "involvedObject": {
                    "apiVersion": subject.api_version, "kind": subject.kind,
                    "namespace": subject.namespace, "name": subject.name, "uid": subject.uid,
                },
                "reason": told.reason,
                "message": told.message,
                "type": "Warning" if told.fault else "Normal",
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "source": {"component": COMPONENT, "host": self._host},
            }
        )  # fmt: skip
