"""Endpoints and addresses by REST, scenario by scenario (contiv 10.10).

What the original checked in its switch (flows that come and go) waits for the agent; here is what the control plane
answers, with the lists of addresses exactly as it writes them.
"""

from __future__ import annotations

import asyncio

import pytest

from weft.lab.servers.masters import Answer, Rest


async def put_network(rest: Rest, subnet: str, *, name: str = "blue", tenant: str = "default", **members: str) -> None:
    wanted = {"tenantName": tenant, "networkName": name, "encap": "vxlan", "subnet": subnet}
    (await rest.put("networks", **wanted, **members)).accepted()


async def put_group(rest: Rest, name: str, *, pool: str = "", policies: list[str] | None = None) -> Answer:
    members = {"tenantName": "default", "groupName": name, "networkName": "blue", "ipPool": pool}
    return await rest.put("endpointGroups", **members, policies=policies or [])


async def attach(rest: Rest, name: str, *, group: str = "", address: str = "") -> str:
    """The address of a new endpoint on `blue`."""
    answer = await rest.create_endpoint(name, network="blue", group=group, address=address)
    return str(answer.accepted()["EndpointConfig"]["ipAddress"])


async def detach(rest: Rest, *names: str) -> None:
    for name in names:
        (await rest.delete_endpoint(name, network="blue")).accepted()


async def lists(rest: Rest, plural: str = "networks", key: str = "default:blue") -> tuple[str, str]:
    """The texts of allocated and of available addresses."""
    oper = await rest.oper(plural, key)
    return oper.get("allocatedIPAddresses", ""), oper.get("availableIPAddresses", "")


