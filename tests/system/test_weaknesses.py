"""Contiv's weaknesses (contiv 11.1, 11.2) that no other file tests, and the table of where each is tested."""

from __future__ import annotations

import ast
import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from weft.adapters.stores.memory import MemoryStore
from weft.domain import codec, kinds, model
from weft.domain.ids import NodeName
from weft.lab.servers.masters import API, Rest, running_master
from weft.lab.waiting import DEADLINE
from weft.master.api.leader_proxy import FORWARDED
from weft.ports.store import Delete, Put
from weft.runtime.backoff import Backoff

BLUE = {"tenantName": "default", "networkName": "blue", "encap": "vxlan", "subnet": "10.1.1.0/24"}
GROUP = {"tenantName": "default", "networkName": "blue"}


@pytest.mark.parametrize("header", ["", "Bearer wrong-token-of-24-chars!", "Basic eDp5", "Bearer \udcff\udcfe"])
async def test_w2_rest_requires_the_token(header: str, tmp_path: Path) -> None:
    """W2: without the token only the liveness of the process is visible, and the error is JSON."""
    token = tmp_path / "token"
    token.write_text("a-token-of-24-characters")
    async with running_master("--token-file", str(token)) as rest:
        headers = {"Authorization": header} if header else {}
        for method, path in (
            ("GET", f"{API}/tenants/"),
            ("PUT", f"{API}/tenants/t1/"),
            ("POST", "/plugin/createEndpoint"),
            ("GET", f"{API}/backup"),
            ("GET", "/metrics"),
            ("GET", "/none"),
        ):
            answer = await rest.send(method, path, headers=headers)
            answer.refused(401)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        (await rest.send("GET", "/healthz", headers=headers)).accepted()
        good = {"Authorization": "Bearer a-token-of-24-characters"}
        (await rest.send("GET", f"{API}/tenants/", headers=good)).accepted()


async def test_w4_an_object_and_its_allocations_are_one_commit(rest: Rest) -> None:
    """W4: there is no second layer that could lag behind; each change is seen whole or not at all."""

    async def revision() -> int:
        return int((await rest.get("tenants")).headers["X-Revision"])

    group = {"groupName": "web", **GROUP}
    for change in (
        rest.put("networks", **BLUE),
        rest.put("endpointGroups", **group),
        rest.create_endpoint("e1", network="blue", group="web"),
        rest.delete_endpoint("e1", network="blue"),
        rest.delete("endpointGroups", "default:web"),
        rest.delete("networks", "default:blue"),
    ):
        before = await revision()
        (await change).accepted()
        assert await revision() == before + 1


async def test_w5_a_restart_keeps_the_settings() -> None:
    """W5: the original put its defaults back at every start of a leader. What was deleted stays deleted, too."""
    async with MemoryStore() as store:
        async with running_master("--default-subnet", "10.224.0.0/16", store=store) as rest:
            (await rest.delete("networks", "default:default-net")).accepted()
            settings = {"name": "global", "fwdMode": "bridge", "vlans": "100-200", "arpMode": "flood"}
            (await rest.put("globals", **settings)).accepted()
            before = await rest.state()
        async with running_master("--default-subnet", "10.224.0.0/16", "--fwdmode", "routing", store=store) as rest:
            assert await rest.state() == before


async def test_w6_group_ids_stay_unique_over_masters() -> None:
    """W6: the original's counter began at 1 again in every process."""
    async with MemoryStore() as store:
        async with running_master(store=store) as rest:
            await rest.put("networks", **BLUE)
            for name in ("a", "b"):
                (await rest.put("endpointGroups", groupName=name, **GROUP)).accepted()
        async with running_master(store=store) as rest:
            await rest.delete("endpointGroups", "default:a")
            for name in ("c", "d"):
                (await rest.put("endpointGroups", groupName=name, **GROUP)).accepted()
            ids = [
                (await rest.oper("endpointGroups", f"default:{name}"))["endpointGroupId"] for name in ("b", "c", "d")
            ]
            assert ids == [2, 1, 3]


async def test_w7_a_failing_service_blocks_no_other(rest: Rest) -> None:
    """W7: the original kept its lock when a service could not be made."""
    await rest.put("networks", **BLUE)
    service = {"tenantName": "default", "networkName": "blue", "selectors": ["a=b"], "ports": ["80:80:TCP"]}
    (await rest.put("serviceLBs", **service, serviceName="bad", ipAddress="10.9.9.9")).refused(422)
    made = await asyncio.gather(*(rest.put("serviceLBs", **service, serviceName=f"s{number}") for number in range(5)))
    for answer in made:
        answer.accepted()
    vips = {(await rest.oper("serviceLBs", f"default:s{number}"))["serviceVip"] for number in range(5)}
    assert len(vips) == 5


async def test_w9_every_master_names_the_leader_and_never_forwards_in_a_loop() -> None:
    async with (
        MemoryStore() as store,
        running_master(store=store) as leader,
        running_master(store=store) as follower,
    ):
        own = [rest.url.removeprefix("http://") for rest in (leader, follower)]
        infos = [(await rest.send("GET", "/info")).accepted() for rest in (leader, follower)]
        assert [info["current-state"] for info in infos] == ["leader", "follower"]
        for info in infos:
            assert info["leader-ip"] == own[0]
            assert info["netmaster-nodes"] == sorted(own)
        (await follower.put("tenants", tenantName="t1")).accepted()
        assert (await leader.get("tenants", "t1")).accepted() == (await follower.get("tenants", "t1")).accepted()
        (await follower.send("GET", f"{API}/tenants/", headers={FORWARDED: own[0]})).refused(503)


