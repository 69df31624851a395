"""The objects by REST, scenario by scenario (contiv 10.11, without those of ACI: O12, O17, O18, O24)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.lab.servers.masters import Answer, Rest, running_master


async def put_network(rest: Rest, name: str, subnet: str, /, *, tenant: str = "default", **members: object) -> Answer:
    wanted = {"tenantName": tenant, "networkName": name, "encap": "vxlan", "subnet": subnet} | members
    return await rest.put("networks", **wanted)


async def put_group(rest: Rest, name: str, network: str = "blue", /, **members: object) -> Answer:
    return await rest.put("endpointGroups", tenantName="default", groupName=name, networkName=network, **members)


async def put_policy(rest: Rest, name: str, tenant: str = "default") -> Answer:
    return await rest.put("policys", tenantName=tenant, policyName=name)


async def put_rule(rest: Rest, rule: str, /, **members: object) -> Answer:
    wanted = {"tenantName": "default", "policyName": "p", "direction": "in", "action": "allow"} | members
    return await rest.put("rules", ruleId=rule, **wanted)


async def put_global(rest: Rest, **members: object) -> Answer:
    return await rest.put("globals", **({"name": "global", "fwdMode": "routing"} | members))


async def test_o1_a_tenant_stays_while_anything_is_in_it(rest: Rest) -> None:
    """O1, W16: networks, groups, policies, netprofiles and also services keep their tenant; `default` is never gone."""
    (await rest.put("tenants", tenantName="t1")).accepted()
    (await put_network(rest, "blue", "10.1.1.0/24", tenant="t1")).accepted()
    objects: list[tuple[str, dict[str, Any], str]] = [
        ("endpointGroups", {"groupName": "web", "networkName": "blue"}, "web"),
        ("policys", {"policyName": "p"}, "p"),
        ("netprofiles", {"profileName": "gold"}, "gold"),
        ("serviceLBs", {"serviceName": "s", "networkName": "blue", "selectors": ["a=b"], "ports": ["1:1:TCP"]}, "s"),
    ]
    for plural, members, _ in objects:
        (await rest.put(plural, tenantName="t1", **members)).accepted()
    for plural, _, name in objects:
        (await rest.delete("tenants", "t1")).refused(409)
        (await rest.delete(plural, f"t1:{name}")).accepted()
    answer = await rest.delete("tenants", "t1")
    assert "t1:blue" in answer.refused(409)
    assert answer.body["details"] == {"networks": ["t1:blue"]}
    (await rest.delete("networks", "t1:blue")).accepted()
    (await rest.delete("tenants", "t1")).accepted()
    (await rest.delete("tenants", "default")).refused(409)


@pytest.mark.parametrize("kind", ["networks", "endpointGroups", "policys", "netprofiles"])
async def test_o1_each_kind_alone_keeps_its_tenant(rest: Rest, kind: str) -> None:
    (await rest.put("tenants", tenantName="t1")).accepted()
    (await put_network(rest, "blue", "10.1.1.0/24", tenant="t1")).accepted()
    members: dict[str, dict[str, object]] = {
        "networks": {"networkName": "red", "encap": "vlan", "subnet": "10.2.0.0/24"},
        "endpointGroups": {"groupName": "x", "networkName": "blue"},
        "policys": {"policyName": "x"},
        "netprofiles": {"profileName": "x"},
    }
    (await rest.put(kind, tenantName="t1", **members[kind])).accepted()
    if kind in {"policys", "netprofiles"}:
        (await rest.delete("networks", "t1:blue")).accepted()
    (await rest.delete("tenants", "t1")).refused(409)


@pytest.mark.parametrize("name", ["a:b", "a|b", "-a", "a_b", "a-", "", "a b"])
async def test_o2_bad_names_are_rejected(rest: Rest, name: str) -> None:
    """O2; every other form of a bad name is in test_rest_input.py."""
    (await rest.put_at("tenants", "t1", {"tenantName": name})).refused(422, field="tenantName")


@pytest.mark.parametrize("name", ["a", "A1", "tenant-1", "a.b", "a-b.c-d.1", "1", "x" * 64])
async def test_o2_good_names_are_accepted(rest: Rest, name: str) -> None:
    assert (await rest.put("tenants", tenantName=name)).accepted()["key"] == name


@pytest.mark.parametrize(
    ("present", "wanted"),
    [
        ({"subnet": "10.1.1.0/24"}, {"subnet": "10.1.1.0/24"}),
        ({"subnet": "10.1.1.0/24"}, {"subnet": "10.1.0.0/16", "encap": "vlan"}),
        ({"subnet": "10.1.0.0/16"}, {"subnet": "10.1.1.128/25"}),
        ({"subnet": "10.1.1.10-10.1.1.30/24"}, {"subnet": "10.1.1.30-10.1.1.40/24"}),
        ({"subnet": "10.1.1.10-10.1.1.30/24"}, {"subnet": "10.1.1.0/24", "encap": "vlan"}),
    ],
)
async def test_o3_subnets_of_one_tenant_never_overlap(
    rest: Rest, present: dict[str, object], wanted: dict[str, object]
) -> None:
    """O3: across encaps and ranges; another tenant may have the same."""
    base = {"tenantName": "default", "encap": "vxlan"}
    (await rest.put("networks", **(base | present), networkName="blue")).accepted()
    before = await rest.state()
    (await rest.put("networks", **(base | wanted), networkName="red")).refused(409, field="subnet")
    assert await rest.state() == before
    await rest.put("tenants", tenantName="t1")
    (await rest.put("networks", **(base | wanted | {"tenantName": "t1"}), networkName="red")).accepted()


async def test_o3_v6_subnets_of_one_tenant_never_overlap(rest: Rest) -> None:
    v6 = {"ipv6Subnet": "2016:430::/64", "ipv6Gateway": "2016:430::1"}
    (await put_network(rest, "blue", "10.1.1.0/24", **v6)).accepted()
    (await put_network(rest, "red", "10.1.2.0/24", ipv6Subnet="2016:430::/32")).refused(409, field="ipv6Subnet")
    (await put_network(rest, "red", "10.1.2.0/24", ipv6Subnet="2016:431::/64")).accepted()
    await rest.put("tenants", tenantName="t1")
    (await put_network(rest, "blue", "10.1.1.0/24", tenant="t1", **v6)).accepted()


async def test_o3_disjoint_ranges_of_one_subnet_are_accepted(rest: Rest) -> None:
    """The original's own example (contiv 5)."""
    (await put_network(rest, "blue", "20.1.1.0-20.1.1.30/24")).accepted()
    (await put_network(rest, "red", "20.1.1.35-20.1.1.45/24")).accepted()


