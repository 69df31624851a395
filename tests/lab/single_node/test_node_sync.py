"""A write can wait until every node has applied it, with real agents (ADR 8)."""

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
    """Create a network with the wait options of the query."""
    members = {"tenantName": "default", "networkName": name, "encap": "vxlan", "subnet": f"10.{ord(name[0])}.0.0/16"}
    path = f"{API}/networks/default:{name}/?{query}"
    return await lab.rest.send(
        "PUT", path, data=msgspec.json.encode(members), headers={"Content-Type": "application/json"}
    )


async def statuses(lab: NetLab) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["status"] for row in (await lab.rest.get("nodes")).accepted()}


async def sync_revisions(lab: NetLab) -> dict[str, int]:
    """The store revision in which each sync request and acknowledgement was written."""
    settings = RemoteStoreSettings(endpoints=(f"unix:{lab.directory / 'store.sock'}",), node="observer")
    async with open_store(settings) as store:
        listings = [await store.list(StoreKey(prefix)) for prefix in ("status/", "requests/")]
    return {entry.key: entry.revision for listing in listings for entry in listing.entries}


@ALL_IN_SOAK
async def test_a_write_waits_for_every_node_and_names_the_stopped_one(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    await one.pod("a")
    (await write(lab, "blue", "wait=30")).accepted()
    for status in (await statuses(lab)).values():
        assert (status["state"], status["lag"]) == ("Ready", 0)
    with two.agent.paused():
        late = await write(lab, "green", "wait=0.5")
        assert "two" in late.refused(504)
        assert [each["node"] for each in late.body["details"]["pendingNodes"]] == ["two"]
        (await lab.rest.get("networks", "default:green")).accepted()
        await eventually(lambda: statuses(lab), lambda seen: seen["two"]["state"] == "Unreachable")
        assert "two (Unreachable)" in (await write(lab, "red", "wait=0.5")).refused(504)
        (await write(lab, "yellow", "wait=30&ignore-unreachable=1")).accepted()
        assert (await statuses(lab))["two"]["lag"] > 0
    (await write(lab, "white", "wait=30")).accepted()
    assert (await statuses(lab))["two"]["lag"] == 0


@ALL_IN_SOAK
async def test_a_deletion_waits_too_and_names_a_dead_agent(lab: NetLab) -> None:
    one, _ = await asyncio.gather(lab.host("one"), lab.host("two"))
    (await write(lab, "blue", "wait=30")).accepted()
    one.kill()
    gone = await lab.rest.send("DELETE", f"{API}/networks/default:blue/?wait=3")
    assert [each["node"] for each in gone.body["details"]["pendingNodes"]] == ["one"]
    (await lab.rest.get("networks", "default:blue")).refused(404)
    await one.start()
    (await lab.rest.send("POST", f"{API}/sync?wait=30")).accepted()


@ALL_IN_SOAK
async def test_no_acknowledgement_is_written_without_a_request(lab: NetLab) -> None:
    """Neither time nor pod churn makes a node write a sync acknowledgement."""
    one, _ = await asyncio.gather(lab.host("one"), lab.host("two"))
    (await write(lab, "blue", "wait=30")).accepted()
    before = await sync_revisions(lab)
    assert len(before) == 3
    for name in ("a", "b", "c"):
        pod = await one.pod(name)
        # An observation window, longer than the interval in which a node checks for sync requests.
        await asyncio.sleep(0.7)
        await pod.remove()
    assert await sync_revisions(lab) == before


@ALL_IN_SOAK
async def test_a_node_in_sync_is_not_reported_stale(lab: NetLab) -> None:
    """With such a short limit the node is evaluated several times during pod churn."""
    one = await lab.host("one", "--stale-after=0.5")
    await lab.host("two", "--stale-after=0.5")
    for name in ("a", "b", "c", "d", "e", "f"):
        await (await one.pod(name)).remove()
    (await write(lab, "blue", "wait=30")).accepted()
    # An observation window of three times --stale-after: a node wrongly reported stale would show up in it.
    await asyncio.sleep(1.5)
    await eventually(lambda: statuses(lab), lambda seen: all(each["state"] == "Ready" for each in seen.values()))


@ALL_IN_SOAK
async def test_the_first_packet_after_a_waited_write_obeys_the_rule(lab: NetLab) -> None:
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


async def test_a_write_waits_on_etcd(isolated: None) -> None:
    async with open_lab(store="etcd") as lab:
        await asyncio.gather(lab.host("one"), lab.host("two"))
        for name in ("blue", "green", "red"):
            (await write(lab, name, "wait=30")).accepted()
