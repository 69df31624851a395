"""`GET /api/v1/trace` and `POST /api/v1/policydiff` on the state that REST created, and `weft trace` on top of them."""

from __future__ import annotations

import asyncio
import sys
from urllib.parse import urlencode

import pytest

from weft.lab.servers.masters import Answer, Rest

ALLOW_WEB = {"ruleId": "web", "direction": "in", "protocol": "tcp", "port": 80, "action": "allow", "priority": 10}
DENY_ALL = {"ruleId": "rest", "direction": "in", "action": "deny", "priority": 1}


@pytest.fixture
async def shop(rest: Rest) -> Rest:
    """Two groups on one network: `web` lets in tcp/80 only, `clients` is open."""
    await rest.put("networks", tenantName="default", networkName="net", encap="vxlan", subnet="10.1.1.0/24")
    await rest.put("policys", tenantName="default", policyName="p")
    for rule in (ALLOW_WEB, DENY_ALL):
        (await rest.put("rules", tenantName="default", policyName="p", **rule)).accepted()
    await rest.put("endpointGroups", tenantName="default", groupName="web", networkName="net", policies=["p"])
    await rest.put("endpointGroups", tenantName="default", groupName="clients", networkName="net")
    for name, group in (("web-1", "web"), ("client-1", "clients")):
        (await rest.create_endpoint(name, network="net", group=group)).accepted()
    return rest


async def trace(rest: Rest, src: str, dst: str, service: str) -> Answer:
    return await rest.send("GET", f"/api/v1/trace?{urlencode({'src': src, 'dst': dst, 'service': service})}")


async def test_a_flow_is_explained(shop: Rest) -> None:
    passed = (await trace(shop, "client-1", "web-1", "tcp/80")).accepted()
    assert passed["allowed"]
    assert passed["decidedBy"] == "contiv/default/p/web"
    blocked = (await trace(shop, "client-1", "web-1", "tcp/81")).accepted()
    assert not blocked["allowed"]
    assert blocked["decidedBy"] == "contiv/default/p/rest"
    assert blocked["nearest"]["rule"] == "contiv/default/p/web"
    assert (await trace(shop, "web-1", "client-1", "tcp/81")).accepted()["allowed"]


async def test_addresses_and_external_peers_can_be_traced(shop: Rest) -> None:
    assert (await trace(shop, "10.1.1.2", "10.1.1.1", "tcp/80")).accepted()["source"] == "default:net:client-1"
    assert not (await trace(shop, "192.0.2.1", "web-1", "udp/53")).accepted()["allowed"]


async def test_a_trace_reflects_every_change(shop: Rest) -> None:
    """W24: a deleted rule no longer counts and an added one does, without rebuilding the whole state."""
    assert not (await trace(shop, "client-1", "web-1", "icmp")).accepted()["allowed"]
    (await shop.delete("rules", "default:p:rest")).accepted()
    assert (await trace(shop, "client-1", "web-1", "icmp")).accepted()["allowed"]
    (await shop.put("rules", tenantName="default", policyName="p", **DENY_ALL)).accepted()
    assert not (await trace(shop, "client-1", "web-1", "icmp")).accepted()["allowed"]
    (await shop.put("endpointGroups", tenantName="default", groupName="web", networkName="net", policies=[])).accepted()
    assert (await trace(shop, "client-1", "web-1", "icmp")).accepted()["allowed"]
    (await shop.delete_endpoint("client-1", network="net")).accepted()
    (await trace(shop, "client-1", "web-1", "icmp")).refused(404)


async def test_a_policy_that_is_deleted_with_its_rules_no_longer_counts(shop: Rest) -> None:
    assert not (await trace(shop, "client-1", "web-1", "tcp/81")).accepted()["allowed"]
    (await shop.put("endpointGroups", tenantName="default", groupName="web", networkName="net", policies=[])).accepted()
    (await shop.delete("policys", "default:p")).accepted()
    assert (await trace(shop, "client-1", "web-1", "tcp/81")).accepted()["decidedBy"] == "weft/default"


async def test_an_audit_policy_reports_and_never_decides(shop: Rest) -> None:
    (await shop.put("policys", tenantName="default", policyName="p", mode="audit")).accepted()
    explained = (await trace(shop, "client-1", "web-1", "tcp/81")).accepted()
    assert explained["allowed"]
    assert explained["ingress"]["audit"]["rule"] == "contiv/default/p/rest"


@pytest.mark.parametrize(
    ("src", "dst", "service", "status", "field"),
    [
        ("client-1", "web-1", "tcp", 422, "port"),
        ("client-1", "web-1", "tcp/70000", 422, "port"),
        ("client-1", "web-1", "nonsense/80", 422, "protocol"),
        ("client-1", "missing", "tcp/80", 404, None),
        ("client-1", "", "tcp/80", 400, "dst"),
        ("-1", "web-1", "tcp/80", 422, "src"),
    ],
)
async def test_invalid_queries_are_rejected(
    shop: Rest, src: str, dst: str, service: str, status: int, field: str | None
) -> None:
    (await trace(shop, src, dst, service)).refused(status, field=field)


async def test_a_diff_reports_the_effect_of_a_change_without_making_it(shop: Rest) -> None:
    before = await shop.state()
    changes = [{"delete": "rules", "key": "default:p:web"}]
    [change] = (await shop.post("/api/v1/policydiff", {"changes": changes})).accepted()
    assert not change["allowed"]
    assert change["targets"] == ["group default:web"]
    assert change["services"] == ["tcp/80"]
    assert await shop.state() == before


async def test_later_proposals_build_on_earlier_ones(shop: Rest) -> None:
    """A policy, its rule and its group's change in one question."""
    group = {"tenantName": "default", "groupName": "clients", "networkName": "net", "policies": ["new"]}
    changes = [
        {"put": "policys", "object": {"tenantName": "default", "policyName": "new"}},
        {"put": "rules", "object": {"tenantName": "default", "policyName": "new", **DENY_ALL}},
        {"put": "endpointGroups", "object": group},
    ]
    found = (await shop.post("/api/v1/policydiff", {"changes": changes})).accepted()
    assert {(tuple(change["targets"]), change["allowed"]) for change in found} == {(("group default:clients",), False)}


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ([], 422),
        ([{"put": "rules", "delete": "rules"}], 422),
        ([{"delete": "rules", "key": "default:p:none"}], 404),
        ([{"delete": "wheels", "key": "x"}], 404),
        ([{"put": "rules", "object": {"tenantName": "default", "policyName": "none", **DENY_ALL}}], 422),
        ([{"put": "rules", "object": {"tenantName": "default", "policyName": "p", **DENY_ALL, "port": 70000}}], 422),
    ],
)
async def test_bad_proposals_are_rejected(shop: Rest, changes: list[object], status: int) -> None:
    (await shop.post("/api/v1/policydiff", {"changes": changes})).refused(status)


async def test_weft_trace_prints_the_verdict(shop: Rest) -> None:
    command = [sys.executable, "-m", "weft.cli", "trace", "--netmaster", shop.url]
    for service, code, text in (("tcp/80", 0, "ALLOWED"), ("tcp/81", 1, "nearest rule that would allow it")):
        process = await asyncio.create_subprocess_exec(
            *command, "client-1", "web-1", service, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, text in output.decode()) == (code, True)