async def test_e1_the_first_address_and_a_requested_one(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24", gateway="10.1.1.254")
    assert await lists(rest) == ("", "10.1.1.1-10.1.1.253")
    assert await attach(rest, "e1") == "10.1.1.1"
    assert await lists(rest) == ("10.1.1.1", "10.1.1.2-10.1.1.253")
    assert await attach(rest, "e5", address="10.1.1.5") == "10.1.1.5"
    assert await lists(rest) == ("10.1.1.1, 10.1.1.5", "10.1.1.2-10.1.1.4, 10.1.1.6-10.1.1.253")
    assert await attach(rest, "e2") == "10.1.1.2"
    assert await lists(rest) == ("10.1.1.1-10.1.1.2, 10.1.1.5", "10.1.1.3-10.1.1.4, 10.1.1.6-10.1.1.253")
    oper = await rest.oper("networks", "default:blue")
    assert oper["allocatedAddressesCount"] == 3
    assert oper["numEndpoints"] == 3
    assert [each["endpointID"] for each in oper["endpoints"]] == ["e1", "e2", "e5"]
    shown = await rest.oper("endpoints", "e5")
    assert (shown["ipAddress"], shown["macAddress"]) == (["10.1.1.5"], "02:02:0a:01:01:05")
    await detach(rest, "e1", "e2", "e5")
    assert await lists(rest) == ("", "10.1.1.1-10.1.1.253")
    assert "endpoints" not in await rest.oper("networks", "default:blue")


async def test_e1_v6_addresses_are_allocated_and_freed_alike(rest: Rest) -> None:
    """E1 with a second family (W19): the v6 address comes from its own subnet and is free again afterwards."""
    await put_network(rest, "10.1.1.0/24", ipv6Subnet="2016:430::/124", ipv6Gateway="2016:430::1")
    before = await rest.state()
    created = (await rest.create_endpoint("e1", network="blue")).accepted()["EndpointConfig"]
    assert (created["ipAddress"], created["ipv6Address"]) == ("10.1.1.1", "2016:430::2")
    assert (await rest.oper("endpoints", "e1"))["ipAddress"] == ["10.1.1.1", "2016:430::2"]
    await detach(rest, "e1")
    assert await rest.state() == before


async def test_e2_ten_creates_at_once_get_ten_addresses(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24", gateway="10.1.1.254")
    addresses = await asyncio.gather(*(attach(rest, f"e{number}") for number in range(10)))
    assert sorted(addresses, key=lambda text: int(text.rpartition(".")[2])) == [f"10.1.1.{n}" for n in range(1, 11)]
    assert await lists(rest) == ("10.1.1.1-10.1.1.10", "10.1.1.11-10.1.1.253")
    await asyncio.gather(*(detach(rest, f"e{number}") for number in range(10)))
    assert await lists(rest) == ("", "10.1.1.1-10.1.1.253")


async def test_e3_a_group_stays_while_it_has_endpoints(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24")
    (await put_group(rest, "web")).accepted()
    await attach(rest, "e1", group="web")
    await attach(rest, "e2", group="web")
    (await rest.delete("endpointGroups", "default:web")).refused(409)
    await detach(rest, "e1")
    (await rest.delete("endpointGroups", "default:web")).refused(409)
    await detach(rest, "e2")
    (await rest.delete("endpointGroups", "default:web")).accepted()
    (await rest.delete("networks", "default:blue")).accepted()


@pytest.mark.parametrize(
    ("subnet", "gateway", "shown", "available"),
    [
        ("10.1.1.0/27", "", "10.1.1.0/27", "10.1.1.1-10.1.1.30"),
        ("10.1.1.32/27", "10.1.1.40", "10.1.1.32/27", "10.1.1.33-10.1.1.39, 10.1.1.41-10.1.1.62"),
        ("10.1.1.5/28", "", "10.1.1.0/28", "10.1.1.1-10.1.1.14"),
        ("10.1.1.0/29", "10.1.1.1", "10.1.1.0/29", "10.1.1.2-10.1.1.6"),
        ("10.1.1.0/30", "", "10.1.1.0/30", "10.1.1.1-10.1.1.2"),
        ("10.1.1.0/30", "10.1.1.2", "10.1.1.0/30", "10.1.1.1"),
        ("10.1.1.0/31", "", "10.1.1.0/31", ""),
        ("10.1.1.10-10.1.1.20/27", "", "10.1.1.10-10.1.1.20/27", "10.1.1.10-10.1.1.20"),
        ("10.1.1.0-10.1.1.31/27", "", "10.1.1.0/27", "10.1.1.1-10.1.1.30"),
        ("10.1.1.10-10.1.1.20/27", "10.1.1.30", "10.1.1.10-10.1.1.20/27", "10.1.1.10-10.1.1.20"),
        ("10.1.1.10-10.1.1.20/27", "10.1.1.15", "10.1.1.10-10.1.1.20/27", "10.1.1.10-10.1.1.14, 10.1.1.16-10.1.1.20"),
        ("10.1.1.20-10.1.1.31/27", "", "10.1.1.20-10.1.1.31/27", "10.1.1.20-10.1.1.30"),
        ("10.1.1.7-10.1.1.7/24", "", "10.1.1.7-10.1.1.7/24", "10.1.1.7"),
        ("10.0.0.0/8", "10.0.0.1", "10.0.0.0/8", "10.0.0.2-10.255.255.254"),
    ],
)
async def test_e4_subnets_in_all_forms(rest: Rest, subnet: str, gateway: str, shown: str, available: str) -> None:
    """E4: available is exactly the range, without the network's own, the broadcast and the gateway's address."""
    await put_network(rest, subnet, gateway=gateway)
    assert (await rest.get("networks", "default:blue")).accepted()["subnet"] == shown
    assert await lists(rest) == ("", available)
    if available:
        assert await attach(rest, "e1") == available.partition("-")[0].partition(",")[0]
    else:
        answer = await rest.create_endpoint("e1", network="blue")
        answer.refused(409)
        assert answer.body["code"] == "exhausted"


async def test_e5_a_group_allocates_from_its_pool_until_it_is_exhausted(rest: Rest) -> None:
    await put_network(rest, "10.36.28.0/24", gateway="10.36.28.1")
    (await put_group(rest, "web", pool="10.36.28.10-10.36.28.12")).accepted()
    assert await attach(rest, "e1", group="web") == "10.36.28.10"
    assert await lists(rest, "endpointGroups", "default:web") == ("10.36.28.10", "10.36.28.11-10.36.28.12")
    assert await attach(rest, "e2", group="web") == "10.36.28.11"
    assert await attach(rest, "e3", group="web") == "10.36.28.12"
    assert await lists(rest, "endpointGroups", "default:web") == ("10.36.28.10-10.36.28.12", "")
    answer = await rest.create_endpoint("e4", network="blue", group="web")
    assert "default:web" in answer.refused(409)
    assert answer.body["code"] == "exhausted"
    await detach(rest, "e2")
    assert await lists(rest, "endpointGroups", "default:web") == ("10.36.28.10, 10.36.28.12", "10.36.28.11")
    assert await attach(rest, "e4", group="web") == "10.36.28.11"


async def test_e5_a_pool_of_one_address_works(rest: Rest) -> None:
    """W20: the original accepted it and then failed on an index."""
    await put_network(rest, "10.1.1.0/24")
    assert (await put_group(rest, "web", pool="10.1.1.9")).accepted()["ipPool"] == "10.1.1.9"
    assert await attach(rest, "e1", group="web") == "10.1.1.9"
    (await rest.create_endpoint("e2", network="blue", group="web")).refused(409)


@pytest.mark.parametrize(
    ("pool", "status"),
    [
        ("10.1.1.0-10.1.1.10", 422),
        ("10.1.1.250-10.1.1.255", 422),
        ("10.1.2.1-10.1.2.10", 422),
        ("10.1.1.200-10.1.2.10", 422),
        ("10.1.1.1-10.1.1.320", 422),
        ("10.1.1.0/28", 422),
        ("10.1.1.20-10.1.1.10", 422),
        ("10.1.1.15-10.1.1.25", 409),
        ("10.1.1.20", 409),
        ("10.1.1.50-10.1.1.60", 409),
        ("10.1.1.250-10.1.1.254", 409),
    ],
)
async def test_e6_bad_pools_are_rejected(rest: Rest, pool: str, status: int) -> None:
    """E6: outside or not a range at all; overlapping another pool, a used address or the gateway."""
    await put_network(rest, "10.1.1.0/24", gateway="10.1.1.254")
    (await put_group(rest, "db", pool="10.1.1.20-10.1.1.30")).accepted()
    await attach(rest, "e1", address="10.1.1.55")
    before = await rest.state()
    (await put_group(rest, "web", pool=pool)).refused(status, field="ipPool")
    assert await rest.state() == before


async def test_e6_a_pool_is_free_again_with_its_group(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24")
    (await put_group(rest, "db", pool="10.1.1.20-10.1.1.30")).accepted()
    (await rest.delete("endpointGroups", "default:db")).accepted()
    assert await lists(rest) == ("", "10.1.1.1-10.1.1.254")
    (await put_group(rest, "web", pool="10.1.1.25-10.1.1.35")).accepted()


async def test_e7_a_pool_never_changes(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24")
    (await put_group(rest, "web", pool="10.1.1.20-10.1.1.30")).accepted()
    (await put_group(rest, "db")).accepted()
    for name, pool in (("web", "10.1.1.20-10.1.1.40"), ("web", ""), ("db", "10.1.1.50-10.1.1.60")):
        (await put_group(rest, name, pool=pool)).refused(409, field="ipPool")


async def test_e8_groups_with_and_without_a_pool_are_disjoint(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24", gateway="10.1.1.254")
    (await put_group(rest, "plain")).accepted()
    (await put_group(rest, "low", pool="10.1.1.1-10.1.1.10")).accepted()
    (await put_group(rest, "high", pool="10.1.1.100-10.1.1.102")).accepted()
    assert await lists(rest) == ("", "10.1.1.11-10.1.1.99, 10.1.1.103-10.1.1.253")
    assert await attach(rest, "p1", group="plain") == "10.1.1.11"
    assert await attach(rest, "n1") == "10.1.1.12"
    assert await attach(rest, "l1", group="low") == "10.1.1.1"
    assert await attach(rest, "h1", group="high", address="10.1.1.101") == "10.1.1.101"
    assert await attach(rest, "h2", group="high") == "10.1.1.100"
    assert await lists(rest, "endpointGroups", "default:low") == ("10.1.1.1", "10.1.1.2-10.1.1.10")
    assert await lists(rest, "endpointGroups", "default:high") == ("10.1.1.100-10.1.1.101", "10.1.1.102")
    assert await lists(rest) == (
        "10.1.1.1, 10.1.1.11-10.1.1.12, 10.1.1.100-10.1.1.101",
        "10.1.1.13-10.1.1.99, 10.1.1.103-10.1.1.253",
    )
    for group, address in (("plain", "10.1.1.2"), ("", "10.1.1.102"), ("low", "10.1.1.50"), ("high", "10.1.1.2")):
        answer = await rest.create_endpoint("odd", network="blue", group=group, address=address)
        answer.refused(422, field="IPAddress")


async def test_e9_a_group_shows_its_endpoints(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24")
    (await put_group(rest, "web")).accepted()
    (await put_group(rest, "db")).accepted()
    for name, group in (("e1", "web"), ("e2", "web"), ("e3", "db"), ("e4", "")):
        await attach(rest, name, group=group)
    oper = await rest.oper("endpointGroups", "default:web")
    assert oper["numEndpoints"] == 2
    assert [(each["endpointID"], each["ipAddress"]) for each in oper["endpoints"]] == [
        ("e1", ["10.1.1.1"]),
        ("e2", ["10.1.1.2"]),
    ]
    assert {each["endpointGroupKey"] for each in oper["endpoints"]} == {"web:default"}
    assert (oper["groupTag"], oper["pktTag"], oper["externalPktTag"]) == ("web.default", 1, 1)


async def test_e10_a_tenant_shows_its_totals_and_goes_in_order(rest: Rest) -> None:
    await rest.put("tenants", tenantName="t1")
    for number in (1, 2):
        await put_network(rest, f"10.1.{number}.0/24", name=f"net{number}", tenant="t1")
    await rest.put("policys", tenantName="t1", policyName="p")
    await rest.put("netprofiles", tenantName="t1", profileName="gold")
    await rest.put("endpointGroups", tenantName="t1", groupName="web", networkName="net1", policies=["p"])
    service = {"serviceName": "s", "networkName": "net2", "selectors": ["a=b"], "ports": ["1:1:TCP"]}
    await rest.put("serviceLBs", tenantName="t1", **service)
    for name, group in (("e1", "web"), ("e2", "")):
        (await rest.create_endpoint(name, network="net1", tenant="t1", group=group)).accepted()
    oper = await rest.oper("tenants", "t1")
    assert {name: value for name, value in oper.items() if name.startswith("total")} == {
        "totalNetworks": 2,
        "totalEPGs": 1,
        "totalPolicies": 1,
        "totalNetprofiles": 1,
        "totalServicelbs": 1,
        "totalEndpoints": 2,
    }
    assert [each["networkName"] for each in oper["networks"]] == ["net1", "net2"]
    assert [each["groupName"] for each in oper["endpointGroups"]] == ["web"]
    assert [each["endpointID"] for each in oper["endpoints"]] == ["e1", "e2"]
    for step in ("endpointGroups/t1:web", "networks/t1:net1", "networks/t1:net2", "policys/t1:p", "tenants/t1"):
        (await rest.delete(*step.split("/"))).refused(409)
    for name in ("e1", "e2"):
        (await rest.delete_endpoint(name, network="net1", tenant="t1")).accepted()
    order = ("endpointGroups/t1:web", "serviceLBs/t1:s", "networks/t1:net1", "networks/t1:net2")
    for step in (*order, "policys/t1:p", "netprofiles/t1:gold", "tenants/t1"):
        (await rest.delete("tenants", "t1")).refused(409) if step != "tenants/t1" else None
        (await rest.delete(*step.split("/"))).accepted()
    assert [key for key in await rest.state() if "t1" in key] == []


async def test_e11_a_policy_shows_the_endpoints_of_all_its_groups(rest: Rest) -> None:
    await put_network(rest, "10.1.1.0/24")
    await rest.put("policys", tenantName="default", policyName="p")
    for name, policies in (("web", ["p"]), ("db", ["p"]), ("other", [])):
        (await put_group(rest, name, policies=policies)).accepted()
        await attach(rest, f"{name}1", group=name)
    oper = await rest.oper("policys", "default:p")
    assert oper["numEndpoints"] == 2
    assert [each["endpointID"] for each in oper["endpoints"]] == ["db1", "web1"]
    (await put_group(rest, "db")).accepted()
    assert (await rest.oper("policys", "default:p"))["numEndpoints"] == 1


@pytest.mark.parametrize("subnet", ["10.1.1.0/29", "10.1.1.3-10.1.1.8/24"])
async def test_e12_an_exhausted_network_reports_it_and_recovers_after_a_release(rest: Rest, subnet: str) -> None:
    await put_network(rest, subnet)
    given = [await attach(rest, f"e{number}") for number in range(6)]
    assert len(set(given)) == 6
    before = await rest.state()
    answer = await rest.create_endpoint("more", network="blue")
    assert "default:blue" in answer.refused(409)
    assert answer.body["code"] == "exhausted"
    assert await rest.state() == before
    await detach(rest, "e3")
    assert await attach(rest, "more") == given[3]


async def test_a_released_address_cools_down_while_others_are_free(rest: Rest) -> None:
    """Cooldown (docs/glossary.md): a peer that still remembers the old holder must not meet a new one there."""
    await put_network(rest, "10.1.1.0/29")
    assert await attach(rest, "e1") == "10.1.1.1"
    await detach(rest, "e1")
    assert await attach(rest, "e2") == "10.1.1.2"
    assert await attach(rest, "e3", address="10.1.1.1") == "10.1.1.1"