async def test_o4_tags_are_the_lowest_free_ones(rest: Rest) -> None:
    """O4: vlan tag 1, external 0; vxlan networks have local tags 1, 2, 3 with VNI 1, 2 and explicitly 1000."""
    (await put_network(rest, "v1", "10.1.1.0/24", encap="vlan")).accepted()
    (await put_network(rest, "x1", "10.1.2.0/24")).accepted()
    (await put_network(rest, "x2", "10.1.3.0/24")).accepted()
    (await put_network(rest, "x3", "10.1.4.0/24", pktTag=1000)).accepted()
    tags = {}
    for name in ("v1", "x1", "x2", "x3"):
        oper = await rest.oper("networks", f"default:{name}")
        tags[name] = (oper["pktTag"], oper.get("externalPktTag", 0))
    assert tags == {"v1": (1, 0), "x1": (1, 1), "x2": (2, 2), "x3": (3, 1000)}
    (await rest.delete("networks", "default:x1")).accepted()
    (await put_network(rest, "x4", "10.1.5.0/24")).accepted()
    oper = await rest.oper("networks", "default:x4")
    assert (oper["pktTag"], oper["externalPktTag"]) == (1, 1)


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"nwType": "other"}, "nwType"),
        ({"subnet": "10.1.1.20-10.1.1.10/24"}, "subnet"),
        ({"subnet": "10.1.1.1/32"}, "subnet"),
        ({"ipv6Subnet": "2016:430::/128"}, "ipv6Subnet"),
        ({"tenantName": "none"}, "tenantName"),
        ({"encap": "gre"}, "encap"),
        ({"encap": "vlan", "pktTag": 5000}, "pktTag"),
        ({"pktTag": 20000}, "pktTag"),
        ({"gateway": "10.1.2.254"}, "gateway"),
        ({"ipv6Subnet": "2016:430::/64", "ipv6Gateway": "2016:431::1"}, "ipv6Gateway"),
    ],
)
async def test_o5_bad_networks_are_rejected(rest: Rest, members: dict[str, object], field: str) -> None:
    before = await rest.state()
    base = {"tenantName": "default", "networkName": "blue", "encap": "vxlan", "subnet": "10.1.1.0/24"}
    (await rest.put("networks", **(base | members))).refused(422, field=field)
    assert await rest.state() == before


