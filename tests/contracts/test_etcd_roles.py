"""`weft etcd-roles` on a real etcd with authentication: an agent can do its work and write nothing of others (H2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.agents import ReferenceAgent

from weft.adapters.stores.etcd import EtcdStore, open_store
from weft.cli import main
from weft.domain import codec, kinds, model
from weft.domain.errors import Denied
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, NodeName, PolicyName, StoreKey, TenantName
from weft.domain.store_types import Delete, DeleteAll, Write
from weft.domain.transaction import put
from weft.lab.servers.etcd import Etcd, enable_authentication, running_etcd
from weft.lab.waiting import eventually, soon, until
from weft.ports.store import Put
from weft.runtime.tasks import background

TENANT, NETWORK = TenantName("default"), NetworkName("blue")
LARGE = model.Network(tenant=TENANT, name=NETWORK, encap="vxlan", subnet="10.1.0.0/16", gateway="10.1.0.1")


class Cluster:
    """An etcd with the roles of two nodes and of netmaster."""

    def __init__(self, etcd: Etcd, directory: Path) -> None:
        self.etcd = etcd
        self.passwords = directory / "passwords"
        self.root_password = directory / "root"
        self.root_password.write_text("secret")

    async def make_roles(self, *flags: str) -> int:
        argv = ["etcd-roles", "--etcd-endpoints", ",".join(self.etcd.endpoints), "--password-dir", str(self.passwords)]
        return await asyncio.to_thread(main, [*argv, *flags])

    def store(self, user: str) -> EtcdStore:
        return open_store(self.etcd.endpoints, user=user, password=(self.passwords / user).read_text().strip())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("roles")
    async with running_etcd(directory / "etcd") as etcd:
        made = Cluster(etcd, directory)
        # Before authentication is enabled, as an operator would.
        assert await made.make_roles("--netmaster", "n1", "n10") == 0
        await enable_authentication(etcd.endpoints[0], user="admin", password="secret")
        async with made.store("weft-netmaster") as store:
            await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        yield made


def key_of(name: str) -> EndpointKey:
    return EndpointKey(TENANT, NETWORK, EndpointId(name))


async def test_H2_an_agent_works_with_its_role(cluster: Cluster) -> None:
    """It registers, takes a block, claims an address, publishes and withdraws."""
    async with cluster.store("weft-node-n1") as store:
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.connected)
            await soon(agent.attach(key_of("dynamic")))
            await soon(agent.attach(key_of("static"), address="10.1.0.9"))

            async def published() -> int:
                return len((await store.list(kinds.ENDPOINT.store_prefix())).entries)

            await eventually(published, lambda count: count == 2)
            assert (await store.list(kinds.blocks_of(TENANT, NETWORK))).entries
            assert (await store.list(kinds.address_claims(TENANT, NETWORK))).entries
            await soon(agent.detach(key_of("dynamic")))
            await soon(agent.detach(key_of("static")))
            await eventually(published, lambda count: count == 0)
            assert agent.refusal == ""
        await store.commit([], [Put(kinds.applied_key("n1"), codec.encode(model.SyncStatus(revision=1)))])
        await store.commit([], [DeleteAll(kinds.status_prefix("n1"))])


FORBIDDEN: list[Write] = [
    put(kinds.TENANT, model.Tenant(name=TenantName("mallory"))),
    Delete(kinds.NETWORK.store_key(TENANT, NETWORK)),
    put(kinds.POLICY, model.Policy(tenant=TENANT, name=PolicyName("open"))),
    put(kinds.GLOBAL, model.Global()),
    put(kinds.NODE, model.Node(name=NodeName("n10"))),
    Put(kinds.alive_node("n10"), b"{}"),
    Put(kinds.applied_key("n10"), b"{}"),
    DeleteAll(StoreKey("status/nodes/n1")),
    Put(StoreKey(f"{kinds.number_claims('vni')}1"), b"{}"),
    Put(kinds.alive_master("10.0.0.1:9999"), b"{}"),
    Put(kinds.LEADER_KEY, b"mallory"),
    Put(kinds.RESTORE_KEY, b"{}"),
    Put(kinds.FORMAT_KEY, b"9"),
    Put(kinds.SYNC_REQUEST_KEY, b""),
    Put(StoreKey("kube-policies/default/deny"), b"{}"),
    DeleteAll(StoreKey("")),
]


@pytest.mark.parametrize("write", FORBIDDEN, ids=lambda write: getattr(write, "key", None) or f"all {write.prefix}")
async def test_H2_a_node_writes_nothing_of_others(cluster: Cluster, write: Write) -> None:
    async with cluster.store("weft-node-n1") as store:
        with pytest.raises(Denied):
            await store.commit([], [write])


async def test_H2_a_denied_commit_costs_only_itself(cluster: Cluster) -> None:
    """Commits of the same moment share a transaction, which etcd denies as a whole."""
    async with cluster.store("weft-node-n1") as store:
        own = [Put(StoreKey(f"{kinds.status_prefix('n1')}{number}"), b"") for number in range(8)]
        writes: list[Write] = [*own, FORBIDDEN[0]]
        done = await asyncio.gather(*(store.commit([], [each]) for each in writes), return_exceptions=True)
        assert [isinstance(each, int) for each in done[:-1]] == [True] * len(own)
        assert isinstance(done[-1], Denied)


async def test_H2_a_node_writes_nothing_outside_weft(cluster: Cluster) -> None:
    user = "weft-node-n1"
    password = (cluster.passwords / user).read_text().strip()
    async with open_store(cluster.etcd.endpoints, root="/registry/", user=user, password=password) as store:
        with pytest.raises(Denied):
            await store.commit([], [Put(StoreKey("pods"), b"")])
        with pytest.raises(Denied):
            await store.read(StoreKey("pods"))


async def test_a_second_run_changes_nothing_and_corrects_a_role(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    as_root = ("--etcd-password-file", str(cluster.root_password))
    before = (cluster.passwords / "weft-node-n10").read_text()
    assert await cluster.make_roles(*as_root, "n10") == 0
    assert "weft-node-n10: unchanged" in capsys.readouterr().out
    async with open_store(cluster.etcd.endpoints, user="root", password="secret") as root:
        await root.roles.put_role("weft-node-n10", writes=[StoreKey("tenants/")])
    capsys.readouterr()
    assert await cluster.make_roles(*as_root, "n10") == 0
    shown = capsys.readouterr().out
    assert "revoked from weft-node-n10 WRITE /weft/tenants/*" in shown
    assert "granted weft-node-n10 WRITE /weft/nodes/n10" in shown
    assert (cluster.passwords / "weft-node-n10").read_text() == before
    assert (cluster.passwords / "weft-node-n10").stat().st_mode & 0o777 == 0o600
    async with cluster.store("weft-node-n10") as store:
        await store.commit([], [put(kinds.NODE, model.Node(name=NodeName("n10")))])
        with pytest.raises(Denied):
            await store.commit([], [put(kinds.TENANT, model.Tenant(name=TenantName("mallory")))])


async def test_what_it_refuses(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await cluster.make_roles("n3") == 2, "without root's password"
    assert await cluster.make_roles() == 2, "without a node"
    assert await cluster.make_roles("../n3") == 2
    assert await cluster.make_roles("n3", "--etcd-endpoints", "http://192.0.2.1:2379") == 2
    assert "clear text" in capsys.readouterr().err
    assert not (cluster.passwords / "weft-node-n3").exists()
