"""Node enrollment with tokens of a real API server, with exactly the RBAC of the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.kubernetes.api import Api
from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.manifests import token_of

from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.netmaster_discovery import AUDIENCE, CONFIG_MAP, KubeDiscovery
from weft.adapters.stores.memory import MemoryStore
from weft.agent.store.node_certificate import NodeCertificate
from weft.domain.errors import Conflict, Denied
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import Put
from weft.drivers import open_store
from weft.lab.servers.processes import free_port
from weft.lab.waiting import eventually
from weft.master.nodes.enrollment import serving_enrollment
from weft.master.nodes.store_server import serving_store
from weft.ports.orchestrator import NetmasterEndpoint
from weft.ports.store import Store
from weft.runtime.tasks import background

AGENTS = "/api/v1/namespaces/kube-system/pods"


class EnrollmentTestbed:
    """A netmaster with node enrollment, and agents' pods on nodes."""

    def __init__(self, kube: ApiServer, admin: Api, directory: Path) -> None:
        self._kube = kube
        self.admin = admin
        self._directory = directory
        self._memberships = 0

    async def discovery_as(self, account: str) -> KubeDiscovery:
        token = await token_of(self.admin, account)
        return KubeDiscovery(ClientConfig(servers=(self._kube.url,), ca=self._kube.authority.ca, token=token))

    @asynccontextmanager
    async def netmaster(self, name: str, *, life: float = 3600.0, join_host: str = "127.0.0.1") -> AsyncIterator[Store]:
        """Run a netmaster with its data in the directory of this name, and return its store."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        store, join = ("127.0.0.1", free_port()), (join_host, free_port())
        discovery = await self.discovery_as("weft-netmaster")
        async with (
            serving_enrollment(discovery, directory=directory, store=store, join=join, life=life) as tls,
            MemoryStore() as master_store,
            serving_store(master_store, addresses=(store,), tls=tls),
        ):
            yield master_store

    async def agent(self, node: str) -> str:
        """The token that the kubelet of a node mounts into the agent's pod."""
        spec = {
            "nodeName": node,
            "containers": [{"name": "c", "image": "none"}],
            "serviceAccountName": "weft-netplugin",
        }
        await self.admin.create(AGENTS, {"metadata": {"name": f"agent-{node}"}, "spec": spec})
        return await token_of(self.admin, "weft-netplugin", pod=f"agent-{node}", scope=AUDIENCE)

    @asynccontextmanager
    async def node_certificate(self, node: str, *, token: str, again: bool = False) -> AsyncIterator[NodeCertificate]:
        """In a new directory, or `again` in that of the previous one."""
        self._memberships += not again
        directory = self._directory / f"membership-{self._memberships}"
        file = self._directory / f"token-{self._memberships}"
        file.write_text(token)
        async with await self.discovery_as("weft-netplugin") as discovery:
            yield NodeCertificate(directory, node=NodeName(node), discovery=discovery, token=file)

    async def published_endpoint(self) -> NetmasterEndpoint:
        """Wait for the published endpoint."""
        async with await self.discovery_as("weft-netplugin") as discovery:
            published = await eventually(discovery.read, lambda endpoint: endpoint is not None)
        assert published is not None
        return published

    def pair(self) -> bytes:
        """Key and certificate of the node that enrolled last."""
        return (self._directory / f"membership-{self._memberships}" / "node.pem").read_bytes()


