"""Bad input gets a 4xx with the field and the reason, and nothing is written (W2, W19, W20, W21)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

import msgspec
import pytest

from weft.domain import kinds
from weft.lab.servers.masters import API, Rest, running_master

TENANT = {"tenantName": "t1"}
NETWORK = {"tenantName": "default", "networkName": "red", "encap": "vxlan", "subnet": "10.9.0.0/24"}
GROUP = {"tenantName": "default", "groupName": "app", "networkName": "blue"}
POLICY = {"tenantName": "default", "policyName": "p9"}
RULE = {"tenantName": "default", "policyName": "p", "ruleId": "9", "direction": "in", "action": "allow"}
PROFILE = {"tenantName": "default", "profileName": "gold"}
SERVICE = {"tenantName": "default", "serviceName": "s", "networkName": "blue",
           "selectors": ["app=web"], "ports": ["80:8080:TCP"]}  # fmt: skip
BGP = {"hostname": "n1", "routerip": "50.1.1.2/24", "as": "65002", "neighbor-as": "500", "neighbor": "50.1.1.1"}
GLOBAL = {"name": "global", "fwdMode": "routing"}

GOOD: dict[str, dict[str, object]] = {
    "tenants": {**TENANT},
    "networks": {**NETWORK},
    "endpointGroups": {**GROUP},
    "policys": {**POLICY},
    "rules": {**RULE},
    "netprofiles": {**PROFILE},
    "serviceLBs": {**SERVICE},
    "Bgps": {**BGP},
    "globals": {**GLOBAL},
}

BAD_NAMES = {
    "a slash": "a/b",
    "parents": "..",
    "a dot": ".",
    "a colon": "a:b",
    "a bar": "a|b",
    "an underscore": "a_b",
    "a leading hyphen": "-a",
    "a trailing hyphen": "a-",
    "a trailing dot": "a.",
    "an empty label": "a..b",
    "a blank": "a b",
    "a newline at the end": "a\n",
    "a control character": "a\x07b",
    "a null": "a\0b",
    "letters of others": "tenänt",
    "digits of others": "a٣",
    "65 characters": "a" * 65,
    "a lot": "a" * 5000,
}


def key_of(plural: str, members: Mapping[str, object]) -> str:
    return ":".join(str(members[name]) for name in kinds.BY_PLURAL[plural].key_members())


@pytest.fixture
async def used() -> AsyncIterator[Rest]:
    """A netmaster that has a network `blue`, a group `web` with an endpoint, and a policy `p`."""
    async with running_master() as rest:
        network = {"tenantName": "default", "networkName": "blue", "encap": "vxlan", "subnet": "10.1.1.0/24"}
        (await rest.put("networks", **network, gateway="10.1.1.254")).accepted()
        (await rest.put("policys", tenantName="default", policyName="p")).accepted()
        group = {"tenantName": "default", "groupName": "web", "networkName": "blue", "policies": ["p"]}
        (await rest.put("endpointGroups", **group)).accepted()
        (await rest.create_endpoint("e1", network="blue", group="web")).accepted()
        yield rest


@pytest.mark.parametrize("plural", GOOD)
async def test_the_unmodified_examples_are_valid(used: Rest, plural: str) -> None:
    (await used.put(plural, **GOOD[plural])).accepted()


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
async def test_bad_names_are_rejected_in_the_body_and_in_the_path(used: Rest, name: str) -> None:
    """O2, for every member that is a name."""
    before = await used.state()
    for plural, member in (
        ("tenants", "tenantName"),
        ("networks", "networkName"),
        ("endpointGroups", "groupName"),
        ("policys", "policyName"),
        ("rules", "ruleId"),
        ("netprofiles", "profileName"),
    ):
        members = GOOD[plural] | {member: name}
        path = f"{API}/{plural}/{quote(key_of(plural, members), safe=':')}/"
        answer = await used.send("PUT", path, data=msgspec.json.encode(members))
        if ":" in name:
            answer.refused(400, field="key")
        else:
            answer.refused(422, field=member)
        for method in ("GET", "DELETE"):
            assert (await used.send(method, path)).status in {400, 404}
    assert await used.state() == before


BAD: dict[str, list[tuple[str, object]]] = {
    "tenants": [
        ("defaultNetwork", "a/b"),
    ],
    "networks": [
        ("tenantName", "none"),
        ("encap", "gre"),
        ("encap", ""),
        ("nwType", "other"),
        ("pktTag", -1),
        ("pktTag", 1 << 24),
        ("pktTag", 10**30),
        ("pktTag", 1.5),
        ("pktTag", "7"),
        ("pktTag", True),
        ("subnet", ""),
        ("subnet", "10.9.0.0"),
        ("subnet", "10.9.0.0/7"),
        ("subnet", "10.9.0.0/32"),
        ("subnet", "10.9.0.0/024"),
        ("subnet", "10.9.0.0/٢٤"),
        ("subnet", "10.9.0.256/24"),
        ("subnet", "010.9.0.0/24"),
        ("subnet", "10.9.0.0/24\n"),
        ("subnet", "10.9.0.9-10.9.0.5/24"),
        ("subnet", "10.9.0.9-10.9.1.5/24"),
        ("subnet", "10.9.0.1-10.9.0.5-10.9.0.9/24"),
        ("subnet", "fd00::/64"),
        ("gateway", "10.8.0.1"),
        ("gateway", "10.9.0.0"),
        ("gateway", "10.9.0.255"),
        ("gateway", "10.9.0.1/24"),
        ("ipv6Subnet", "fd00::/128"),
        ("ipv6Subnet", "fd00::/15"),
        ("ipv6Subnet", "10.9.0.0/24"),
        ("ipv6Subnet", "fd00::%eth0/64"),
        ("ipv6Gateway", "fd00::1"),
        ("cfgdTag", "a b"),
        ("cfgdTag", "a" * 129),
    ],
    "endpointGroups": [
        ("networkName", "none"),
        ("policies", ["p", "none"]),
        ("policies", ["p", "p"]),
        ("policies", "p"),
        ("netProfile", "none"),
        ("ipPool", "10.1.1.10-10.1.1.9"),
        ("ipPool", "fd00::1"),
        ("ipPool", "10.1.2.1-10.1.2.9"),
    ],
    "policys": [
        ("mode", "yes"),
    ],
    "rules": [
        ("direction", "both"),
        ("action", "drop"),
        ("priority", 0),
        ("priority", 101),
        ("protocol", "tcp "),
        ("protocol", "256"),
        ("port", 65536),
        ("port", 80),
        ("fromEndpointGroup", "none"),
        ("fromNetwork", "none"),
        ("fromIpAddress", "10.1.1.5-٩"),
        ("fromIpAddress", "10.1.1.9-5"),
        ("fromIpAddress", "10.1.1.1/33"),
        ("policyName", "none"),
    ],
    "netprofiles": [
        ("bandwidth", "fast"),
        ("bandwidth", "٣G"),
        ("DSCP", 64),
        ("burst", 10487),
    ],
    "serviceLBs": [
        ("networkName", "none"),
        ("ipAddress", "10.2.0.1"),
        ("ipAddress", "10.1.1.254"),
        ("ipAddress", "fd00::1"),
        ("selectors", []),
        ("selectors", ["app"]),
        ("selectors", ["a=b=c"]),
        ("selectors", ["=x"]),
        ("selectors", ["app=w\x07b"]),
        ("selectors", ["app=" + "w" * 3000]),
        ("ports", []),
        ("ports", ["80:8080:TCP", "81:8081"]),
        ("ports", ["80:8080:TCP", "81:0:TCP"]),
        ("ports", ["80:8080:TCP", "80:8081:tcp"]),
        ("ports", ["80:8080:SCTP"]),
        ("ports", ["80:٣:TCP"]),
    ],
    "Bgps": [
        ("routerip", "50.1.1.2"),
        ("routerip", "50.1.1.2/٢٤"),
        ("as", "0"),
        ("as", "4294967296"),
        ("neighbor-as", "AS500"),
        ("neighbor", "router"),
    ],
    "globals": [
        ("vlans", "1-5000"),
        ("vxlans", "9-1"),
        ("fwdMode", "both"),
        ("arpMode", "other"),
        ("pvtSubnet", "172.19.0.0/24"),
        ("networkInfraType", "aci"),
    ],
}


@pytest.mark.parametrize("plural", BAD)
async def test_bad_members_are_rejected_with_their_names(used: Rest, plural: str) -> None:
    before = await used.state()
    for member, value in BAD[plural]:
        answer = await used.put(plural, **(GOOD[plural] | {member: value}))
        assert answer.status in {409, 422}, (member, value, answer)
        answer.refused(answer.status, field=member)
        assert await used.state() == before


@pytest.mark.parametrize("plural", GOOD)
async def test_members_that_are_missing_unknown_or_of_another_type(used: Rest, plural: str) -> None:
    before = await used.state()
    good = GOOD[plural]
    key = key_of(plural, good)
    (await used.put_at(plural, key, good | {"colour": "red"})).refused(422, field="colour")
    (await used.put_at(plural, f"x{key}", good)).refused(422)
    for member in good:
        for wrong in (None, 5.5, {"x": 1}, [[1]]):
            answer = await used.put_at(plural, key, good | {member: wrong})
            assert answer.status == 422, (member, wrong, answer)
            assert answer.body["field"].split("[")[0] == member
    first = next(iter(good))
    if plural != "globals":
        rest = {name: value for name, value in good.items() if name != first}
        (await used.put_at(plural, key, rest)).refused(422, field=first)
    assert await used.state() == before


@pytest.mark.parametrize(
    ("plural", "member", "value"),
    [
        ("networks", "tags", {"vlan": 5}),
        ("endpointGroups", "groupId", 7),
        ("serviceLBs", "vip", "10.1.1.9"),
        ("serviceLBs", "ipv6Vip", "fd00::9"),
    ],
)
async def test_read_only_members_cannot_be_set(used: Rest, plural: str, member: str, value: object) -> None:
    before = await used.state()
    assert "read-only" in (await used.put(plural, **(GOOD[plural] | {member: value}))).refused(422, field=member)
    assert await used.state() == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"t1"',
        b"\xff\xfe",
        b'{"tenantName":"\xff"}',
        b'{"tenantName":"\\ud800"}',
        b'{"tenantName":"t1"} trailing',
        b"<tenant/>",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 200_000,
        b'{"tenantName":"t1","defaultNetwork":NaN}',
    ],
    ids=lambda body: repr(body[:20]),
)
async def test_a_body_that_is_not_a_json_object_is_rejected(rest: Rest, body: bytes) -> None:
    before = await rest.state()
    answer = await rest.send("PUT", f"{API}/tenants/t1/", data=body, headers={"Content-Type": "application/json"})
    assert answer.status in {400, 422}
    answer.refused(answer.status)
    call = await rest.send("POST", "/plugin/createEndpoint", data=body, headers={"Content-Type": "application/json"})
    assert call.status in {400, 422}
    call.refused(call.status)
    assert await rest.state() == before


@pytest.mark.parametrize("path", [f"{API}/tenants/t1/", "/plugin/createEndpoint"])
async def test_a_huge_body_is_rejected(rest: Rest, path: str) -> None:
    before = await rest.state()
    body = b'{"tenantName":"' + b"a" * (1 << 20) + b'"}'
    answer = await rest.send("POST", path, data=body, headers={"Content-Type": "application/json"})
    answer.refused(413)
    assert await rest.state() == before


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/tenants/%ff/",
        "/api/v1/tenants/%00/",
        "/api/v1/tenants/%F0%9F%98%80/",
        "/api/v1/tenants/%2e%2e%2f%2e%2e%2fetc%2fpasswd/",
        "/api/v1/tenants/a%0d%0aX-Injected:1/",
        "/api/v1/networks/default/",
        "/api/v1/networks/a:b:c/",
        "/api/v1/networks/:/",
        "/api/v1/networks/%20:%20/",
        "/api/v1/inspect/networks/default/",
        "/api/v1/inspect/endpoints/%ff/",
        "/service/%ff",
        "/debug/epcleanup/tenant/default/net/%ff",
        "/api/v1/networks/?%ff=%ff",
        "/api/v1/networks/?continue=%ff%00&limit=1&limit=x",
        "/api/v1/networks/?since=0",
        "/api/v1/networks/?watch=maybe",
        "/api/v1/" + "x" * 7000,
    ],
)
async def test_malformed_paths_and_queries_are_rejected(used: Rest, path: str) -> None:
    before = await used.state()
    for method in ("GET", "PUT", "DELETE"):
        answer = await used.send(method, path, data=b"{}" if method == "PUT" else None)
        assert answer.status in {200, 400, 404, 405, 414, 422}, (method, answer)
        assert "X-Injected" not in answer.headers
        if answer.status != 200:
            answer.refused(answer.status)
    assert await used.state() == before
