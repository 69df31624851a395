"""A scripted API server: returns lists and watch events that a test provides, for rare behaviour of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from weft.lab.servers.processes import free_port

# A step of a script: the stream stays open, until the test ends.
HANG = object()
# A step of a script: the connection is closed.
ABORT = object()


@dataclass
class Scripted:
    """Lists and watches by path. A watch is a list of steps: events, raw bytes, `HANG` or `ABORT`."""

    url: str = ""
    # For each path the replies to lists, in turn; the last one repeats. An int is a status.
    lists: dict[str, list[Any]] = field(default_factory=dict)
    watches: dict[str, list[list[Any]]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    posted: list[tuple[str, str, Any]] = field(default_factory=list)
    accepts: Callable[[str], bool] = bool
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        token = request.headers.get("Authorization", "none")
        self.tokens.append(token)
        if not self.accepts(token):
            return status(401, "unauthorized")
        if request.method != "GET":
            body = msgspec.json.decode(await request.read())
            known = {name for _, path, each in self.posted if (name := each.get("metadata", {}).get("name"))}
            if request.method == "POST" and body["metadata"]["name"] in known:
                return status(409, "already exists")
            self.posted.append((request.method, request.path, body))
            return web.json_response({})
        if "watch" in request.query:
            return await self._watch(request)
        self.requests.append(f"list {request.path} {request.query.get('continue', '')}".strip())
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        answers = self.lists.get(request.path)
        if answers is None:
            return status(404, "not found")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return status(answer, "refused") if isinstance(answer, int) else web.json_response(answer)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"watch {request.path} from {request.query['resourceVersion']}")
        assert request.query["allowWatchBookmarks"] == "true"
        scripts = self.watches.get(request.path)
        steps = scripts.pop(0) if scripts else [HANG]
        if steps and isinstance(steps[0], int):
            return status(steps[0], str(steps[1]) if len(steps) > 1 else "refused")
        response = web.StreamResponse()
        await response.prepare(request)
        for step in steps:
            if step is HANG:
                await self._ending.wait()
            elif step is ABORT:
                assert request.transport is not None
                request.transport.close()
            else:
                await response.write(step if isinstance(step, bytes) else msgspec.json.encode(step) + b"\n")
        return response

    def end(self) -> None:
        self._ending.set()


def status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


def listing(version: int, *items: Any, rest: str = "") -> dict[str, Any]:
    """A page of a list."""
    return {"metadata": {"resourceVersion": str(version), "continue": rest}, "items": list(items)}


def event(kind: str, value: Any) -> dict[str, Any]:
    """A line of a watch."""
    return {"type": kind, "object": value}


def bookmark(version: int) -> dict[str, Any]:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


def pod(name: str, version: int = 1, *, namespace: str = "default", **members: Any) -> dict[str, Any]:
    """A pod as the API has it."""
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {
        "kind": "Pod",
        "metadata": metadata | members.pop("metadata", {}),
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "x"}]} | members,
        "status": {"phase": "Running"},
    }


@asynccontextmanager
async def scripted_server() -> AsyncIterator[Scripted]:
    """A running server with an empty script."""
    scripted = Scripted()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    async with AsyncExitStack() as stack:
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        stack.callback(scripted.end)
        scripted.url = f"http://127.0.0.1:{port}"
        yield scripted