@pytest.mark.parametrize("encap", ["vlan", "vxlan"])
async def test_o6_an_explicit_tag_is_allocated_once(rest: Rest, encap: str) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24", encap=encap, pktTag=7)).accepted()
    (await put_network(rest, "red", "10.1.2.0/24", encap=encap, pktTag=7)).refused(409, field="pktTag")
    (await rest.delete("networks", "default:blue")).accepted()
    (await put_network(rest, "red", "10.1.2.0/24", encap=encap, pktTag=7)).accepted()


@pytest.mark.parametrize(("encap", "member"), [("vlan", "vlans"), ("vxlan", "vxlans")])
async def test_o7_o8_a_range_covers_the_tags_in_use(rest: Rest, encap: str, member: str) -> None:
    """O7 (vlan), O8 (vxlan): shrinking below a tag in use is refused; explicit tags outside the range too."""
    (await put_network(rest, "blue", "10.1.1.0/24", encap=encap, pktTag=1200)).accepted()
    (await put_global(rest, **{member: "1-1000"})).refused(409, field=member)
    (await put_global(rest, **{member: "1201-1300"})).refused(409, field=member)
    (await put_global(rest, **{member: "1100-1300"})).accepted()
    (await put_network(rest, "red", "10.1.2.0/24", encap=encap, pktTag=1301)).refused(422, field="pktTag")
    (await put_network(rest, "red", "10.1.2.0/24", encap=encap)).accepted()
    oper = await rest.oper("networks", "default:red")
    assert oper["pktTag" if encap == "vlan" else "externalPktTag"] == 1100
    assert (await rest.oper("globals", "global"))[f"{member}InUse"] == "1100, 1200"


async def test_o7_o8_an_exhausted_range_is_reported(rest: Rest) -> None:
    (await put_global(rest, vlans="5-5", vxlans="9-9")).accepted()
    for encap, subnet in (("vlan", "10.1.1.0/24"), ("vxlan", "10.1.2.0/24")):
        (await put_network(rest, encap, subnet, encap=encap)).accepted()
        answer = await put_network(rest, f"{encap}2", "10.1.3.0/24", encap=encap)
        answer.refused(409)
        assert answer.body["code"] == "exhausted"


async def test_o9_the_forwarding_mode_changes_only_without_networks(rest: Rest) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    (await put_global(rest, fwdMode="bridge")).refused(409, field="fwdMode")
    (await rest.delete("networks", "default:blue")).accepted()
    (await put_global(rest, fwdMode="bridge")).accepted()
    (await put_global(rest, fwdMode="routing")).accepted()


async def test_o9_bgp_needs_routing(rest: Rest) -> None:
    peer = {"hostname": "n1", "routerip": "50.1.1.2/24", "as": "65002", "neighbor-as": "500"}
    (await rest.put("Bgps", **peer)).accepted()
    (await put_global(rest, fwdMode="bridge")).refused(409, field="fwdMode")


