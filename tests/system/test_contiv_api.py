"""Contiv's plugin API and the forced cleanup (contiv 2.4, 2.5; W14, W15, W17, W18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain.errors import Unavailable
from weft.lab.servers.masters import Answer, Rest, running_master
from weft.ports.store import Compare, Delete, Revision, Write

ALLOC = "/plugin/allocAddress"
RELEASE = "/plugin/releaseAddress"
CREATE = "/plugin/createEndpoint"
UPDATE = "/plugin/updateEndpoint"


async def put_networks(rest: Rest) -> None:
    """`blue` in two tenants, and in `default` a group `web` with a pool of three."""
    await rest.put("tenants", tenantName="t.1")
    for tenant in ("default", "t.1"):
        network = {"networkName": "blue", "encap": "vxlan", "subnet": "10.1.1.0/24", "gateway": "10.1.1.254"}
        (await rest.put("networks", tenantName=tenant, **network)).accepted()
    pool = {"groupName": "web", "networkName": "blue", "ipPool": "10.1.1.10-10.1.1.12"}
    (await rest.put("endpointGroups", tenantName="default", **pool)).accepted()


@pytest.fixture
async def blue(rest: Rest) -> AsyncIterator[Rest]:
    await put_networks(rest)
    yield rest


async def alloc(rest: Rest, network_id: str, **members: str) -> Answer:
    return await rest.post(ALLOC, {"NetworkID": network_id, **members})


async def release(rest: Rest, network_id: str, address: str) -> Answer:
    return await rest.post(RELEASE, {"NetworkID": network_id, "IPv4Address": address})


class TestAddresses:
    async def test_an_address_is_allocated_and_released(self, blue: Rest) -> None:
        first = (await alloc(blue, "blue.default")).accepted()
        assert first == {"NetworkID": "blue.default", "IPv4Address": "10.1.1.1/24"}
        assert (await alloc(blue, "blue.default")).accepted()["IPv4Address"] == "10.1.1.2/24"
        assert (await release(blue, "blue.default", "10.1.1.1")).accepted() == "success"
        assert (await blue.oper("networks", "default:blue"))["allocatedIPAddresses"] == "10.1.1.2"

    async def test_names_with_dots_are_resolved(self, blue: Rest) -> None:
        """`blue.t.1` is network `blue` of tenant `t.1`."""
        assert (await alloc(blue, "blue.t.1")).accepted()["IPv4Address"] == "10.1.1.1/24"
        assert (await blue.oper("networks", "t.1:blue"))["allocatedIPAddresses"] == "10.1.1.1"
        assert "allocatedIPAddresses" not in await blue.oper("networks", "default:blue")

    async def test_L1_a_network_id_that_names_two_networks_is_refused(self, blue: Rest) -> None:
        """Names may have dots: `blue.t.1` is blue of t.1, and also blue.t of a tenant 1."""
        (await blue.put("tenants", tenantName="1")).accepted()
        other = {"networkName": "blue.t", "encap": "vxlan", "subnet": "10.3.1.0/24", "gateway": "10.3.1.254"}
        (await blue.put("networks", tenantName="1", **other)).accepted()
        (await alloc(blue, "blue.t.1")).refused(409, field="NetworkID")
        assert (await alloc(blue, "blue.default")).accepted()["IPv4Address"] == "10.1.1.1/24"

    async def test_a_group_allocates_from_its_pool(self, blue: Rest) -> None:
        assert (await alloc(blue, "blue:web.default")).accepted()["IPv4Address"] == "10.1.1.10/24"
        (await alloc(blue, "blue:none.default")).refused(404)
        (await alloc(blue, "blue:web.default", PreferredIPv4Address="10.1.1.9")).refused(
            422, field="PreferredIPv4Address"
        )

    async def test_a_pool_selects_its_network(self, blue: Rest) -> None:
        answer = (await blue.post(ALLOC, {"AddressPool": "10.1.1.0/24:t.1"})).accepted()
        assert answer == {"NetworkID": "blue.t.1", "IPv4Address": "10.1.1.1/24"}
        assert (await blue.post(ALLOC, {"AddressPool": "10.1.1.7/24"})).accepted()["NetworkID"] == "blue.default"
        (await blue.post(ALLOC, {"AddressPool": "10.7.0.0/24"})).refused(404)
        (await blue.post(ALLOC, {"AddressPool": "pool"})).refused(422, field="AddressPool")
        (await blue.post(ALLOC, {})).refused(422, field="NetworkID")

    async def test_swarm_requests_a_gateway_before_it_creates_the_network(self) -> None:
        """The first address of the pool is returned, and nothing is allocated (contiv 2.4)."""
        async with running_master("--mode", "swarm-mode") as rest:
            before = await rest.state()
            answer = (await rest.post(ALLOC, {"AddressPool": "10.7.0.0/24"})).accepted()
            assert answer == {"NetworkID": "", "IPv4Address": "10.7.0.1/24"}
            (await rest.post(ALLOC, {"AddressPool": "10.7.0.0/31"})).refused(409, field="AddressPool")
            assert await rest.state() == before
            await put_networks(rest)
            assert (await rest.post(ALLOC, {"AddressPool": "10.1.1.0/24"})).accepted()["NetworkID"] == "blue.default"

    async def test_a_requested_address_must_be_free(self, blue: Rest) -> None:
        """W17: the original gave it twice."""
        preferred = {"PreferredIPv4Address": "10.1.1.5"}
        assert (await alloc(blue, "blue.default", **preferred)).accepted()["IPv4Address"] == "10.1.1.5/24"
        (await alloc(blue, "blue.default", **preferred)).refused(409, field="PreferredIPv4Address")
        (await alloc(blue, "blue.t.1", **preferred)).accepted()
        for odd in ("10.1.1.0", "10.1.1.255", "10.1.1.254", "10.1.1.10", "10.2.0.1", "fd00::1", "x"):
            (await alloc(blue, "blue.default", PreferredIPv4Address=odd)).refused(422, field="PreferredIPv4Address")

    async def test_dockers_form_of_a_pool_is_accepted(self, blue: Rest) -> None:
        """W18: the release carries `net.tenant|pool`, and the answer is JSON."""
        given = (await alloc(blue, "blue.default|10.1.1.0/24")).accepted()
        assert given["NetworkID"] == "blue.default|10.1.1.0/24"
        assert (await release(blue, "blue.default|10.1.1.0/24", given["IPv4Address"])).accepted() == "success"
        pool = "blue:web.default|10.1.1.10-10.1.1.12"
        assert (await alloc(blue, pool)).accepted()["IPv4Address"] == "10.1.1.10/24"
        assert (await release(blue, pool, "10.1.1.10")).accepted() == "success"
        for network in ("networks/default:blue", "endpointGroups/default:web"):
            assert "allocatedIPAddresses" not in await blue.oper(*network.split("/"))

    async def test_a_reserved_address_is_assigned_to_its_endpoint(self, blue: Rest) -> None:
        """As Docker does it: ask, create with the address, delete, release."""
        (await alloc(blue, "blue.default", PreferredIPv4Address="10.1.1.7")).accepted()
        created = (await blue.create_endpoint("e1", network="blue", address="10.1.1.7/24")).accepted()
        assert created["EndpointConfig"]["ipAddress"] == "10.1.1.7"
        (await release(blue, "blue.default", "10.1.1.7")).refused(409, field="IPv4Address")
        (await blue.delete_endpoint("e1", network="blue")).accepted()
        assert (await release(blue, "blue.default", "10.1.1.7")).accepted() == "success"

    async def test_releasing_a_free_address_succeeds(self, blue: Rest) -> None:
        assert (await release(blue, "blue.default", "10.1.1.77")).accepted() == "success"
        (await release(blue, "none.default", "10.1.1.77")).refused(404)
        (await release(blue, "blue.default", "")).refused(422, field="IPv4Address")

    async def test_a_reservation_prevents_deletion_of_its_network_and_group(self, blue: Rest) -> None:
        (await alloc(blue, "blue.t.1")).accepted()
        (await blue.delete("networks", "t.1:blue")).refused(409)
        (await alloc(blue, "blue:web.default")).accepted()
        (await blue.delete("endpointGroups", "default:web")).refused(409)
        (await release(blue, "blue:web.default", "10.1.1.10")).accepted()
        (await blue.delete("endpointGroups", "default:web")).accepted()


class TestEndpoints:
    async def test_an_endpoint_is_created_once(self, blue: Rest) -> None:
        call = {
            "TenantName": "default", "NetworkName": "blue", "EndpointID": "e1", "ServiceName": "web",
            "EPCommonName": "web-1", "ConfigEP": {"Container": "c1", "Host": "n1"},
        }  # fmt: skip
        created = (await blue.post(CREATE, call)).accepted()["EndpointConfig"]
        assert created == {
            "id": "blue.default-e1",
            "netID": "blue.default",
            "endpointID": "e1",
            "serviceName": "web",
            "endpointGroupId": 1,
            "endpointGroupKey": "web:default",
            "ipAddress": "10.1.1.10",
            "ipv6Address": "",
            "macAddress": "02:02:0a:01:01:0a",
            "homingHost": "n1",
            "intfName": "",
            "vtepIP": "",
            "labels": {},
            "containerId": "c1",
            "epCommonName": "web-1",
        }
        before = await blue.state()
        assert (await blue.post(CREATE, call)).accepted()["EndpointConfig"] == created
        assert await blue.state() == before

    async def test_delete_returns_the_endpoint(self, blue: Rest) -> None:
        created = (await blue.create_endpoint("e1", network="blue")).accepted()
        assert (await blue.delete_endpoint("e1", network="blue")).accepted() == created
        (await blue.delete_endpoint("e1", network="blue")).refused(404)
        (await blue.delete_endpoint("../e1", network="blue")).refused(422, field="EndpointID")

    async def test_dangling_references_are_rejected_and_nothing_is_written(self, blue: Rest) -> None:
        """O22 and its like."""
        before = await blue.state()
        (await blue.create_endpoint("e1", network="blue", group="none")).refused(422, field="ServiceName")
        (await blue.create_endpoint("e1", network="none")).refused(422, field="NetworkName")
        (await blue.create_endpoint("e1", network="blue", tenant="none")).refused(422, field="TenantName")
        (await blue.create_endpoint("e1", network="blue", address="10.1.1.300")).refused(422, field="IPAddress")
        (await blue.create_endpoint("e1", network="blue", address="10.1.2.1")).refused(422, field="IPAddress")
        for name in ("", "a/b", "..", "a b", "a\n", "-a", "a" * 257):
            (await blue.create_endpoint(name, network="blue")).refused(422, field="EndpointID")
        assert await blue.state() == before

    async def test_a_group_of_another_network_is_rejected(self, blue: Rest) -> None:
        network = {"networkName": "red", "encap": "vxlan", "subnet": "10.2.0.0/24"}
        await blue.put("networks", tenantName="default", **network)
        (await blue.create_endpoint("e1", network="red", group="web")).refused(409, field="ServiceName")

    @pytest.mark.parametrize("named", ["EndpointID", "ContainerID", "IPAddress"])
    async def test_labels_are_set_on_start_and_removed_on_die(self, blue: Rest, named: str) -> None:
        """W15: nothing is kept of a container that has died, whether or not it provided a service."""
        call = {"TenantName": "default", "NetworkName": "blue", "EndpointID": "e1", "ConfigEP": {"Container": "c1"}}
        await blue.post(CREATE, call)
        before = await blue.state()
        name = {named: {"EndpointID": "e1", "ContainerID": "c1", "IPAddress": "10.1.1.1"}[named]}
        start = {"Event": "start", "Tenant": "default", "Network": "blue", **name}
        assert (await blue.post(UPDATE, start | {"Labels": {"app": "web"}})).accepted() == {"IPAddress": "10.1.1.1"}
        assert (await blue.oper("endpoints", "e1"))["labels"] == {"app": "web"}
        (await blue.post(UPDATE, start | {"Event": "die"})).accepted()
        assert await blue.state() == before

    async def test_a_start_event_may_precede_its_endpoint(self, blue: Rest) -> None:
        """An agent returns ADD before it publishes the endpoint; the start event may arrive in between."""
        start = {"Event": "start", "Tenant": "default", "EndpointID": "e1", "Labels": {"app": "web"}}
        started = asyncio.create_task(blue.post(UPDATE, start))
        await blue.oper("networks", "default:blue")
        await blue.create_endpoint("e1", network="blue")
        (await started).accepted()
        assert (await blue.oper("endpoints", "e1"))["labels"] == {"app": "web"}

    async def test_an_update_without_an_endpoint_is_rejected(self, blue: Rest) -> None:
        (await blue.post(UPDATE, {"Event": "start"})).refused(422, field="EndpointID")
        for event in ("start", "die"):
            (await blue.post(UPDATE, {"Event": event, "EndpointID": "e1"})).refused(404)
        (await blue.post(UPDATE, {"Event": "pause", "EndpointID": "e1"})).refused(422, field="Event")
        await blue.create_endpoint("e1", network="blue")
        odd = {"Event": "start", "EndpointID": "e1", "Labels": {"app": "w\x07b"}}
        (await blue.post(UPDATE, odd)).refused(422, field="labels")

    async def test_calls_must_be_json(self, blue: Rest) -> None:
        for headers in ({}, {"Content-Type": "text/plain"}):
            (await blue.send("POST", CREATE, data=b"{}", headers=headers)).refused(400, field="Content-Type")
        plain = {"Content-Type": "application/json; charset=utf-8"}
        (await blue.send("POST", ALLOC, data=b'{"NetworkID":"blue.default"}', headers=plain)).accepted()
        (await blue.post(ALLOC, {"NetworkID": "blue.default", "Colour": "red"})).refused(422, field="Colour")

    async def test_an_endpoint_is_found_by_a_part_of_its_names(self, blue: Rest) -> None:
        call = {"TenantName": "default", "NetworkName": "blue", "EndpointID": "4f3a", "EPCommonName": "shop"}
        await blue.post(CREATE, call | {"ConfigEP": {"Container": "c0ffee"}})
        for part in ("4f3a", "4f", "c0ff", "hop", "default:blue:4f3a"):
            assert (await blue.oper("endpoints", part))["endpointID"] == "4f3a"
        (await blue.inspect("endpoints", "none")).refused(404)
        assert (await blue.get("endpoints", "default:blue:4f3a")).accepted()["containerID"] == "c0ffee"


class Stubborn(MemoryStore):
    """A store that is away whenever a certain key shall be deleted."""

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if any(isinstance(write, Delete) and write.key == "endpoints/default/blue/e2" for write in writes):
            raise Unavailable("the store is away")
        return await super().commit(compares, writes)


class TestCleanUp:
    @pytest.mark.parametrize(
        ("what", "name", "left"),
        [("net", "blue", ["e4"]), ("group", "web", ["e2", "e3", "e4"]), ("ep", "e2", ["e1", "e3", "e4"])],
    )
    async def test_endpoints_are_force_deleted_by_network_group_or_id(
        self, blue: Rest, what: str, name: str, left: list[str]
    ) -> None:
        await blue.create_endpoint("e1", network="blue", group="web")
        await blue.create_endpoint("e2", network="blue")
        await blue.create_endpoint("e3", network="blue")
        await blue.create_endpoint("e4", network="blue", tenant="t.1")
        removed = (await blue.send("DELETE", f"/debug/epcleanup/tenant/default/{what}/{name}")).accepted()["removed"]
        assert len(removed) == 4 - len(left)
        assert [each["endpointID"] for each in (await blue.get("endpoints")).accepted()] == left

    async def test_an_unknown_selection_is_not_found(self, blue: Rest) -> None:
        for path, status in (("net/none", 404), ("group/none", 404), ("ep/none", 404), ("all/x", 400)):
            (await blue.send("DELETE", f"/debug/epcleanup/tenant/default/{path}")).refused(status)
        assert (await blue.send("DELETE", "/debug/epcleanup/tenant/default/net/blue")).accepted() == {"removed": []}

    async def test_failed_deletes_are_reported(self) -> None:
        """W14: the original answered success whatever happened."""
        async with Stubborn() as store, running_master(store=store) as rest:
            await put_networks(rest)
            for name in ("e1", "e2", "e3"):
                (await rest.create_endpoint(name, network="blue")).accepted()
            answer = await rest.send("DELETE", "/debug/epcleanup/tenant/default/net/blue")
            answer.refused(409)
            failed = answer.body["details"]["failed"]
            assert failed["default:blue:e2"] == "the store is away"
            await rest.ready()
            assert [each["key"] for each in (await rest.get("endpoints")).accepted()] == sorted(failed)