async def test_w11_a_follower_has_every_rule_from_the_start() -> None:
    """W11: there is nothing to replay, for nothing lives in the memory of a leader alone."""
    question = f"{API}/trace?src=192.0.2.1&dst=e1&service=tcp/80"
    async with MemoryStore() as store, AsyncExitStack() as leading:
        rest = await leading.enter_async_context(running_master(store=store))
        await rest.put("networks", **BLUE)
        await rest.put("policys", tenantName="default", policyName="p")
        rule = {"tenantName": "default", "policyName": "p", "ruleId": "1", "direction": "in", "action": "deny"}
        (await rest.put("rules", **rule)).accepted()
        (await rest.put("endpointGroups", **GROUP, groupName="web", policies=["p"])).accepted()
        (await rest.create_endpoint("e1", network="blue", group="web")).accepted()
        verdict = (await rest.send("GET", question)).accepted()
        assert not verdict["allowed"]
        async with running_master(store=store) as other:
            await leading.aclose()
            await other.ready()
            assert (await other.send("GET", question)).accepted() == verdict
            assert (await other.send("GET", "/info")).accepted()["current-state"] == "leader"


async def test_w12_a_dead_node_is_garbage_collected_soon_after_the_limit() -> None:
    """W12: the original looked once a day. Silence is shown within seconds, then all the node had is free again."""
    node = model.Node(name=NodeName("n1"))
    async with MemoryStore() as store, running_master("--offline-limit", "1", store=store) as rest:
        await rest.put("networks", **BLUE)
        before = await rest.state()
        await store.commit([], [Put(kinds.NODE.store_key("n1"), codec.encode(node)), Put(kinds.alive_node("n1"), b"")])
        (await rest.create_endpoint("e1", network="blue", host="n1")).accepted()
        await store.commit([], [Delete(kinds.alive_node("n1"))])
        await until_state(rest, before)


async def until_state(rest: Rest, wanted: dict[str, object]) -> None:
    backoff = Backoff(first=0.05, cap=0.5, within=DEADLINE)
    while await rest.state() != wanted:
        await backoff.pause()


async def test_w23_a_rule_that_names_a_vanished_group_matches_nothing(rest: Rest) -> None:
    """W23: the original let it match everything."""
    await rest.put("networks", **BLUE)
    await rest.put("policys", tenantName="default", policyName="p")
    (await rest.put("endpointGroups", **GROUP, groupName="friends")).accepted()
    (await rest.put("endpointGroups", **GROUP, groupName="others")).accepted()
    (await rest.put("endpointGroups", **GROUP, groupName="web", policies=["p"])).accepted()
    rule = {"tenantName": "default", "policyName": "p", "direction": "in"}
    (await rest.put("rules", **rule, ruleId="1", action="deny", priority=1)).accepted()
    friends = {"ruleId": "2", "action": "allow", "priority": 10, "fromEndpointGroup": "friends"}
    (await rest.put("rules", **rule, **friends)).accepted()
    for name, group in (("f1", "friends"), ("s1", "others"), ("w1", "web")):
        (await rest.create_endpoint(name, network="blue", group=group)).accepted()

    async def passes(source: str) -> bool:
        answer = await rest.send("GET", f"{API}/trace?src={source}&dst=w1&service=tcp/80")
        return bool(answer.accepted()["allowed"])

    assert (await passes("f1"), await passes("s1")) == (True, False)
    (await rest.delete_endpoint("f1", network="blue")).accepted()
    (await rest.delete("endpointGroups", "default:friends")).accepted()
    assert not await passes("s1")
    (await rest.put("endpointGroups", **GROUP, groupName="latecomers")).accepted()
    (await rest.create_endpoint("n1", network="blue", group="latecomers")).accepted()
    assert not await passes("n1")


def table() -> dict[int, str]:
    """The rows of docs/compatibility/contiv.md by number."""
    text = (ROOT / "docs/compatibility/contiv.md").read_text()
    return {int(row[1]): row[0] for row in re.finditer(r"^\| W(\d+) \|.*$", text, re.MULTILINE)}


def test_every_weakness_has_its_row() -> None:
    rows = list(table())
    assert rows == list(range(1, 53))


@pytest.mark.parametrize("number", table())
def test_the_tests_that_the_table_names_exist(number: int) -> None:
    """Each row names a test, as `file::name`, or says why the weakness cannot arise here."""
    row = table()[number]
    assert exist(row) or "cannot arise" in row


def test_the_tests_that_the_scenarios_of_open_vswitch_name_exist() -> None:
    assert exist((ROOT / "docs/design/ovs-scenarios.md").read_text()) > 40


def exist(text: str) -> int:
    """How many tests are named, as `file` or `file::name`; each of them must be there."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    for file, name in named:
        source = ast.parse((ROOT / file).read_text())
        names = {
            node.name
            for node in ast.walk(source)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert not name or name in names, f"{file} has no {name}"
    return len(named)
