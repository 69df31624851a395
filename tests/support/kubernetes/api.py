"""A client of kube-apiserver for tests: paths and JSON documents, as the server's own reference has them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from weft.lab.servers.certificates import Certificate
from weft.lab.waiting import DEADLINE

_MERGE = "application/merge-patch+json"


class Api:
    """A client of one server as one user. An error of the server is an `AssertionError` with its reason."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def is_ready(self) -> bool:
        """Whether the server reports that it is ready."""
        async with self._session.get("/readyz") as answer:
            return answer.status == 200

    async def get(self, path: str) -> Any:
        """An object or a list, which must exist."""
        return await self._send("GET", path)

    async def items(self, path: str) -> list[Any]:
        """The items of a list."""
        items: list[Any] = (await self.get(path))["items"]
        return items

    async def find(self, path: str) -> Any | None:
        """An object, or None where there is none."""
        async with self._session.get(path) as answer:
            if answer.status == 404:
                return None
            return await _accepted(answer)

    async def create(self, path: str, document: Mapping[str, object]) -> Any:
        """Create an object in the list at a path."""
        return await self._send("POST", path, json=document)

    async def patch(self, path: str, change: Mapping[str, object]) -> Any:
        """Change members of an object; None removes one."""
        return await self._send("PATCH", path, json=change, headers={"Content-Type": _MERGE})

    async def delete(self, path: str) -> None:
        """Delete an object; a missing one is fine."""
        async with self._session.delete(path) as answer:
            if answer.status != 404:
                await _accepted(answer)

    async def _send(self, method: str, path: str, **what: Any) -> Any:
        async with self._session.request(method, path, **what) as answer:
            return await _accepted(answer)


async def _accepted(answer: aiohttp.ClientResponse) -> Any:
    assert answer.ok, f"{answer.method} {answer.url.path}: {answer.status} {await answer.text()}"
    return await answer.json()


@asynccontextmanager
async def open_api(url: str, user: Certificate) -> AsyncIterator[Api]:
    """A client with a certificate and a deadline for every request."""
    context = ssl.create_default_context(cafile=str(user.ca))
    context.load_cert_chain(user.cert, user.key)
    connector = aiohttp.TCPConnector(ssl=context)
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        yield Api(session)
