"""What went wrong with a pod, told to whoever asks `kubectl describe`: Events of the core API.

Telling is never waited for and never in the way: it happens beside the work, the same words about the same pod are one
Event that counts, and while the API server is away they are forgotten.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from datetime import UTC, datetime

import msgspec

from weft.adapters.kubernetes.api import Api
from weft.domain.errors import Conflict, WeftError
from weft.ports.orchestrator import PodRef
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("kubernetes")

COMPONENT = "weft"
_QUEUE = 100
"""So many may wait to be told; more than that are left out."""
_REMEMBERED = 500
_LONGEST = 1000
"""Kubernetes takes at most 1,024 characters of a message."""


class Events:
    """`tell` takes what happened; `run` tells it to the API server, for ever."""

    def __init__(self, api: Api, *, node: str) -> None:
        self._api = api
        self._node = node
        self._waiting: asyncio.Queue[tuple[PodRef, str, str]] = asyncio.Queue(_QUEUE)
        self._counts: OrderedDict[str, int] = OrderedDict()

    def tell(self, pod: PodRef, *, reason: str, message: str) -> None:
        """Something went wrong with a pod. `reason` is one word in camel case."""
        if not self._waiting.full():
            self._waiting.put_nowait((pod, reason, message[:_LONGEST]))

    async def run(self) -> None:
        """Tell for ever."""
        pace = Backoff(first=0.1, cap=0.1)  # a node in trouble must not add to the API server's
        while True:
            pod, reason, message = await self._waiting.get()
            try:
                await self._write(pod, reason, message)
            except WeftError as error:
                log.warning("event not told", pod=f"{pod.namespace}/{pod.name}", reason=error.message)
            await pace.pause()

    async def _write(self, pod: PodRef, reason: str, message: str) -> None:
        mark = zlib.crc32(f"{self._node} {pod.uid} {reason} {message}".encode())
        name = f"{pod.name[:230]}.{mark:08x}"
        folder = f"/api/v1/namespaces/{pod.namespace}/events"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count = self._counts.pop(name, 0) + 1
        if count == 1:
            try:
                await self._api.post(folder, self._event(pod, reason, message, name=name, now=now))
            except Conflict:
                count = 2  # told before we were started
        if count > 1:
            await self._api.merge(f"{folder}/{name}", msgspec.json.encode({"count": count, "lastTimestamp": now}))
        self._counts[name] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    def _event(self, pod: PodRef, reason: str, message: str, *, name: str, now: str) -> bytes:
        return msgspec.json.encode(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": name, "namespace": pod.namespace},
                "involvedObject": {
                    "apiVersion": "v1", "kind": "Pod",
                    "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
                },
                "reason": reason,
                "message": message,
                "type": "Warning",
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "source": {"component": COMPONENT, "host": self._node},
            }
        )  # fmt: skip
