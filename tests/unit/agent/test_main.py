"""The agent as a whole, with a fake datapath and a store in memory: what it waits for, and what it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import aiohttp
from tests.support.fake_datapath import FakeDatapath

from weft.adapters.stores.memory import MemoryStore
from weft.agent.dataplane.executor import datapath_thread
from weft.agent.main import Agent
from weft.agent.settings import read_agent_settings
from weft.agent.store.attachment_store import AttachmentWal
from weft.domain import kinds, model
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.domain.lifecycle.store_format import FORMAT
from weft.domain.store_types import Delete, Put
from weft.domain.transaction import put
from weft.lab.servers.processes import free_port
from weft.lab.waiting import eventually
from weft.ports.datapath import Datapath
from weft.runtime.tasks import background

GLOBAL = kinds.GLOBAL.store_key("global")


@contextmanager
def fake() -> Iterator[Datapath]:
    yield cast("Datapath", FakeDatapath())


class Rest:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}{path}") as answer:
            return await answer.text()

    async def reasons(self) -> list[str]:
        try:
            return list(json.loads(await self.get("/readyz"))["reasons"])
        except aiohttp.ClientConnectionError:
            return ["it does not listen yet"]


@asynccontextmanager
async def running_agent(store: MemoryStore, directory: Path) -> AsyncIterator[Rest]:
    port = free_port()
    settings = read_agent_settings(
        [
            "--host-label", "one", "--ctrl-ip", "10.9.8.7", "--vtep-ip", "10.9.8.7", "--dns-socket", "none",
            "--run-dir", str(directory), "--data-dir", str(directory), "--cni-socket", str(directory / "cni.sock"),
            "--rest-address", f"127.0.0.1:{port}",
        ],
        {},
    )  # fmt: skip
    log = AttachmentWal(directory / "log", boot="boot")
    async with datapath_thread(fake) as executor:
        agent = Agent(settings, store, log, executor, mtu=1500, pods=None)
        async with background(agent.run(asyncio.Event()), name="agent"):
            yield Rest(port)
    log.close()


async def test_H2_unreadable_global_settings_are_not_the_defaults(tmp_path: Path) -> None:
    """In a cluster in bridge mode the defaults would rebuild every port in routing mode."""
    async with MemoryStore() as store:
        bridge = put(kinds.GLOBAL, model.Global(fwd_mode="bridge"))
        await store.commit([], [Put(kinds.FORMAT_KEY, str(FORMAT).encode()), Put(GLOBAL, b"garbage")])
        async with running_agent(store, tmp_path) as rest:
            reasons = await eventually(rest.reasons, lambda found: any("globals/global" in each for each in found))
            assert any("netctl global set" in each for each in reasons)
            await store.commit([], [bridge])
            await eventually(rest.reasons, lambda found: found == [])
            # Later garbage leaves the last good value in place.
            await store.commit([], [Put(GLOBAL, b"garbage")])
            assert await rest.reasons() == []


async def test_H3_endpoints_without_block_or_claim_are_counted_and_shown(tmp_path: Path) -> None:
    async with MemoryStore() as store:
        forged = model.Endpoint(
            tenant=TenantName("default"),
            network=NetworkName("blue"),
            endpoint_id=EndpointId("evil"),
            ip_address="10.1.1.5",
            host="mallory",
        )
        await store.commit([], [Put(kinds.FORMAT_KEY, str(FORMAT).encode()), put(kinds.ENDPOINT, forged)])
        async with running_agent(store, tmp_path) as rest:
            await eventually(rest.reasons, lambda found: found == [])
            assert "weft_agent_uncovered_endpoints 1.0" in await rest.get("/metrics")
            assert json.loads(await rest.get("/inspect/driver"))["uncoveredEndpoints"] == ["default:blue:evil"]
            await store.commit([], [Delete(kinds.ENDPOINT.store_key(*forged.key))])
            await eventually(lambda: rest.get("/metrics"), lambda text: "weft_agent_uncovered_endpoints 0.0" in text)
