"""A write can wait until every node has carried it out, with real agents (ADR 8)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tests.support.modes import ALL_IN_SOAK

from weft.domain.ids import StoreKey
from weft.drivers import RemoteStoreSettings, open_store
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.masters import API, Answer
from weft.lab.waiting import eventually


async def write(lab: NetLab, name: str, query: str) -> Answer:
    """Create a network and wait as the query says."""
    members = {"tenantName": "default", "networkName": name, "encap": "vxlan", "subnet": f"10.{ord(name[0])}.0.0/16"}
    path = f"{API}/networks/default:{name}/?{query}"
    return await lab.rest.send(
        "PUT", path, data=msgspec.json.encode(members), headers={"Content-Type": "application/json"}
    )


async def statuses(lab: NetLab) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["status"] for row in (await lab.rest.get("nodes")).accepted()}


async def receipts(lab: NetLab) -> dict[str, int]:
    """The revision in which each receipt and wish was written."""
    settings = RemoteStoreSettings(endpoints=(f"unix:{lab.directory / 'store.sock'}",), node="observer")
    async with open_store(settings) as store:
        listings = [await store.list(StoreKey(prefix)) for prefix in ("status/", "wishes/")]
    return {entry.key: entry.revision for listing in listings for entry in listing.entries}


@ALL_IN_SOAK
async def test_a_write_waits_for_every_node_and_the_stopped_one_is_named(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    await one.pod("a")
    (await write(lab, "blue", "wait=30")).accepted()
    for status in (await statuses(lab)).values():
        assert (status["state"], status["lag"]) == ("alive", 0)
    with two.agent.held_still():
        late = await write(lab, "green", "wait=0.5")
        assert "two" in late.refused(504)
        assert [each["node"] for each in late.body["details"]["laggards"]] == ["two"]
        (await lab.rest.get("networks", "default:green")).accepted()
        await eventually(lambda: statuses(lab), lambda seen: seen["two"]["state"] == "silent")
        assert "two (silent)" in (await write(lab, "red", "wait=0.5")).refused(504)
        (await write(lab, "yellow", "wait=30&skip-silent=1")).accepted()
        assert (await statuses(lab))["two"]["lag"] > 0
    (await write(lab, "white", "wait=30")).accepted()
    assert (await statuses(lab))["two"]["lag"] == 0


@ALL_IN_SOAK
async def test_a_deletion_waits_too_and_an_agent_that_is_gone_is_named(lab: NetLab) -> None:
    one, _ = await asyncio.gather(lab.host("one"), lab.host("two"))
    (await write(lab, "blue", "wait=30")).accepted()
    one.kill()
    gone = await lab.rest.send("DELETE", f"{API}/networks/default:blue/?wait=3")
    assert [each["node"] for each in gone.body["details"]["laggards"]] == ["one"]
    (await lab.rest.get("networks", "default:blue")).refused(404)
    await one.start()
    (await lab.rest.send("POST", f"{API}/settle?wait=30")).accepted()


@ALL_IN_SOAK
async def test_while_nobody_asks_nothing_is_told(lab: NetLab) -> None:
    """Neither time nor pods that come and go make a node write a receipt."""
    one, _ = await asyncio.gather(lab.host("one"), lab.host("two"))
    (await write(lab, "blue", "wait=30")).accepted()
    before = await receipts(lab)
    assert len(before) == 3
    for name in ("a", "b", "c"):
        pod = await one.pod(name)
        await asyncio.sleep(0.7)  # longer than a node looks whether it has something to tell
        await pod.remove()
    assert await receipts(lab) == before


@ALL_IN_SOAK
async def test_a_node_that_keeps_up_is_not_called_stale(lab: NetLab) -> None:
    """With so short a limit it looks several times while pods come and go."""
    one = await lab.host("one", "--stale-after=0.5")
    await lab.host("two", "--stale-after=0.5")
    for name in ("a", "b", "c", "d", "e", "f"):
        await (await one.pod(name)).remove()
    (await write(lab, "blue", "wait=30")).accepted()
    await asyncio.sleep(1.5)
    await eventually(lambda: statuses(lab), lambda seen: all(each["state"] == "alive" for each in seen.values()))


@ALL_IN_SOAK
async def test_once_a_rule_was_waited_for_the_next_packet_obeys_it(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    (await lab.rest.put("policys", tenantName="default", policyName="p")).accepted()
    await lab.group("web", network="default-net", policies=["p"])
    a, b = await one.pod("a"), await two.pod("b", group="web")
    rule = b'{"tenantName":"default","policyName":"p","ruleId":"1","direction":"in","action":"deny"}'
    path, json = f"{API}/rules/default:p:1/?wait=30", {"Content-Type": "application/json"}
    for _ in range(5):
        (await lab.rest.send("POST", path, data=rule, headers=json)).accepted()
        assert await a.never_reaches(b)
        (await lab.rest.send("DELETE", path)).accepted()
        assert await a.reaches(b)


async def test_on_etcd(apart: None) -> None:
    async with open_lab(store="etcd") as lab:
        await asyncio.gather(lab.host("one"), lab.host("two"))
        for name in ("blue", "green", "red"):
            (await write(lab, name, "wait=30")).accepted()
