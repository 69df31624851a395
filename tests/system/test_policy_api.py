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


@pytest.fixture
async def tenants(shop: Rest) -> Rest:
    """Tenants blue and red with the same subnet; 10.2.1.1 exists in both, 10.2.1.2 in blue only; a service in blue."""
    for tenant, names in (("blue", ("one", "two")), ("red", ("one",))):
        await shop.put("tenants", tenantName=tenant)
        await shop.put(
            "networks", tenantName=tenant, networkName="n", encap="vxlan", subnet="10.2.1.0/24", gateway="10.2.1.254"
        )
        for name in names:
            (await shop.create_endpoint(f"{tenant}-{name}", tenant=tenant, network="n")).accepted()
    await shop.put("networks", tenantName="red", networkName="m", encap="vxlan", subnet="10.3.1.0/24")
    (await shop.create_endpoint("red-three", tenant="red", network="m")).accepted()
    service = {"networkName": "n", "ipAddress": "10.2.1.100", "selectors": ["app=web"], "ports": ["80:8080:TCP"]}
    (await shop.put("serviceLBs", tenantName="blue", serviceName="vip", **service)).accepted()
    return shop


async def traced(rest: Rest, **query: str) -> Answer:
    return await rest.send("GET", f"/api/v1/trace?{urlencode({'service': 'tcp/80', **query})}")


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ({"src": "10.2.1.2", "dst": "10.2.1.1"}, 422, "10.2.1.1 is in tenants blue, red"),
        ({"src": "10.2.1.1", "dst": "10.2.1.2"}, 422, "add -t TENANT"),
        ({"src": "10.2.1.2", "dst": "10.2.1.250"}, 404, "10.2.1.250 is in network blue:n, but no endpoint has it"),
        ({"src": "blue-one", "dst": "10.2.1.250"}, 404, "no endpoint has it"),
        ({"src": "192.0.2.7", "dst": "10.2.1.250"}, 404, "no endpoint has it"),
        ({"src": "10.2.1.250", "dst": "blue-one"}, 404, "no endpoint has it"),
        ({"src": "blue-one", "dst": "10.2.1.254"}, 422, "is the gateway of network blue:n"),
        ({"src": "blue-one", "dst": "10.2.1.100"}, 422, "the VIP of service blue:vip, which has no backend"),
        ({"src": "blue-one", "dst": "10.2.1.100", "service": "tcp/81"}, 422, "has no port tcp/81, only tcp/80"),
        ({"src": "192.0.2.7", "dst": "10.2.1.100"}, 422, "the VIP of service blue:vip"),
        ({"src": "10.2.1.100", "dst": "blue-one"}, 422, "the VIP of service blue:vip"),
        ({"src": "blue-one", "dst": "vip"}, 422, "the VIP of service blue:vip"),
        ({"src": "red-one", "dst": "10.2.1.100"}, 404, "no endpoint has it"),
        ({"src": "blue-one", "dst": "blue-two", "service": "80"}, 422, "write tcp/80"),
        ({"src": "10.2.1.2", "dst": "10.2.1.1", "tenant": "none"}, 404, "tenant 'none' does not exist"),
        ({"src": "10.2.1.2", "dst": "10.2.1.1", "tenant": "red"}, 404, "no endpoint in tenant red has 10.2.1.2"),
        ({"src": "blue-", "dst": "blue-one"}, 422, "blue:n:blue-one, blue:n:blue-two"),
        ({"src": "192.0.2.7", "dst": "198.51.100.1"}, 422, "no policy applies"),
        ({"src": "blue-one", "dst": "127.0.0.1"}, 422, "loopback"),
        ({"src": "blue-one", "dst": "224.0.0.1"}, 422, "multicast"),
        ({"src": "blue-one", "dst": "nobody"}, 404, "neither an endpoint nor a host nor an address"),
        ({"src": "blue-one", "dst": "10.2.1"}, 404, "neither an endpoint nor a host nor an address"),
        ({"src": "blue-one", "dst": "blue-two", "tennant": "blue"}, 400, "tennant"),
    ],
)
async def test_UX3_trace_refuses_instead_of_guessing(
    tenants: Rest, query: dict[str, str], status: int, text: str
) -> None:
    answer = await traced(tenants, **query)
    answer.refused(status)
    assert text in answer.body["message"]


async def test_UX3_trace_looks_addresses_up_in_all_tenants(tenants: Rest) -> None:
    alone = (await traced(tenants, src="192.0.2.7", dst="10.2.1.2")).accepted()
    assert (alone["target"], alone["source"]) == ("blue:n:blue-two", "192.0.2.7")
    for query in ({"src": "10.2.1.2", "dst": "10.2.1.1", "tenant": "blue"}, {"src": "blue-two", "dst": "10.2.1.1"}):
        both = (await traced(tenants, **query)).accepted()
        assert (both["source"], both["target"]) == ("blue:n:blue-two", "blue:n:blue-one")
    other = (await traced(tenants, src="blue-one", dst="10.3.1.1")).accepted()
    assert (other["target"], other["allowed"], other["decidedBy"]) == ("red:m:red-three", False, "weft/tenants")
    assert (await traced(tenants, src="blue-t", dst="198.51.100.1")).accepted()["source"] == "blue:n:blue-two"


async def test_UX3_a_vip_names_its_backends_and_their_port(tenants: Rest) -> None:
    call = {"Event": "start", "Tenant": "blue", "Network": "n", "EndpointID": "blue-two", "Labels": {"app": "web"}}
    (await tenants.post("/plugin/updateEndpoint", call)).accepted()
    refused = await traced(tenants, src="blue-one", dst="10.2.1.100")
    refused.refused(422)
    assert "trace one of its backends with tcp/8080: blue:n:blue-two" in refused.body["message"]


async def test_UX3_weft_trace_refuses_with_its_own_code(tenants: Rest) -> None:
    for words in (
        ("10.2.1.2", "10.2.1.1", "tcp/22"),
        ("blue-one", "10.2.1.250", "tcp/22"),
        ("blue-one", "blue-two", "22"),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weft.cli", "trace", "--netmaster", tenants.url, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, error = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, output) == (3, b"")
        assert error.startswith(b"weft trace: ")