async def test_o10_the_private_subnet_changes_only_without_networks(rest: Rest) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    (await put_global(rest, pvtSubnet="172.21.0.0/16")).refused(409, field="pvtSubnet")
    (await rest.delete("networks", "default:blue")).accepted()
    (await put_global(rest, pvtSubnet="172.21.0.0/24")).refused(422, field="pvtSubnet")
    assert (await put_global(rest, pvtSubnet="172.21.0.0/16")).accepted()["pvtSubnet"] == "172.21.0.0/16"


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("networkInfraType", "xyz"),
        ("vlans", "1-5000"),
        ("vlans", "0-4094"),
        ("vlans", "1"),
        ("vlans", "?"),
        ("vlans", "100-10"),
        ("vxlans", "1-100000"),
        ("vxlans", "1-16001"),
        ("vxlans", "0-100"),
        ("vxlans", "1-16777216"),
        ("name", "other"),
    ],
)
async def test_o11_bad_settings_are_rejected(rest: Rest, member: str, value: str) -> None:
    before = await rest.state()
    members = {"name": "global", "fwdMode": "routing"} | {member: value}
    (await rest.put_at("globals", members["name"], members)).refused(422, field=member)
    assert await rest.state() == before


async def test_o14_a_group_has_several_policies(rest: Rest) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    for name in ("p1", "p2", "p3"):
        (await put_policy(rest, name)).accepted()
    (await put_group(rest, "web", policies=["p1", "p2"])).accepted()
    changed = (await put_group(rest, "web", policies=["p2", "p3"])).accepted()
    assert changed["policies"] == ["p2", "p3"]
    assert sorted(changed["link-sets"]["Policies"]) == ["default:p2", "default:p3"]
    (await put_group(rest, "web", policies=["p2", "none"])).refused(422, field="policies")
    assert (await rest.get("endpointGroups", "default:web")).accepted() == changed
    (await rest.delete("policys", "default:p1")).accepted()
    (await rest.delete("policys", "default:p2")).refused(409)
    assert "policies" not in (await put_group(rest, "web")).accepted()
    (await rest.delete("policys", "default:p2")).accepted()


async def test_o15_a_group_and_a_network_never_share_a_name(rest: Rest) -> None:
    """O15, in both orders; other tenants do not matter."""
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    (await put_group(rest, "blue")).refused(409, field="groupName")
    (await put_group(rest, "web")).accepted()
    (await put_network(rest, "web", "10.1.2.0/24")).refused(409, field="networkName")
    await rest.put("tenants", tenantName="t1")
    (await put_network(rest, "web", "10.1.2.0/24", tenant="t1")).accepted()


async def test_o16_the_network_of_a_group_never_changes(rest: Rest) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    (await put_network(rest, "red", "10.1.2.0/24")).accepted()
    (await put_group(rest, "web")).accepted()
    (await put_group(rest, "web", "red")).refused(409, field="networkName")


async def test_a_network_never_changes(rest: Rest) -> None:
    """contiv 2.3; asking for the same again is no change."""
    (await put_network(rest, "blue", "10.1.1.0/24", gateway="10.1.1.254")).accepted()
    (await put_network(rest, "blue", "10.1.1.9/24", gateway="10.1.1.254")).accepted()
    (await put_network(rest, "blue", "10.1.2.0/24", gateway="10.1.1.254")).refused(422, field="gateway")
    (await put_network(rest, "blue", "10.1.1.0/24")).refused(409, field="gateway")
    (await put_network(rest, "blue", "10.1.1.0/24", gateway="10.1.1.254", encap="vlan")).refused(409, field="encap")


