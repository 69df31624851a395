"""Writes that keep what they are not told to change, report what they change, and refuse to open traffic (UX1, UX2)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weft.lab.servers.masters import Answer, Rest

API = "/api/v1"
WEB = {"tenantName": "blue", "groupName": "web", "networkName": "net"}
RULES = (
    {"ruleId": "http", "direction": "in", "protocol": "tcp", "port": 80, "action": "allow", "priority": 10},
    {"ruleId": "rest", "direction": "in", "action": "deny", "priority": 1},
)


@pytest.fixture(params=[True, False], ids=["with-endpoint", "without"])
async def blue(rest: Rest, request: pytest.FixtureRequest) -> Rest:
    """Tenant blue: group `web` with policy `web-only` and a netprofile; with or without an endpoint."""
    await rest.put("tenants", tenantName="blue", externalRanges=["203.0.113.0/28"])
    await rest.put("networks", tenantName="blue", networkName="net", encap="vlan", subnet="10.1.1.0/24")
    await rest.put("netprofiles", tenantName="blue", profileName="gold", bandwidth="10Mbps")
    for policy in ("web-only", "all"):
        await rest.put("policys", tenantName="blue", policyName=policy)
    for rule in RULES:
        (await rest.put("rules", tenantName="blue", policyName="web-only", **rule)).accepted()
    (await rest.put("endpointGroups", **WEB, policies=["web-only"], netProfile="gold")).accepted()
    if request.param:
        (await rest.create_endpoint("web-1", tenant="blue", network="net", group="web")).accepted()
    return rest


class Done(NamedTuple):
    code: int
    out: str
    err: str


async def netctl(rest: Rest, line: str) -> Done:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft.ctl.netctl.main", *line.split()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NETMASTER": rest.url, "NETCTL_TOKEN": ""},
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


async def patch(rest: Rest, path: str, body: dict[str, Any], query: str = "") -> Answer:
    return await rest.send("PATCH", f"{API}/{path}/{query}", data=json.dumps(body).encode())


async def group(rest: Rest) -> dict[str, Any]:
    found: dict[str, Any] = (await rest.send("GET", f"{API}/endpointGroups/blue:web/")).accepted()
    return found


@pytest.mark.parametrize(
    "line",
    [
        "group create -t blue net web",
        "group create -t blue net web --networkprofile gold",
        "group create -t blue -p web-only net web",
        "tenant create blue",
        "policy create -t blue web-only",
        "network create -t blue -s 10.1.1.0/24 net",
        "netprofile create -t blue gold",
        "policy rule-add -t blue web-only rest -d in -j deny",
    ],
)
async def test_UX1_create_of_what_exists_changes_nothing(blue: Rest, line: str) -> None:
    before = await blue.state()
    done = await netctl(blue, line)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(" unchanged\n")
    assert await blue.state() == before


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        ("group create -t blue --no-policy net web", "group blue:web"),
        ("group create -t blue -p all net web", "group blue:web"),
        ("policy create -t blue web-only --mode audit", "group blue:web"),
        ("tenant create blue --external-range 203.0.113.0/24", "203.0.113.16"),
    ],
)
async def test_UX1_a_change_that_opens_traffic_needs_force(blue: Rest, line: str, opens: str) -> None:
    before = await blue.state()
    refused = await netctl(blue, line)
    assert (refused.code, refused.out) == (6, "")
    assert opens in refused.err
    assert "--force" in refused.err
    assert await blue.state() == before
    forced = await netctl(blue, f"{line} --force")
    assert forced.code == 0
    changed, opened, *_ = forced.out.splitlines()
    assert " changed: " in changed
    assert opened.startswith("opens: ")
    assert opens in forced.out


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("group create -t blue --no-networkprofile net web", "blue:web changed: netProfile gold -> none\n"),
        ("group create -t blue -p web-only -p all net web", "blue:web changed: policies +all\n"),
        ("tenant create blue --no-external-range", "blue changed: externalRanges -203.0.113.0/28\n"),
        (
            "netprofile create -t blue gold --no-bandwidth -d 10",
            "blue:gold changed: bandwidth 10Mbps -> none, DSCP none -> 10\n",
        ),
        ("tenant create red", "red created\n"),
        ("policy rule-rm -t blue web-only http", "blue:web-only:http deleted\n"),
    ],
)
async def test_UX1_a_change_is_told(blue: Rest, line: str, shown: str) -> None:
    done = await netctl(blue, line)
    assert (done.code, done.out, done.err) == (0, shown, "")


@pytest.mark.parametrize(
    "line",
    [
        "policy rule-rm -t blue web-only rest",
        "policy rule-add -t blue web-only ssh -d in -l tcp -P 22 -p 20",
    ],
)
async def test_UX1_an_explicit_opening_says_what_it_opens(blue: Rest, line: str) -> None:
    done = await netctl(blue, line)
    assert done.code == 0
    assert any(each.startswith("opens: ") and "group blue:web" in each for each in done.out.splitlines())


@pytest.mark.parametrize("flag", ["--dry-run", "--preview"])
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("policy create -t blue web-only", "would be unchanged"),
        ("policy create -t blue web-only --mode audit", "would change: mode enforce -> audit"),
        ("policy create -t blue other", "would be created"),
        ("policy rm -t blue all", "would be deleted"),
        ("policy rule-rm -t blue web-only rest", "would open: "),
        ("policy rule-add -t blue web-only ssh -l tcp -P 22 -p 20", "would open: "),
        ("group create -t blue --no-policy net web", "would open: "),
        ("group create -t blue --no-policy --force net web", "would open: "),
        ("tenant create red", "would be created"),
        ("tenant rm blue", ""),
        ("network create -t blue -s 10.9.0.0/24 other", "would be created"),
        ("netprofile rm -t blue gold", ""),
        ("global set --vxlan-range 1-5000", "would change: vxlans 1-10000 -> 1-5000"),
    ],
)
async def test_UX2_a_dry_run_never_writes(blue: Rest, line: str, shown: str, flag: str) -> None:
    before = await blue.state()
    done = await netctl(blue, f"{line} {flag}")
    assert shown in done.out
    # What the write itself would refuse, its dry run refuses too.
    assert done.code == (0 if shown else 3)
    assert await blue.state() == before


async def test_rest_replaces_as_contiv_does_and_refuses_on_request(blue: Rest) -> None:
    refused = await blue.send(
        "PUT", f"{API}/endpointGroups/blue:web/?refuse-opening=true", data=json.dumps(WEB).encode()
    )
    assert refused.status == 409
    assert refused.body["code"] == "opens-traffic"
    assert refused.body["details"]["opens"]
    assert (await group(blue))["policies"] == ["web-only"]
    assert (await blue.put("endpointGroups", **WEB)).accepted()["key"] == "blue:web"
    assert "policies" not in await group(blue)


async def test_a_deletion_can_be_guarded_too(blue: Rest) -> None:
    path = f"{API}/rules/blue:web-only:rest/"
    (await blue.send("DELETE", f"{path}?refuse-opening=1")).refused(409)
    report = (await blue.send("DELETE", f"{path}?report=1")).accepted()
    assert report["outcome"] == "deleted"
    assert report["opens"]


@pytest.mark.parametrize(
    ("path", "body", "query", "status"),
    [
        ("endpointGroups/blue:web", {"polices": None}, "", 422),
        ("endpointGroups/blue:web", {"polices": []}, "", 422),
        ("endpointGroups/blue:web", {"policies": [None]}, "", 422),
        ("endpointGroups/blue:web", {"groupName": "other"}, "", 422),
        ("endpointGroups/blue:web", {"groupId": 7}, "", 422),
        ("endpointGroups/blue:web", {"policies": []}, "?dryrun=1", 400),
        ("endpointGroups/blue:web", {"policies": []}, "?previw=true", 400),
        ("endpointGroups/blue:web", {"policies": []}, "?dry-run=maybe", 400),
        ("endpointGroups/blue:web", {"policies": []}, "?dry-run=0&dry-run=1", 400),
        ("policys/blue:web-only", {"mode": "audti"}, "", 422),
        ("policys/blue:web-only", {"dryRun": True}, "", 422),
        ("policys/blue", {}, "", 400),
        ("nodes/one", {}, "", 405),
    ],
)
async def test_garbage_is_refused_and_changes_nothing(
    blue: Rest, path: str, body: dict[str, Any], query: str, status: int
) -> None:
    before = await blue.state()
    (await patch(blue, path, body, query)).refused(status)
    assert await blue.state() == before


async def test_null_resets_a_member_and_absent_ones_stay(blue: Rest) -> None:
    report = (await patch(blue, "endpointGroups/blue:web", {"netProfile": None, "cfgdTag": "x"})).accepted()
    assert {each["member"] for each in report["changes"]} == {"netProfile", "cfgdTag"}
    found = await group(blue)
    assert (found["policies"], found["cfgdTag"], "netProfile" in found) == (["web-only"], "x", False)


async def test_two_writers_at_once_lose_nothing_and_open_nothing(blue: Rest) -> None:
    """Each change alone opens nothing: together they would. One of them must see the other's and be refused."""
    for rule in RULES:
        (await blue.put("rules", tenantName="blue", policyName="all", **rule)).accepted()
    (await patch(blue, "endpointGroups/blue:web", {"policies": ["web-only", "all"]})).accepted()
    guarded = "?refuse-opening=1"
    for _ in range(5):
        answers = await asyncio.gather(
            patch(blue, "policys/blue:web-only", {"mode": "audit"}, guarded),
            patch(blue, "policys/blue:all", {"mode": "audit"}, guarded),
            patch(blue, "endpointGroups/blue:web", {"cfgdTag": "a"}, guarded),
            patch(blue, "endpointGroups/blue:web", {"netProfile": None}, guarded),
        )
        assert sorted(answer.status for answer in answers) == [200, 200, 200, 409]
        found = await group(blue)
        assert (found["cfgdTag"], "netProfile" in found) == ("a", False)
        for policy in ("web-only", "all"):
            (await patch(blue, f"policys/blue:{policy}", {"mode": "enforce"})).accepted()
        (await patch(blue, "endpointGroups/blue:web", {"netProfile": "gold", "cfgdTag": None})).accepted()


async def test_if_match_holds_for_guarded_writes(blue: Rest, tmp_path: Path) -> None:
    stale = await blue.send(
        "PATCH", f"{API}/endpointGroups/blue:web/", data=b'{"cfgdTag": "x"}', headers={"If-Match": '"1"'}
    )
    stale.refused(412)