@pytest.fixture
async def testbed(kube: ApiServer, tmp_path: Path) -> AsyncIterator[EnrollmentTestbed]:
    async with kube.client() as admin:
        yield EnrollmentTestbed(kube, admin, tmp_path)
        for pod in await admin.items(AGENTS):
            await admin.delete(f"{AGENTS}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        await admin.patch(CONFIG_MAP, {"data": None})


@asynccontextmanager
async def enrolled_node(testbed: EnrollmentTestbed, node: str) -> AsyncIterator[tuple[Store, NodeCertificate]]:
    """The store, as an enrolled node sees it."""
    async with AsyncExitStack() as stack:
        node_certificate = await stack.enter_async_context(
            testbed.node_certificate(node, token=await testbed.agent(node))
        )
        found = await node_certificate.obtain(asyncio.Event())
        assert found is not None
        yield await stack.enter_async_context(open_store(found)), node_certificate


async def write(store: Store, key: str) -> None:
    await store.commit([], [Put(StoreKey(key), b"here")])


async def test_a_node_writes_only_what_it_owns(testbed: EnrollmentTestbed) -> None:
    """The API server names the node in the certificate, not the agent."""
    async with testbed.netmaster("m") as master_store, enrolled_node(testbed, "one") as (store, _):
        await write(store, "status/nodes/one/x")
        with pytest.raises(Denied):
            await write(store, "status/nodes/two/x")
        assert await master_store.read(StoreKey("status/nodes/one/x")) is not None
        assert await master_store.read(StoreKey("status/nodes/two/x")) is None


async def test_a_node_with_a_name_longer_than_a_common_name_enrolls(testbed: EnrollmentTestbed) -> None:
    """Node names have up to 253 characters in Kubernetes; the common name of a certificate has 64."""
    node = ".".join(["a" * 60] * 3)
    async with testbed.netmaster("m") as master_store, enrolled_node(testbed, node) as (store, _):
        await write(store, f"status/nodes/{node}/x")
        with pytest.raises(Denied):
            await write(store, f"status/nodes/{node[:64]}/x")
        assert await master_store.read(StoreKey(f"status/nodes/{node}/x")) is not None


async def test_enrollment_at_another_address_than_the_store(testbed: EnrollmentTestbed) -> None:
    async with testbed.netmaster("m", join_host="127.0.0.2"), enrolled_node(testbed, "one") as (store, _):
        assert "127.0.0.2" in (await testbed.published_endpoint()).join
        await write(store, "status/nodes/one/x")


async def test_an_agent_with_another_host_name_is_denied_with_the_right_one(testbed: EnrollmentTestbed) -> None:
    """It gets no certificate, even if it had one before; with the right name it enrolls."""
    token = await testbed.agent("one")
    async with testbed.netmaster("m"), testbed.node_certificate("two", token=token) as node_certificate:
        with pytest.raises(Denied, match=r"node 'one'.* called 'two': start it with --host=one"):
            await node_certificate.enroll(await testbed.published_endpoint())
        with pytest.raises(FileNotFoundError):
            testbed.pair()
        async with testbed.node_certificate("one", token=token) as named:
            await named.enroll(await testbed.published_endpoint())
        before = testbed.pair()
        async with testbed.node_certificate("two", token=token, again=True) as renamed:
            stop = asyncio.Event()
            stop.set()
            assert await renamed.obtain(stop) is None
        assert testbed.pair() == before


async def test_certificates_are_renewed_while_the_store_is_used(testbed: EnrollmentTestbed) -> None:
    """Those of netmaster and of the node, several times, without a restart."""
    async with (
        testbed.netmaster("m", life=5.0),
        enrolled_node(testbed, "one") as (store, node_certificate),
        background(node_certificate.renew_forever(), name="membership"),
    ):
        pairs = {testbed.pair()}
        count = 0
        while len(pairs) < 3:
            count += 1
            await write(store, f"status/nodes/one/{count}")
            await asyncio.sleep(0.05)  # a rate limit: the loop writes until the certificates were renewed twice
            pairs.add(testbed.pair())
        found = await node_certificate.obtain(asyncio.Event())
        assert found is not None
        async with open_store(found) as reopened:
            await write(reopened, "status/nodes/one/reopened")


async def test_other_tokens_are_denied_with_the_reason(testbed: EnrollmentTestbed) -> None:
    """Invalid, of another account, for another audience, without a pod, of a deleted pod."""
    revoked = await testbed.agent("deleted")
    await testbed.admin.delete(f"{AGENTS}/agent-deleted?gracePeriodSeconds=0")
    cases = {
        "nonsense": "does not accept",
        await token_of(testbed.admin, "weft-netmaster", scope=AUDIENCE): "nodes join as",
        await token_of(testbed.admin, "weft-netplugin"): "does not accept",
        await token_of(testbed.admin, "weft-netplugin", scope=AUDIENCE): "not bound to a node",
        revoked: "does not accept",
    }
    async with testbed.netmaster("m"):
        for token, reason in cases.items():
            async with testbed.node_certificate("one", token=token) as node_certificate:
                with pytest.raises(Denied, match=reason):
                    await node_certificate.enroll(await testbed.published_endpoint())
                with pytest.raises(FileNotFoundError):
                    testbed.pair()


async def test_agents_reconnect_to_a_moved_netmaster(testbed: EnrollmentTestbed) -> None:
    """It has the same CA at another address; the agent notices the change and reconnects with the new files."""
    async with AsyncExitStack() as stack:
        async with testbed.netmaster("m"):
            _, node_certificate = await stack.enter_async_context(enrolled_node(testbed, "one"))
        await stack.enter_async_context(testbed.netmaster("m"))
        await eventually(node_certificate.renew_if_due, bool)
        found = await node_certificate.obtain(asyncio.Event())
        assert found is not None
        async with open_store(found) as store:
            await write(store, "status/nodes/one/x")


async def test_a_netmaster_with_another_store_does_not_take_over_the_agents(testbed: EnrollmentTestbed) -> None:
    """On the wrong machine its store is empty, and the agents would lose their endpoints."""
    async with testbed.netmaster("m"):
        await testbed.published_endpoint()
    with pytest.raises(Conflict, match="copy its data directory here"):
        async with testbed.netmaster("elsewhere"):
            await asyncio.Event().wait()
