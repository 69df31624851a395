"""The REST protocol, the same for every kind of object (contiv 2.1, 2.5; W2)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from weft import __version__
from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds
from weft.domain.ids import StoreKey
from weft.lab.servers.masters import API, Rest, running_master
from weft.lab.waiting import DEADLINE, soon
from weft.ports.store import Compare, Put, Revision, Write
from weft.runtime.backoff import Backoff

BLUE = {"tenantName": "default", "networkName": "blue", "encap": "vxlan", "subnet": "10.1.1.0/24"}


async def put_networks(rest: Rest, *names: str, tenant: str = "default") -> None:
    for number, name in enumerate(names):
        members = {"tenantName": tenant, "networkName": name, "encap": "vlan", "subnet": f"10.2.{number}.0/24"}
        (await rest.put("networks", **members)).accepted()


class TestObjects:
    async def test_an_object_is_created_read_listed_and_deleted(self, rest: Rest) -> None:
        created = (await rest.put("networks", **BLUE, gateway="10.1.1.254")).accepted()
        assert created["key"] == "default:blue"
        assert (await rest.get("networks", "default:blue")).accepted() == created
        assert (await rest.get("networks")).accepted() == [created]
        assert (await rest.delete("networks", "default:blue")).accepted() == "default:blue"
        (await rest.get("networks", "default:blue")).refused(404)
        (await rest.delete("networks", "default:blue")).refused(404)
        assert (await rest.get("networks")).accepted() == []

    async def test_zero_values_are_left_out_and_meaningful_defaults_shown(self, rest: Rest) -> None:
        created = (await rest.put("networks", **BLUE)).accepted()
        assert created == {
            "key": "default:blue",
            **BLUE,
            "nwType": "data",
            "links": {"Tenant": {"type": "tenant", "key": "default"}},
        }
        await rest.put("policys", tenantName="default", policyName="p")
        rule = {"tenantName": "default", "policyName": "p", "ruleId": "1", "direction": "in", "action": "allow"}
        assert (await rest.put("rules", **rule)).accepted()["priority"] == 1
        settings = (await rest.get("globals", "global")).accepted()
        assert settings == {
            "key": "global",
            "name": "global",
            "networkInfraType": "default",
            "vlans": "1-4094",
            "vxlans": "1-10000",
            "fwdMode": "routing",
            "arpMode": "proxy",
            "pvtSubnet": "172.19.0.0/16",
        }

    @pytest.mark.parametrize("slash", ["", "/"])
    async def test_the_trailing_slash_is_free(self, rest: Rest, slash: str) -> None:
        (await rest.send("PUT", f"{API}/tenants/t1{slash}", data=b'{"tenantName":"t1"}')).accepted()
        (await rest.send("GET", f"{API}/tenants/t1{slash}")).accepted()
        (await rest.send("GET", f"{API}/inspect/tenants/t1{slash}")).accepted()
        (await rest.send("GET", f"{API}/tenants{slash}")).accepted()
        (await rest.send("GET", f"/version{slash}")).accepted()
        (await rest.send("DELETE", f"{API}/tenants/t1{slash}")).accepted()

    async def test_post_and_put_are_the_same(self, rest: Rest) -> None:
        (await rest.post(f"{API}/policys/default:p/", {"tenantName": "default", "policyName": "p"})).accepted()
        changed = {"tenantName": "default", "policyName": "p", "mode": "audit"}
        assert (await rest.post(f"{API}/policys/default:p/", changed)).accepted()["mode"] == "audit"

    async def test_a_response_can_be_sent_back(self, rest: Rest) -> None:
        """The members that we add (`key`, `links`, `link-sets`) are ignored in input, so read-change-write works."""
        await rest.put("networks", **BLUE)
        await rest.put("endpointGroups", tenantName="default", groupName="web", networkName="blue")
        before = await rest.get("endpointGroups", "default:web")
        after = await rest.put_at("endpointGroups", "default:web", before.accepted())
        assert after.accepted() == before.body
        assert after.etag == before.etag

    async def test_links_show_what_belongs_together(self, rest: Rest) -> None:
        await rest.put("networks", **BLUE)
        await rest.put("endpointGroups", tenantName="default", groupName="web", networkName="blue")
        link = {"type": "endpointGroup", "key": "default:web"}
        network = (await rest.get("networks", "default:blue")).accepted()
        assert network["link-sets"]["EndpointGroups"] == {"default:web": link}
        group = (await rest.get("endpointGroups", "default:web")).accepted()
        assert group["links"]["Network"] == {"type": "network", "key": "default:blue"}

    @pytest.mark.parametrize("plural", kinds.BY_PLURAL)
    async def test_every_kind_is_listed_and_unknown_keys_are_not_found(self, rest: Rest, plural: str) -> None:
        assert isinstance((await rest.get(plural)).accepted(), list)
        key = ":".join("none" for _ in kinds.BY_PLURAL[plural].key_members())
        (await rest.get(plural, key)).refused(404)
        (await rest.inspect(plural, key)).refused(404)


class TestPreconditions:
    async def test_the_etag_changes_with_the_object_and_only_then(self, rest: Rest) -> None:
        first = await rest.put("policys", tenantName="default", policyName="p")
        same = await rest.put("policys", tenantName="default", policyName="p")
        assert same.accepted() == first.accepted()
        assert same.etag == first.etag
        await rest.put("policys", tenantName="default", policyName="other")
        assert (await rest.get("policys", "default:p")).etag == first.etag
        changed = await rest.put("policys", tenantName="default", policyName="p", mode="audit")
        assert changed.etag != first.etag
        assert (await rest.inspect("policys", "default:p")).etag == changed.etag

    async def test_an_unchanged_put_writes_nothing_for_any_kind(self, rest: Rest) -> None:
        objects: list[tuple[str, dict[str, object]]] = [
            ("tenants", {"tenantName": "t1"}),
            ("networks", {**BLUE, "gateway": "10.1.1.254"}),
            ("netprofiles", {"tenantName": "default", "profileName": "gold", "bandwidth": "4G"}),
            ("policys", {"tenantName": "default", "policyName": "p"}),
            ("endpointGroups", {"tenantName": "default", "groupName": "web", "networkName": "blue", "policies": ["p"]}),
            ("rules", {"tenantName": "default", "policyName": "p", "ruleId": "1", "direction": "in", "action": "deny"}),
            ("serviceLBs", {"tenantName": "default", "serviceName": "s", "networkName": "blue",
                            "selectors": ["app=web"], "ports": ["80:8080:tcp"]}),
            ("Bgps", {"hostname": "n1", "routerip": "50.1.1.2/24", "as": "65002", "neighbor-as": "500"}),
            ("globals", {"name": "global", "fwdMode": "routing"}),
        ]  # fmt: skip
        for plural, members in objects:
            first = await rest.put(plural, **members)
            first.accepted()
            assert (await rest.put(plural, **members)).etag == first.etag, plural

    async def test_if_match_guards_a_change(self, rest: Rest) -> None:
        tag = (await rest.put("policys", tenantName="default", policyName="p")).etag
        wanted = {"tenantName": "default", "policyName": "p", "mode": "audit"}
        second = await rest.put_at("policys", "default:p", wanted, headers={"If-Match": tag})
        second.accepted()
        late = await rest.put_at("policys", "default:p", wanted, headers={"If-Match": tag})
        late.refused(412)
        (await rest.delete("policys", "default:p", headers={"If-Match": tag})).refused(412)
        (await rest.delete("policys", "default:p", headers={"If-Match": second.etag})).accepted()

    async def test_if_match_star_asks_for_presence(self, rest: Rest) -> None:
        wanted = {"tenantName": "default", "policyName": "p"}
        (await rest.put_at("policys", "default:p", wanted, headers={"If-Match": "*"})).refused(412)
        (await rest.delete("policys", "default:p", headers={"If-Match": "*"})).refused(412)
        await rest.put_at("policys", "default:p", wanted)
        (await rest.put_at("policys", "default:p", wanted, headers={"If-Match": "*"})).accepted()

    async def test_if_none_match_star_asks_for_absence(self, rest: Rest) -> None:
        wanted = {"tenantName": "default", "policyName": "p"}
        (await rest.put_at("policys", "default:p", wanted, headers={"If-None-Match": "*"})).accepted()
        (await rest.put_at("policys", "default:p", wanted, headers={"If-None-Match": "*"})).refused(412)

    @pytest.mark.parametrize(
        "headers", [{"If-Match": "abc"}, {"If-Match": '"1", "2"'}, {"If-Match": ""}, {"If-None-Match": '"5"'}]
    )
    async def test_unsupported_conditions_are_rejected(self, rest: Rest, headers: dict[str, str]) -> None:
        answer = await rest.put_at("tenants", "t1", {"tenantName": "t1"}, headers=headers)
        answer.refused(400, field=next(iter(headers)))
        (await rest.get("tenants", "t1")).refused(404)

    async def test_one_of_many_concurrent_creates_wins(self, rest: Rest) -> None:
        wanted = {"tenantName": "t1"}
        tries = (rest.put_at("tenants", "t1", wanted, headers={"If-None-Match": "*"}) for _ in range(8))
        statuses = sorted(answer.status for answer in await asyncio.gather(*tries))
        assert statuses == [200] + [412] * 7


class TestPaging:
    async def test_pages_return_every_object_once_and_in_order(self, rest: Rest) -> None:
        """Names that sort differently alone than joined by a colon must not be lost between two pages."""
        for tenant in ("a", "a-b", "a.b", "a0", "b"):
            await rest.put("tenants", tenantName=tenant)
            await put_networks(rest, "x", "x-1", "y", tenant=tenant)
        whole = [each["key"] for each in (await rest.get("networks")).accepted()]
        assert len(whole) == 15
        for limit in (1, 2, 7, 15):
            paged: list[str] = []
            after = ""
            while True:
                page = await rest.get("networks", query=f"limit={limit}&continue={after}")
                assert len(page.accepted()) <= limit
                paged += [each["key"] for each in page.body]
                after = page.headers.get("X-Continue", "")
                if not after:
                    break
            assert paged == whole

    @pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e3", "", "%D9%A3"])
    async def test_bad_limits_are_rejected(self, rest: Rest, limit: str) -> None:
        (await rest.get("tenants", query=f"limit={limit}")).refused(400, field="limit")

    async def test_a_list_returns_its_revision(self, rest: Rest) -> None:
        before = int((await rest.get("tenants")).headers["X-Revision"])
        await rest.put("tenants", tenantName="t1")
        assert int((await rest.get("tenants")).headers["X-Revision"]) > before


class TestFilters:
    async def keys(self, rest: Rest, plural: str, query: str) -> list[str]:
        return [each["key"] for each in (await rest.get(plural, query=query)).accepted()]

    async def test_a_list_is_filtered_by_members(self, rest: Rest) -> None:
        await rest.put("tenants", tenantName="t1")
        await put_networks(rest, "x", "y")
        await put_networks(rest, "x", tenant="t1")
        assert await self.keys(rest, "networks", "tenantName=default") == ["default:x", "default:y"]
        assert await self.keys(rest, "networks", "tenantName=t1&networkName=x") == ["t1:x"]
        assert await self.keys(rest, "networks", "encap=vxlan") == []
        assert await self.keys(rest, "networks", "tenantName=default&limit=1") == ["default:x"]

    async def test_lists_flags_and_zeros_can_be_filtered_by(self, rest: Rest) -> None:
        await rest.put("networks", **BLUE)
        for name, mode in (("p", "audit"), ("q", "enforce")):
            await rest.put("policys", tenantName="default", policyName=name, mode=mode)
        for name, policies in (("web", ["p", "q"]), ("db", ["q"])):
            group = {"tenantName": "default", "groupName": name, "networkName": "blue", "policies": policies}
            (await rest.put("endpointGroups", **group)).accepted()
        assert await self.keys(rest, "policys", "mode=audit") == ["default:p"]
        assert await self.keys(rest, "policys", "mode=enforce") == ["default:q"]
        assert await self.keys(rest, "endpointGroups", "policies=p") == ["default:web"]
        assert await self.keys(rest, "networks", "pktTag=0") == ["default:blue"]
        assert await self.keys(rest, "networks", "gateway=") == ["default:blue"]

    async def test_a_filter_by_an_unknown_member_is_rejected(self, rest: Rest) -> None:
        (await rest.get("networks", query="colour=red")).refused(400, field="colour")
        (await rest.get("networks", query="tags=1")).refused(400, field="tags")


class TestRoutes:
    async def test_an_unknown_path_is_not_found(self, rest: Rest) -> None:
        for path in ("/", "/api/v1/", "/api/v1/volumes/", "/api/v2/tenants/", "/api/v1/tenants/a/b/", "/plugin/none"):
            (await rest.send("GET", path)).refused(404)

    async def test_a_wrong_method_lists_the_allowed_ones(self, rest: Rest) -> None:
        answer = await rest.send("OPTIONS", f"{API}/tenants/default/")
        answer.refused(405)
        assert set(answer.headers["Allow"].split(",")) == {"GET", "POST", "PUT", "PATCH", "DELETE"}
        (await rest.send("DELETE", f"{API}/tenants/")).refused(405)
        (await rest.send("GET", "/plugin/createEndpoint")).refused(405)
        (await rest.put("endpoints", tenantName="default", networkName="blue", endpointID="e1")).refused(405)
        (await rest.put("nodes", name="n1")).refused(405)

    async def test_cross_origin_requests_are_rejected(self, rest: Rest) -> None:
        """Whoever opens a page may reach us where its author cannot; our own pages and programs may ask."""
        tenant = b'{"tenantName":"t"}'
        for origin in ("http://elsewhere.example", "null", f"{rest.url}0"):
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            (await rest.send("POST", f"{API}/tenants/t", data=tenant, headers=headers)).refused(403, field="Origin")
        (await rest.get("tenants", "t")).refused(404)
        (await rest.send("POST", f"{API}/tenants/t", data=tenant, headers={"Origin": rest.url})).accepted()

    async def test_version_info_and_health(self, rest: Rest) -> None:
        assert (await rest.send("GET", "/version")).accepted()["Version"] == __version__
        own = rest.url.removeprefix("http://")
        assert (await rest.send("GET", "/info")).accepted() == {
            "local-ip": own,
            "leader-ip": own,
            "current-state": "leader",
            "netplugin-nodes": [],
            "netmaster-nodes": [own],
        }
        assert (await rest.send("GET", "/healthz")).accepted() == {"status": "alive"}
        assert (await rest.send("GET", "/readyz")).accepted() == {"ready": True, "reasons": [], "unreadable": []}

    async def test_metrics_count_requests_and_objects(self, rest: Rest) -> None:
        await rest.put("tenants", tenantName="t1")
        await rest.get("tenants", "none")
        text = (await rest.send("GET", "/metrics")).accepted()
        assert 'weft_objects{kind="tenant"} 2.0' in text
        assert "weft_master_leader 1.0" in text
        assert 'weft_master_requests_total{route="PUT /api/v1/tenants/{key}/",status="200"} 1.0' in text
        assert 'weft_master_requests_total{route="GET /api/v1/tenants/{key}/",status="404"} 1.0' in text

    async def test_unknown_paths_do_not_grow_the_metrics(self, rest: Rest) -> None:
        for number, method in enumerate(("GET", "PUT", "PROPFIND")):
            (await rest.send(method, f"/none/{number}")).refused(404)
        text = (await rest.send("GET", "/metrics")).accepted()
        assert "PROPFIND" not in text
        assert 'weft_master_requests_total{route="none",status="404"} 3.0' in text

    async def test_services_in_contivs_form(self, rest: Rest) -> None:
        await rest.put("networks", **BLUE)
        service = {"serviceName": "s.1", "selectors": ["app=web"], "ports": ["80:8080:TCP"]}
        (await rest.put("serviceLBs", tenantName="default", networkName="blue", **service)).accepted()
        found = (await rest.send("GET", "/service/s.1:default")).accepted()
        assert found == {
            "id": "s.1:default",
            "servicename": "s.1",
            "tenantname": "default",
            "subnet": "blue",
            "ports": ["80:8080:TCP"],
            "selectors": {"app": "web"},
            "ipaddress": "10.1.1.1",
            "ipv6address": "",
            "providers": {},
        }
        assert (await rest.send("GET", "/services")).accepted() == [found]
        for key in ("s.1", "default:s.1", "s.1:none", ":"):
            (await rest.send("GET", f"/service/{key}")).refused(404)


async def test_an_undecodable_stored_document_is_reported_and_affects_no_other() -> None:
    """/readyz lists it, and stays ready; all other objects are served, listed and watched as before."""
    async with MemoryStore() as store, running_master(store=store) as rest:
        for key, data in (
            ("tenants/odd", b"\xff{"),
            ("tenants/newer", b'{"v":99,"o":{}}'),
            ("tenants/other", b'{"v":1,"o":{"tenantName":"elsewhere"}}'),
            ("endpoints/short", b"{}"),
            ("claims/addresses/x", b"{}"),
        ):
            await store.commit([], [Put(StoreKey(key), data)])
        (await rest.put("tenants", tenantName="t1")).accepted()
        ready = await rest.send("GET", "/readyz")
        assert ready.accepted()["reasons"] == []
        assert len(ready.body["unreadable"]) == 5
        assert any("tenants/newer" in reason and "upgrade" in reason for reason in ready.body["unreadable"])
        assert [each["key"] for each in (await rest.get("tenants")).accepted()] == ["default", "t1"]
        (await rest.get("tenants", "odd")).refused(404)
        assert "tenants/t1" in await rest.state()


async def test_unknown_members_of_a_newer_weft_are_ignored_and_kept() -> None:
    """Two versions side by side: the older reads and changes what the newer wrote, losing nothing. Input is strict."""
    async with MemoryStore() as store, running_master(store=store) as rest:
        (await rest.put("tenants", tenantName="t1")).accepted()
        document = b'{"v":1,"o":{"tenantName":"t1","colour":{"name":"red"}}}'
        await store.commit([], [Put(StoreKey("tenants/t1"), document)])
        (await rest.put("tenants", tenantName="t1", defaultNetwork="n1")).accepted()
        entry = await store.read(StoreKey("tenants/t1"))
        assert entry is not None
        kept = {"tenantName": "t1", "colour": {"name": "red"}, "defaultNetwork": "n1"}
        assert msgspec.json.decode(entry.value) == {"v": 1, "o": kept}
        assert (await rest.send("GET", "/readyz")).accepted()["ready"]
        (await rest.put("tenants", tenantName="t1", colour="red")).refused(422, field="colour")
        (await rest.delete("tenants", "t1")).accepted()
        (await rest.put("tenants", tenantName="t1")).accepted()
        stored = await store.read(StoreKey("tenants/t1"))
        assert stored is not None
        assert msgspec.json.decode(stored.value)["o"] == {"tenantName": "t1"}


class BlockingStore(MemoryStore):
    """A store that blocks the bootstrap until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.resume = asyncio.Event()

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if any(isinstance(write, Put) and write.key == "globals/global" for write in writes):
            await self.resume.wait()
        return await super().commit(compares, writes)


async def test_a_request_waits_until_the_leader_is_prepared() -> None:
    async with BlockingStore() as store, running_master(store=store, ready=False) as rest:
        early = asyncio.create_task(rest.put("tenants", tenantName="t1"))
        await until_reason(rest, "catching up")
        store.resume.set()
        (await soon(early)).accepted()


async def until_reason(rest: Rest, text: str) -> None:
    """Return when /readyz gives a reason with this text."""
    backoff = Backoff(first=0.002, cap=0.05, within=DEADLINE)
    while text not in str((await rest.send("GET", "/readyz")).body):
        await backoff.pause()
