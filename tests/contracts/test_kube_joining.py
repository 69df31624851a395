"""Nodes join by the tokens of their agents, judged by a real API server with the rights that we ship and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.kubernetes.api import Api
from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.manifests import token_of

from weft.adapters.kubernetes.credentials import Access
from weft.adapters.kubernetes.netmaster_discovery import AUDIENCE, CONFIG_MAP, ClusterMeeting
from weft.adapters.stores.memory import MemoryStore
from weft.agent.store.node_certificate import NodeCertificate
from weft.domain.errors import Conflict, Denied
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import Put
from weft.drivers import open_store
from weft.lab.servers.processes import free_port
from weft.lab.waiting import eventually
from weft.master.nodes.enrollment import joining
from weft.master.nodes.store_server import serving_store
from weft.ports.orchestrator import NetmasterEndpoint
from weft.ports.store import Store
from weft.runtime.tasks import background

AGENTS = "/api/v1/namespaces/kube-system/pods"


class Town:
    """A netmaster that lets nodes join, and agents' pods on nodes."""

    def __init__(self, kube: ApiServer, admin: Api, directory: Path) -> None:
        self._kube = kube
        self.admin = admin
        self._directory = directory
        self._memberships = 0

    async def meeting_as(self, account: str) -> ClusterMeeting:
        token = await token_of(self.admin, account)
        return ClusterMeeting(Access(servers=(self._kube.url,), ca=self._kube.authority.ca, token=token))

    @asynccontextmanager
    async def netmaster(self, name: str, *, life: float = 3600.0, join_host: str = "127.0.0.1") -> AsyncIterator[Store]:
        """Its store; the directory of this name is its disk."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        store, join = ("127.0.0.1", free_port()), (join_host, free_port())
        meeting = await self.meeting_as("weft-netmaster")
        async with (
            joining(meeting, directory=directory, store=store, join=join, life=life) as tls,
            MemoryStore() as kept,
            serving_store(kept, addresses=(store,), tls=tls),
        ):
            yield kept

    async def agent(self, node: str) -> str:
        """The token that the kubelet of a node hands to the agent there."""
        spec = {
            "nodeName": node,
            "containers": [{"name": "c", "image": "none"}],
            "serviceAccountName": "weft-netplugin",
        }
        await self.admin.create(AGENTS, {"metadata": {"name": f"agent-{node}"}, "spec": spec})
        return await token_of(self.admin, "weft-netplugin", pod=f"agent-{node}", scope=AUDIENCE)

    @asynccontextmanager
    async def membership(self, node: str, *, token: str, again: bool = False) -> AsyncIterator[NodeCertificate]:
        """On a disk of its own, or again on that of the one before."""
        self._memberships += not again
        directory = self._directory / f"membership-{self._memberships}"
        file = self._directory / f"token-{self._memberships}"
        file.write_text(token)
        async with await self.meeting_as("weft-netplugin") as meeting:
            yield NodeCertificate(directory, node=NodeName(node), meeting=meeting, token=file)

    async def notice(self) -> NetmasterEndpoint:
        """What agents are told, once they are."""
        async with await self.meeting_as("weft-netplugin") as meeting:
            told = await eventually(meeting.read, lambda notice: notice is not None)
        assert told is not None
        return told

    def pair(self) -> bytes:
        """Key and certificate of the node that joined last."""
        return (self._directory / f"membership-{self._memberships}" / "node.pem").read_bytes()


@pytest.fixture
async def town(kube: ApiServer, tmp_path: Path) -> AsyncIterator[Town]:
    async with kube.client() as admin:
        yield Town(kube, admin, tmp_path)
        for pod in await admin.items(AGENTS):
            await admin.delete(f"{AGENTS}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        await admin.patch(CONFIG_MAP, {"data": None})


@asynccontextmanager
async def joined(town: Town, node: str) -> AsyncIterator[tuple[Store, NodeCertificate]]:
    """The store as a node that has joined sees it."""
    async with AsyncExitStack() as stack:
        membership = await stack.enter_async_context(town.membership(node, token=await town.agent(node)))
        found = await membership.begin(asyncio.Event())
        assert found is not None
        yield await stack.enter_async_context(open_store(found)), membership


async def write(store: Store, key: str) -> None:
    await store.commit([], [Put(StoreKey(key), b"here")])


async def test_a_node_writes_what_is_its_own_and_nothing_else(town: Town) -> None:
    """Whose certificate it has is said by the API server, and not by the node."""
    async with town.netmaster("m") as kept, joined(town, "one") as (store, _):
        await write(store, "status/nodes/one/x")
        with pytest.raises(Denied):
            await write(store, "status/nodes/two/x")
        assert await kept.read(StoreKey("status/nodes/one/x")) is not None
        assert await kept.read(StoreKey("status/nodes/two/x")) is None


async def test_a_node_joins_by_a_name_longer_than_a_common_name(town: Town) -> None:
    """Kubernetes lets nodes have names of 253 characters; the common name of a certificate has 64."""
    node = ".".join(["a" * 60] * 3)
    async with town.netmaster("m") as kept, joined(town, node) as (store, _):
        await write(store, f"status/nodes/{node}/x")
        with pytest.raises(Denied):
            await write(store, f"status/nodes/{node[:64]}/x")
        assert await kept.read(StoreKey(f"status/nodes/{node}/x")) is not None


async def test_nodes_join_at_another_address_than_the_stores(town: Town) -> None:
    async with town.netmaster("m", join_host="127.0.0.2"), joined(town, "one") as (store, _):
        assert "127.0.0.2" in (await town.notice()).join
        await write(store, "status/nodes/one/x")


async def test_an_agent_that_calls_itself_otherwise_is_told_its_name(town: Town) -> None:
    """It gets no certificate, also where it had one of its own name before; by its right name it joins."""
    token = await town.agent("one")
    async with town.netmaster("m"), town.membership("two", token=token) as membership:
        with pytest.raises(Denied, match=r"node 'one'.* called 'two': start it with --host=one"):
            await membership.join(await town.notice())
        with pytest.raises(FileNotFoundError):
            town.pair()
        async with town.membership("one", token=token) as named:
            await named.join(await town.notice())
        before = town.pair()
        async with town.membership("two", token=token, again=True) as renamed:
            stop = asyncio.Event()
            stop.set()
            assert await renamed.begin(stop) is None
        assert town.pair() == before


async def test_certificates_are_renewed_while_the_store_is_used(town: Town) -> None:
    """Netmaster's and the node's own, several times, and nobody starts anything anew."""
    async with (
        town.netmaster("m", life=5.0),
        joined(town, "one") as (store, membership),
        background(membership.keep(), name="membership"),
    ):
        seen = {town.pair()}
        count = 0
        while len(seen) < 3:
            count += 1
            await write(store, f"status/nodes/one/{count}")
            await asyncio.sleep(0.05)
            seen.add(town.pair())
        found = await membership.begin(asyncio.Event())
        assert found is not None
        async with open_store(found) as anew:
            await write(anew, "status/nodes/one/anew")


async def test_tokens_of_others_are_refused_with_the_reason(town: Town) -> None:
    """Wrong, of another account, for another audience, of no pod, of a pod that is gone."""
    revoked = await town.agent("gone")
    await town.admin.delete(f"{AGENTS}/agent-gone?gracePeriodSeconds=0")
    cases = {
        "nonsense": "does not accept",
        await token_of(town.admin, "weft-netmaster", scope=AUDIENCE): "nodes join as",
        await token_of(town.admin, "weft-netplugin"): "does not accept",
        await token_of(town.admin, "weft-netplugin", scope=AUDIENCE): "of no pod on a node",
        revoked: "does not accept",
    }
    async with town.netmaster("m"):
        for token, reason in cases.items():
            async with town.membership("one", token=token) as membership:
                with pytest.raises(Denied, match=reason):
                    await membership.join(await town.notice())
                with pytest.raises(FileNotFoundError):
                    town.pair()


async def test_agents_follow_a_netmaster_that_moves(town: Town) -> None:
    """It has the same authority elsewhere; the agent hears of it, and starts anew with what the files say."""
    async with AsyncExitStack() as stack:
        async with town.netmaster("m"):
            _, membership = await stack.enter_async_context(joined(town, "one"))
        await stack.enter_async_context(town.netmaster("m"))
        await eventually(membership.look, bool)
        found = await membership.begin(asyncio.Event())
        assert found is not None
        async with open_store(found) as store:
            await write(store, "status/nodes/one/x")


async def test_a_netmaster_with_another_store_leaves_the_agents_where_they_are(town: Town) -> None:
    """Started on the wrong machine it has nothing of theirs, and would have them begin anew."""
    async with town.netmaster("m"):
        await town.notice()
    with pytest.raises(Conflict, match="bring its directory here"):
        async with town.netmaster("elsewhere"):
            await asyncio.Event().wait()
