"""The agent's part in names: whom it tells netdns of, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.fake_cluster import DEFAULT
from tests.support.fake_datapath import PaperNode, paper_node

from weft.agent.dns.publisher import Names
from weft.domain import kinds
from weft.domain.dns.names import Entry, Zone
from weft.domain.ids import EndpointKey, TenantName
from weft.domain.store_types import Change, Event, Listing
from weft.lab.waiting import until
from weft.ports.store import Compare, Revision, Write
from weft.runtime.dns_control import Entries, FullSync, Message, Report, Tenant, decode_message, encode, read_body
from weft.runtime.store.mirror import EVERYTHING
from weft.runtime.tasks import background

GONE = TenantName("gone")


class Listener:
    """Stands in for netdns: it agrees to everything and remembers what it was told last of each tenant."""

    def __init__(self, door: Path) -> None:
        self.door = door
        # At first what an agent before ours has said.
        self.zones: dict[TenantName, dict[str, Entry]] = {GONE: {}}
        self.told: list[Message] = []
        self.resolvers = ("192.0.2.53",)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._converse, self.door):
            yield

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self._take_in(decode_message(await read_body(reader)))
                writer.write(encode(Report(serving=tuple(self.zones), resolvers=self.resolvers)))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    def _take_in(self, message: Message) -> None:
        self.told.append(message)
        match message:
            case FullSync():
                self.zones = {tenant: dict(zone.entries) for tenant, zone in message.zones.items()}
            case Tenant(tenant, Zone() as zone):
                self.zones[tenant] = dict(zone.entries)
            case Tenant(tenant):
                self.zones.pop(tenant, None)
            case Entries(tenant, put, drop):
                self.zones[tenant] |= put
                for owner in drop:
                    self.zones[tenant].pop(owner, None)

    def dns_egress_denied(self) -> set[str]:
        return {
            address for zone in self.zones.values() for entry in zone.values() for address in entry.dns_egress_denied
        }


@pytest.fixture
async def listener(tmp_path: Path) -> AsyncIterator[Listener]:
    listener = Listener(tmp_path / "dns.sock")
    async with listener.listening():
        yield listener


@pytest.fixture
async def node() -> AsyncIterator[PaperNode]:
    async with paper_node() as node:
        yield node


@pytest.fixture
def names(node: PaperNode, listener: Listener) -> Names:
    """Between the node's mirror and its evictions, as in the agent."""
    names = Names(
        node.evictions,
        socket=listener.door,
        cluster=node.cluster,
        node=node.holdings.node,
        policies=node.reconciler.policies.by_tenant,
    )
    node.reconciler.spaces = names
    node.mirror._sink = names
    return names


def owners(listener: Listener) -> set[str]:
    return set(listener.zones.get(DEFAULT, ()))


async def test_netdns_leaves_the_spaces_of_an_agent_before_us_that_are_to_go(
    node: PaperNode, names: Names, listener: Listener
) -> None:
    await node.reconciler.converge()
    assert listener.told[1:] == [Tenant(GONE)]
    assert not names.follows


async def test_names_follow_attachments_and_the_last_one_takes_the_tenant_along(
    node: PaperNode, names: Names, listener: Listener
) -> None:
    await node.reconciler.converge()
    async with background(names.run(), name="names"):
        await until(lambda: names.follows)
        await node.call("ADD", "c1")
        await until(lambda: owners(listener) == {"endpoint:default-net:c1"})
        await node.call("ADD", "c2")
        await until(lambda: owners(listener) == {"endpoint:default-net:c1", "endpoint:default-net:c2"})
        await node.call("DEL", "c1")
        await until(lambda: owners(listener) == {"endpoint:default-net:c2"})
        await node.call("DEL", "c2")
        await node.reconciler.converge()
        assert DEFAULT not in listener.zones


async def test_a_workload_is_told_once_and_before_the_store_knows_it(
    node: PaperNode, names: Names, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may ask at once, and whoever is not known to be kept in would be let out (CVE-2024-29018)."""
    await node.reconciler.converge()
    async with background(names.run(), name="names"):
        await until(lambda: names.follows)
        await node.call("ADD", "c0")
        await until(lambda: owners(listener) == {"endpoint:default-net:c0"})
        listener.told.clear()
        told = asyncio.Event()
        commit = node.store.commit

        async def held_up(compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
            await told.wait()
            return await commit(compares, writes)

        monkeypatch.setattr(node.store, "commit", held_up)
        await node.call("ADD", "c1")
        await until(lambda: "endpoint:default-net:c1" in owners(listener))
        assert node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is None
        told.set()
        await until(lambda: node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is not None)
        await node.call("ADD", "c2")
        await until(lambda: "endpoint:default-net:c2" in owners(listener))
        changes = [each for each in listener.told if isinstance(each, Entries)]
        assert [sorted(each.put) for each in changes] == [["endpoint:default-net:c1"], ["endpoint:default-net:c2"]]


async def test_who_may_ask_outside_follows_its_rules_cve_2024_29018(
    node: PaperNode, names: Names, listener: Listener
) -> None:
    await node.reconciler.converge()
    async with background(names.run(), name="names"):
        await node.call("ADD", "c1")
        await until(lambda: bool(owners(listener)) and not listener.dns_egress_denied())
        await until(lambda: node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is not None)
        stored = node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1")
        assert stored is not None
        node.reconciler.policies.by_tenant[DEFAULT].engine.remove_endpoint(EndpointKey(*stored.value.key))
        names.apply(Change(99, (Event(kinds.POLICY.store_key("default", "p"), None),)))
        await until(lambda: listener.dns_egress_denied() == {stored.value.ip_address})


async def test_after_a_new_listing_all_is_told_when_the_rules_are_known(
    node: PaperNode, names: Names, listener: Listener
) -> None:
    await node.reconciler.converge()
    async with background(names.run(), name="names"):
        await node.call("ADD", "c1")
        await until(lambda: bool(owners(listener)) and not listener.dns_egress_denied())
        listing = await node.store.list(EVERYTHING)
        listener.told.clear()
        names.replace(Listing(listing.entries, listing.revision))
        await node.reconciler.refresh()
        await until(lambda: any(isinstance(each, Tenant) for each in listener.told))
        assert not listener.dns_egress_denied()