class TestRules:
    """O13: the matrix of rules."""

    @pytest.fixture
    async def rules(self, rest: Rest) -> Rest:
        (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
        (await put_policy(rest, "p")).accepted()
        (await put_group(rest, "web")).accepted()
        (await put_group(rest, "db", policies=["p"])).accepted()
        return rest

    async def test_o13_a_rule_id_is_unique(self, rules: Rest) -> None:
        (await put_rule(rules, "1", protocol="tcp", port=80)).accepted()
        (await put_rule(rules, "1", protocol="tcp", port=80)).accepted()
        (await put_rule(rules, "1", protocol="tcp", port=81)).refused(409, field="ruleId")
        (await rules.delete("rules", "default:p:1")).accepted()
        (await put_rule(rules, "1", protocol="tcp", port=81)).accepted()

    @pytest.mark.parametrize(
        "members",
        [
            {"fromEndpointGroup": "web"},
            {"fromEndpointGroup": "web", "fromIpAddress": "10.1.1.5"},
            {"fromNetwork": "blue", "protocol": "icmp"},
            {"fromIpAddress": "10.1.1.0/24", "protocol": "udp", "port": 53},
            {"fromIpAddress": "10.1.1.5-9"},
            {"direction": "out", "toEndpointGroup": "web", "action": "deny"},
            {"direction": "out", "toNetwork": "blue"},
            {"direction": "out", "toIpAddress": "fd00::/64", "protocol": "58", "priority": 100},
            {"direction": "out", "toEndpointGroup": "web", "toIpAddress": "10.1.1.7"},
        ],
    )
    async def test_o13_good_rules_are_accepted(self, rules: Rest, members: dict[str, object]) -> None:
        created = (await put_rule(rules, "1", **members)).accepted()
        assert {name: created[name] for name in members} == members

    @pytest.mark.parametrize(
        ("members", "field"),
        [
            ({"direction": "both"}, "direction"),
            ({"protocol": "xyz"}, "protocol"),
            ({"action": "maybe"}, "action"),
            ({"toNetwork": "blue"}, "toNetwork"),
            ({"toEndpointGroup": "web"}, "toEndpointGroup"),
            ({"fromNetwork": "blue", "fromIpAddress": "10.1.1.1"}, "fromNetwork"),
            ({"fromNetwork": "blue", "fromEndpointGroup": "web"}, "fromNetwork"),
            ({"direction": "out", "fromNetwork": "blue"}, "fromNetwork"),
            ({"direction": "out", "fromEndpointGroup": "web"}, "fromEndpointGroup"),
            ({"direction": "out", "fromIpAddress": "10.1.1.1"}, "fromIpAddress"),
            ({"direction": "out", "toNetwork": "blue", "toIpAddress": "10.1.1.1"}, "toNetwork"),
            ({"direction": "out", "toNetwork": "blue", "toEndpointGroup": "web"}, "toNetwork"),
            ({"fromNetwork": "none"}, "fromNetwork"),
            ({"fromEndpointGroup": "none"}, "fromEndpointGroup"),
            ({"direction": "out", "toNetwork": "none"}, "toNetwork"),
            ({"direction": "out", "toEndpointGroup": "none"}, "toEndpointGroup"),
            ({"policyName": "none"}, "policyName"),
            ({"tenantName": "none"}, "tenantName"),
        ],
    )
    async def test_o13_bad_rules_are_rejected(self, rules: Rest, members: dict[str, object], field: str) -> None:
        before = await rules.state()
        (await put_rule(rules, "1", **members)).refused(422, field=field)
        assert await rules.state() == before

    async def test_o13_an_own_address_needs_one_group_that_has_it(self, rules: Rest) -> None:
        """`in` with toIpAddress: exactly one group has the policy, and one of its endpoints the address."""
        (await put_rule(rules, "1", toIpAddress="10.1.1.1")).refused(422, field="toIpAddress")
        (await rules.create_endpoint("e1", network="blue", group="web")).accepted()
        (await put_rule(rules, "1", toIpAddress="10.1.1.1")).refused(422, field="toIpAddress")
        (await rules.create_endpoint("e2", network="blue", group="db")).accepted()
        (await put_rule(rules, "1", toIpAddress="10.1.1.2")).accepted()
        (await put_group(rules, "web", policies=["p"])).accepted()
        (await put_rule(rules, "2", toIpAddress="10.1.1.2")).refused(422, field="toIpAddress")
        (await put_group(rules, "web")).accepted()
        (await put_group(rules, "db")).accepted()
        (await put_rule(rules, "2", toIpAddress="10.1.1.2")).refused(422, field="toIpAddress")


class TestProfiles:
    """O19: netprofiles."""

    @pytest.mark.parametrize("bandwidth", ["10 Gbps", "10 gb", "4G", "20mb", "500 kbps", "1k", ""])
    async def test_o19_good_bandwidths(self, rest: Rest, bandwidth: str) -> None:
        members = {"profileName": "gold", "bandwidth": bandwidth, "DSCP": 10, "burst": 2}
        created = (await rest.put("netprofiles", tenantName="default", **members)).accepted()
        assert created.get("bandwidth", "") == bandwidth

    @pytest.mark.parametrize("bandwidth", ["invalid", "10 ms", "Gbps", "0 Gbps", " 10 Gbps", "10  Gbps", "1.5G", "10"])
    async def test_o19_bad_bandwidths(self, rest: Rest, bandwidth: str) -> None:
        members = {"profileName": "gold", "bandwidth": bandwidth}
        (await rest.put("netprofiles", tenantName="default", **members)).refused(422, field="bandwidth")

    @pytest.mark.parametrize(("member", "value"), [("DSCP", 72), ("DSCP", -1), ("burst", 1), ("burst", -1)])
    async def test_o19_bad_numbers(self, rest: Rest, member: str, value: int) -> None:
        members = {"profileName": "gold", member: value}
        (await rest.put("netprofiles", tenantName="default", **members)).refused(422, field=member)

    async def test_o19_a_profile_in_use_can_be_changed_but_not_deleted(self, rest: Rest) -> None:
        """An update is seen by its groups, since they only name it; made again, nothing of the old one is left."""
        (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
        gold = {"tenantName": "default", "profileName": "gold"}
        (await put_group(rest, "web", netProfile="gold")).refused(422, field="netProfile")
        (await rest.put("netprofiles", **gold, bandwidth="10 Gbps", DSCP=3, burst=20)).accepted()
        (await put_group(rest, "web", netProfile="gold")).accepted()
        changed = (await rest.put("netprofiles", **gold, bandwidth="20mb")).accepted()
        assert changed["bandwidth"] == "20mb"
        assert "DSCP" not in changed
        assert list(changed["link-sets"]["EndpointGroups"]) == ["default:web"]
        (await rest.delete("netprofiles", "default:gold")).refused(409)
        assert "netProfile" not in (await put_group(rest, "web")).accepted()
        (await rest.delete("netprofiles", "default:gold")).accepted()
        again = (await rest.put("netprofiles", **gold)).accepted()
        assert set(again) == {"key", "tenantName", "profileName", "links"}


async def test_o20_providers_come_before_and_after_the_service(rest: Rest) -> None:
    """O20, W22: one rule, containment, whichever of the two came first."""
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    service = {"tenantName": "default", "serviceName": "s", "networkName": "blue"}
    wanted = service | {"selectors": ["app=web", "tier=front"], "ports": ["80:8080:TCP"]}

    async def start(name: str, **labels: str) -> None:
        (await rest.create_endpoint(name, network="blue")).accepted()
        call = {"Event": "start", "Tenant": "default", "EndpointID": name, "Labels": labels}
        (await rest.post("/plugin/updateEndpoint", call)).accepted()

    async def providers() -> list[str]:
        oper = await rest.oper("serviceLBs", "default:s")
        found = [each["endpointID"] for each in oper.get("providers", [])]
        assert oper.get("numProviders", 0) == len(found)
        return found

    await start("before", app="web", tier="front", zone="a")
    await start("other", app="web")
    (await rest.put("serviceLBs", **wanted, ipAddress="10.1.1.9")).accepted()
    assert (await rest.oper("serviceLBs", "default:s"))["serviceVip"] == "10.1.1.9"
    assert await providers() == ["before"]
    await start("later", app="web", tier="front", zone="b")
    assert await providers() == ["before", "later"]
    await rest.post("/plugin/updateEndpoint", {"Event": "die", "Tenant": "default", "EndpointID": "before"})
    assert await providers() == ["later"]
    (await rest.put("serviceLBs", **(wanted | {"selectors": ["app=web"]}))).accepted()
    assert await providers() == ["later", "other"]
    (await rest.delete_endpoint("later", network="blue")).accepted()
    assert await providers() == ["other"]
    assert (await rest.oper("serviceLBs", "default:s"))["serviceVip"] == "10.1.1.9"


async def test_a_service_keeps_its_address_until_it_is_deleted(rest: Rest) -> None:
    """contiv 2.3: a change of ports keeps it; another address is taken when asked for, and the old one is free."""
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    service = {"tenantName": "default", "serviceName": "s", "networkName": "blue", "selectors": ["a=b"]}

    async def taken() -> str:
        return str((await rest.oper("networks", "default:blue")).get("allocatedIPAddresses", ""))

    (await rest.put("serviceLBs", **service, ports=["80:80:tcp"])).accepted()
    assert await taken() == "10.1.1.1"
    (await rest.put("serviceLBs", **service, ports=["81:81:udp"])).accepted()
    assert await taken() == "10.1.1.1"
    (await rest.create_endpoint("e1", network="blue", address="10.1.1.7")).accepted()
    (await rest.put("serviceLBs", **service, ports=["81:81:udp"], ipAddress="10.1.1.7")).refused(409, field="ipAddress")
    (await rest.put("serviceLBs", **service, ports=["81:81:udp"], ipAddress="10.1.1.8")).accepted()
    assert await taken() == "10.1.1.7-10.1.1.8"
    (await rest.delete("networks", "default:blue")).refused(409)
    (await rest.delete("serviceLBs", "default:s")).accepted()
    assert await taken() == "10.1.1.7"


async def test_o21_bgp_is_created_inspected_overwritten_and_deleted(rest: Rest) -> None:
    peer = {"hostname": "n1", "routerip": "50.1.1.2/24", "as": "65002", "neighbor-as": "500", "neighbor": "50.1.1.1"}
    (await rest.put("Bgps", **peer)).accepted()
    assert (await rest.inspect("Bgps", "n1")).accepted()["Config"] == {"key": "n1", **peer}
    changed = (await rest.put("Bgps", **(peer | {"routerip": "60.1.1.3/24", "as": "65200"}))).accepted()
    assert (changed["routerip"], changed["as"]) == ("60.1.1.3/24", "65200")
    assert len((await rest.get("Bgps")).accepted()) == 1
    (await rest.delete("Bgps", "n1")).accepted()
    (await rest.inspect("Bgps", "n1")).refused(404)


async def test_o22_an_endpoint_of_an_unknown_group_is_rejected(rest: Rest) -> None:
    (await put_network(rest, "blue", "10.1.1.0/24")).accepted()
    before = await rest.state()
    (await rest.create_endpoint("e1", network="blue", group="none")).refused(422, field="ServiceName")
    assert await rest.state() == before


@pytest.mark.parametrize("mode", ["cni", "kubernetes", "docker", "swarm-mode"])
async def test_o23_the_cluster_mode_is_reported(mode: str, tmp_path: Path) -> None:
    contiv = tmp_path / "contiv.json"  # in mode kubernetes an API server is demanded, be it away
    contiv.write_text('{"K8S_API_SERVER": "http://127.0.0.1:1", "K8S_TOKEN": "word"}')
    async with running_master("--mode", mode, "--contiv-json", str(contiv)) as rest:
        oper = await rest.oper("globals", "global")
        assert oper["clusterMode"] == mode


async def test_deleting_the_settings_restores_the_defaults(rest: Rest) -> None:
    (await put_global(rest, vlans="1-100", arpMode="flood")).accepted()
    (await rest.delete("globals", "global")).accepted()
    settings = (await rest.get("globals", "global")).accepted()
    assert (settings["vlans"], settings["arpMode"], settings["fwdMode"]) == ("1-4094", "proxy", "routing")
