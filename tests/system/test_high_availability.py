"""Three netmasters on one etcd: each serves requests, and each may be killed, frozen or stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.support.address_audit import audit

from weft.lab.servers.etcd import Etcd, running_etcd
from weft.lab.servers.masters import API, MasterProcess, Rest, client, retry_until_answered
from weft.lab.waiting import DEADLINE, eventually, soon, until
from weft.master.api.leader_proxy import FORWARDED
from weft.runtime.tasks import background

BLUE = {"tenantName": "default", "networkName": "blue", "encap": "vxlan", "subnet": "10.1.0.0/16"}
NAMES = ("one", "two", "three")
# A lease that outlives every test: a takeover within a test means that the leader handed over.
PATIENT_TTL = 600.0


class Masters:
    """Several netmasters and a client of each."""

    def __init__(self, processes: dict[str, MasterProcess], clients: dict[str, Rest]) -> None:
        self.processes = processes
        self.clients = clients

    @property
    def addresses(self) -> list[str]:
        return sorted(process.address for process in self.processes.values())

    async def info(self, name: str) -> dict[str, Any]:
        info: dict[str, Any] = (await self.clients[name].send("GET", "/info")).accepted()
        return info

    async def leader(self, *, seen_by: str = "one") -> str:
        """The name of the leader, as one of them knows it."""
        info = await eventually(lambda: self.info(seen_by), lambda info: bool(info["leader-ip"]))
        return self._named(info["leader-ip"])

    async def other_than(self, former: str, *, seen_by: str) -> str:
        """The name of the next leader."""
        old = self.processes[former].address
        info = await eventually(lambda: self.info(seen_by), lambda info: info["leader-ip"] not in {"", old})
        return self._named(info["leader-ip"])

    def but(self, leader: str) -> list[str]:
        return [name for name in self.processes if name != leader]

    def _named(self, address: str) -> str:
        return next(name for name, process in self.processes.items() if process.address == address)


@asynccontextmanager
async def masters(etcd: Etcd, directory: Path, *, ttl: float = 2.0) -> AsyncIterator[Masters]:
    """Three of them, ready."""
    async with AsyncExitStack() as stack:
        flags = ("--etcd-endpoints", ",".join(etcd.endpoints), "--leader-ttl", str(ttl), "--default-subnet", "none")
        processes = {name: MasterProcess(directory / name, *flags) for name in NAMES}
        await asyncio.gather(*(stack.enter_async_context(process) for process in processes.values()))
        clients = {name: await stack.enter_async_context(client(each.url)) for name, each in processes.items()}
        yield Masters(processes, clients)


class Stream:
    """Endpoints and groups that several clients create one after another, and the responses they got."""

    def __init__(self, *clients: Rest) -> None:
        self.addresses: dict[str, str] = {}
        self.groups: list[str] = []
        self._clients = clients

    @property
    def acknowledged(self) -> int:
        return len(self.addresses)

    async def goes_on(self, *, times: int = 20) -> None:
        """Return when so many more were acknowledged."""
        before = self.acknowledged
        await until(lambda: self.acknowledged >= before + times)

    @asynccontextmanager
    async def running(self, *, writers: int = 4) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for number in range(writers):
                rest = self._clients[number % len(self._clients)]
                await stack.enter_async_context(background(self._write(rest, f"w{number}"), name=f"writer {number}"))
            yield

    async def _write(self, rest: Rest, prefix: str) -> None:
        number = 0
        while True:
            name = f"{prefix}-{number}"
            made = (await retry_until_answered(partial(rest.create_endpoint, name, network="blue"))).accepted()
            self.addresses[name] = made["EndpointConfig"]["ipAddress"]
            if number % 10 == 0:
                group = {"tenantName": "default", "groupName": name, "networkName": "blue"}
                (await retry_until_answered(partial(rest.put, "endpointGroups", **group))).accepted()
                self.groups.append(name)
            number += 1

    async def check(self, rest: Rest) -> None:
        """Everything acknowledged is stored as returned, nothing has two owners, and the state is consistent (W6)."""
        state = await sound_state(rest)
        stored = {key: document["o"] for key, document in state.items()}
        for name, address in self.addresses.items():
            assert stored[f"endpoints/default/blue/{name}"]["ipAddress"] == address
        for name in self.groups:
            assert f"groups/default/{name}" in stored
        addresses = [each["ipAddress"] for key, each in stored.items() if key.startswith("endpoints/")]
        assert len(addresses) == len(set(addresses))
        ids = [each["groupId"] for key, each in stored.items() if key.startswith("groups/")]
        assert len(ids) == len(set(ids))


async def sound_state(rest: Rest) -> dict[str, Any]:
    """Everything stored, in which the auditor finds no fault."""
    state = (await retry_until_answered(lambda: rest.send("GET", f"{API}/backup"))).accepted()["entries"]
    assert audit({key: msgspec.json.encode(document) for key, document in state.items()}) == []
    return dict(state)


async def test_w9_every_master_forwards_to_the_leader(tmp_path: Path) -> None:
    """W9: followers forward reads, writes and watches, but never what was forwarded; `/info` names each master once."""
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path) as three:
        leader = await three.leader()
        everyone = three.addresses
        for name in three.processes:
            info = await eventually(partial(three.info, name), lambda info: info["netmaster-nodes"] == everyone)
            assert info["leader-ip"] == three.processes[leader].address
            assert info["local-ip"] == three.processes[name].address
            assert info["current-state"] == ("leader" if name == leader else "follower")
        first, second = (three.clients[name] for name in three.but(leader))
        (await first.put("networks", **BLUE)).accepted()
        seen = [(await rest.get("networks", "default:blue")) for rest in three.clients.values()]
        assert all(answer.accepted() == seen[0].body and answer.etag == seen[0].etag for answer in seen)
        (await second.put("networks", **BLUE, gateway="not-an-address")).refused(422, field="gateway")

        async with second.session.get(f"{second.url}{API}/tenants/?watch=true") as watch:
            assert watch.status == 200
            (await first.put("tenants", tenantName="t1")).accepted()
            async with asyncio.timeout(DEADLINE):
                async for line in watch.content:
                    if line.strip() and msgspec.json.decode(line).get("key") == "t1":
                        break

        forwarded = {FORWARDED: "127.0.0.1:1"}
        for rest in (first, second):
            (await rest.send("GET", f"{API}/tenants/", headers=forwarded)).refused(503)
        (await three.clients[leader].send("GET", f"{API}/tenants/", headers=forwarded)).accepted()


async def test_w6_nothing_acknowledged_is_lost_when_the_leader_is_killed(tmp_path: Path) -> None:
    """W6: kill -9 in a stream of creates; clients retry unanswered requests, and get each object once."""
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path) as three:
        leader = await three.leader()
        followers = three.but(leader)
        (await three.clients[leader].put("networks", **BLUE)).accepted()
        stream = Stream(*(three.clients[name] for name in followers))
        async with stream.running():
            await stream.goes_on()
            await asyncio.sleep(random.uniform(0, 0.05))
            three.processes[leader].kill()
            await stream.goes_on()
        new_leader = await three.other_than(leader, seen_by=followers[0])
        await stream.check(three.clients[new_leader])
        await three.processes[leader].start()
        everyone = three.addresses
        info = await eventually(lambda: three.info(leader), lambda info: info["netmaster-nodes"] == everyone)
        assert info["leader-ip"] == three.processes[new_leader].address
        assert info["current-state"] == "follower"
        await stream.check(three.clients[leader])


async def test_a_watch_does_not_hang_on_a_frozen_leader(tmp_path: Path) -> None:
    """Whoever watches through a follower is cut off when the leader is replaced, and can watch again."""
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path) as three:
        leader = await three.leader()
        rest = three.clients[three.but(leader)[0]]
        url = f"{rest.url}{API}/tenants/?watch=true"
        async with rest.session.get(url) as watch:
            assert watch.status == 200
            await soon(watch.content.readline())
            three.processes[leader].pause()
            with pytest.raises(aiohttp.ClientPayloadError):
                await soon(watch.content.read())
        await rest.ready()
        async with rest.session.get(url) as watch:
            assert b"default" in await soon(watch.content.readline())


async def test_a_frozen_leader_is_fenced(tmp_path: Path) -> None:
    """What it was asked before it woke up does not happen over what its successor decided, and is not answered from
    before that; and no client hangs on it meanwhile."""
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path) as three:
        leader = await three.leader()
        follower = three.but(leader)[0]
        rest = three.clients[follower]
        (await rest.put("networks", **BLUE)).accepted()
        (await rest.create_endpoint("before", network="blue")).accepted()
        stopped = three.processes[leader]
        await asyncio.gather(three.info(leader), three.info(leader))  # two connections on which it can be asked at once
        stopped.pause()
        late = asyncio.create_task(
            three.clients[leader].create_endpoint("late", network="blue", address="10.1.200.200")
        )
        asked = asyncio.create_task(three.clients[leader].get("endpoints", "default:blue:prompt"))
        try:
            # The first may go to the one that is held still: it ends without an answer, and is sent again.
            made = await retry_until_answered(
                lambda: rest.create_endpoint("prompt", network="blue", address="10.1.200.200")
            )
            made.accepted()
            assert await three.other_than(leader, seen_by=follower) != leader
        finally:
            stopped.resume()
        (await soon(asked)).accepted()
        answer = await soon(late)
        assert answer.status in {409, 422, 503}, answer.body
        await eventually(lambda: three.info(leader), lambda info: bool(info["current-state"] == "follower"))
        state = await sound_state(three.clients[leader])
        held = [key for key, each in state.items() if each["o"].get("ipAddress") == "10.1.200.200"]
        assert held == ["endpoints/default/blue/prompt"]
        assert "endpoints/default/blue/before" in state


async def test_w5_a_stopped_leader_hands_over_at_once(tmp_path: Path) -> None:
    """W5: clients continue, the settings stay the same, and nothing waits for a lease to expire."""
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path, ttl=PATIENT_TTL) as three:
        leader = await three.leader()
        followers = three.but(leader)
        rest = three.clients[followers[0]]
        settings = {"name": "global", "fwdMode": "bridge", "vlans": "100-200", "arpMode": "flood"}
        (await rest.put("globals", **settings)).accepted()
        (await rest.put("networks", **BLUE)).accepted()
        before = (await rest.get("globals", "global")).accepted()
        stream = Stream(*(three.clients[name] for name in followers))
        async with stream.running():
            await stream.goes_on()
            assert await three.processes[leader].end() == 0
            await stream.goes_on()
        new_leader = await three.other_than(leader, seen_by=followers[0])
        remaining = sorted(three.processes[name].address for name in followers)
        for name in followers:
            info = await three.info(name)
            assert info["netmaster-nodes"] == remaining
            assert info["leader-ip"] == three.processes[new_leader].address
            assert (await three.clients[name].get("globals", "global")).accepted() == before
        await stream.check(rest)


async def test_a_master_without_its_store_is_not_ready_and_recovers(tmp_path: Path) -> None:
    async with running_etcd(tmp_path / "etcd") as etcd, masters(etcd, tmp_path) as three:
        (await three.clients["one"].put("networks", **BLUE)).accepted()
        (await three.clients["two"].create_endpoint("before", network="blue")).accepted()
        etcd.members[0].kill()
        refused = await asyncio.gather(
            *(rest.create_endpoint("during", network="blue") for rest in three.clients.values())
        )
        for answer in refused:
            answer.refused(503)
            assert answer.headers["Retry-After"]
        for rest in three.clients.values():
            (await rest.send("GET", "/healthz")).accepted()
            reply = await rest.send("GET", "/readyz")
            assert reply.status == 503
            assert any("store" in reason for reason in reply.body["reasons"]), reply.body
        await etcd.restart()
        for rest in three.clients.values():
            await rest.ready()
            (await retry_until_answered(partial(rest.create_endpoint, "after", network="blue"))).accepted()
        state = await sound_state(three.clients["three"])
        assert {"endpoints/default/blue/before", "endpoints/default/blue/after"} <= state.keys()
