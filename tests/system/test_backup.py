"""Backup and restore of the whole state; a restore validates everything before it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds
from weft.domain.errors import Unavailable
from weft.domain.lifecycle.store_format import FORMAT
from weft.lab.servers.masters import API, Answer, MasterProcess, Rest, client, running_master
from weft.ports.store import Compare, Delete, Put, Revision, Write

Document = dict[str, Any]


async def populate(rest: Rest) -> None:
    """Something of every kind, with tags, ids, addresses and a block taken."""
    networks: list[dict[str, object]] = [
        {"networkName": "blue", "encap": "vxlan", "subnet": "10.1.0.0/16", "ipv6Subnet": "fd00::/64"},
        {"networkName": "red", "encap": "vlan", "subnet": "10.2.0.0/24", "pktTag": 77},
    ]
    await rest.put("tenants", tenantName="t1")
    for network in networks:
        (await rest.put("networks", tenantName="default", **network)).accepted()
    await rest.put("netprofiles", tenantName="default", profileName="gold", bandwidth="4G")
    await rest.put("policys", tenantName="default", policyName="p")
    rule = {"policyName": "p", "ruleId": "1", "direction": "in", "action": "deny"}
    await rest.put("rules", tenantName="default", **rule)
    group = {"groupName": "web", "networkName": "red", "ipPool": "10.2.0.10-10.2.0.20", "policies": ["p"]}
    (await rest.put("endpointGroups", tenantName="default", **group, netProfile="gold", pktTag=78)).accepted()
    service = {"serviceName": "s", "networkName": "red", "selectors": ["a=b"], "ports": ["80:80:TCP"]}
    await rest.put("serviceLBs", tenantName="default", **service)
    peer = {"hostname": "n1", "routerip": "50.1.1.2/24", "as": "65002", "neighbor-as": "500"}
    await rest.put("Bgps", **peer)
    (await rest.create_endpoint("e1", network="blue")).accepted()
    (await rest.create_endpoint("e2", network="red", group="web")).accepted()


async def backup(rest: Rest) -> Document:
    document: Document = (await rest.send("GET", f"{API}/backup")).accepted()
    return document


async def restore(rest: Rest, document: object, *, force: bool = False) -> Answer:
    return await rest.post(f"{API}/restore{'?force=true' if force else ''}", document)


async def everything(rest: Rest) -> list[Any]:
    return [(await rest.get(kind.plural)).accepted() for kind in kinds.ALL]


async def test_a_backup_is_restored_into_an_empty_master(rest: Rest) -> None:
    await populate(rest)
    document = await backup(rest)
    assert document["format"] == FORMAT
    async with running_master() as fresh:
        assert (await restore(fresh, document)).accepted() == {"restored": len(document["entries"])}
        assert await fresh.state() == document["entries"]
        assert await everything(fresh) == await everything(rest)
        oper = await fresh.oper("networks", "default:red")
        assert oper == await rest.oper("networks", "default:red")
        await assert_it_works(fresh)


async def test_a_dry_run_of_a_restore_writes_nothing_and_says_what_would_change(rest: Rest) -> None:
    await populate(rest)
    document = await backup(rest)
    (await rest.delete("tenants", "t1")).accepted()
    (await rest.put("tenants", tenantName="later")).accepted()
    (await rest.put("netprofiles", tenantName="default", profileName="gold", bandwidth="5G")).accepted()
    before = await rest.state()
    report = (await rest.post(f"{API}/restore?dry-run=true", document)).accepted()
    assert await rest.state() == before
    assert (report["created"], report["deleted"]) == (["tenants/t1"], ["tenants/later"])
    assert report["changed"] == ["profiles/default/gold"]
    assert report["counts"] == {"created": 1, "changed": 1, "deleted": 1, "unchanged": len(document["entries"]) - 2}
    assert report["needsForce"]
    (await rest.post(f"{API}/restore?dry-run=yes&force=true", document)).refused(400, field="dry-run")
    assert await rest.state() == before
    (await rest.post(f"{API}/restore?dry-run=true", {**document, "format": 99})).refused(400, field="format")
    async with running_master() as fresh:
        assert not (await fresh.post(f"{API}/restore?dry-run=true", document)).accepted()["needsForce"]
        assert (await fresh.get("tenants")).accepted()[0]["tenantName"] == "default"


async def assert_it_works(rest: Rest) -> None:
    """New things get what is still free, old things go with all they had."""
    made = (await rest.create_endpoint("e9", network="red")).accepted()["EndpointConfig"]
    assert made["ipAddress"] == "10.2.0.2"
    (await rest.put("networks", tenantName="default", networkName="x", encap="vxlan", subnet="10.9.0.0/24")).accepted()
    assert (await rest.oper("networks", "default:x"))["externalPktTag"] == 2
    (await rest.put("endpointGroups", tenantName="default", groupName="new", networkName="red")).accepted()
    assert (await rest.oper("endpointGroups", "default:new"))["endpointGroupId"] == 2
    (await rest.delete_endpoint("e2", network="red")).accepted()
    assert (await rest.send("GET", "/readyz")).accepted()["ready"]


async def test_a_bootstrapped_state_counts_as_empty(rest: Rest) -> None:
    await populate(rest)
    document = await backup(rest)
    async with running_master("--default-subnet", "10.224.0.0/16") as fresh:
        (await restore(fresh, document)).accepted()
        assert await fresh.state() == document["entries"]


async def test_a_state_that_is_not_empty_is_replaced_only_by_force(rest: Rest) -> None:
    """What is not in the backup is gone afterwards, what changed is as it was."""
    await populate(rest)
    document = await backup(rest)
    (await rest.put("tenants", tenantName="t2")).accepted()
    (await rest.delete("rules", "default:p:1")).accepted()
    (await rest.delete_endpoint("e2", network="red")).accepted()
    (await rest.delete("endpointGroups", "default:web")).accepted()
    group = {"groupName": "web", "networkName": "blue", "ipPool": "10.1.7.1-10.1.7.9"}
    (await rest.put("endpointGroups", tenantName="default", **group)).accepted()
    before = await rest.state()
    answer = await restore(rest, document)
    assert "force" in answer.refused(409)
    assert answer.body["details"]["objects"] > 0
    assert await rest.state() == before
    (await restore(rest, document, force=True)).accepted()
    assert await rest.state() == document["entries"]
    (await rest.get("tenants", "t2")).refused(404)
    available = (await rest.oper("networks", "default:blue"))["availableIPAddresses"]
    assert available == "10.1.0.2-10.1.255.254"
    await assert_it_works(rest)


async def test_a_backup_has_no_ephemeral_keys() -> None:
    """Leader, liveness and sync status are left out: restored elsewhere, they would name a wrong leader and acknowledge
    revisions that never existed."""
    async with MemoryStore() as store, running_master(store=store) as rest:
        status = Put(kinds.applied_key("n1"), b'{"v":1,"o":{"revision":7}}')
        await store.commit([], [status, Put(kinds.SYNC_REQUEST_KEY, b"{}")])
        keys = (await backup(rest))["entries"].keys()
        assert keys == {"globals/global", "tenants/default"}


def with_entry(key: str, value: object) -> Callable[[Document], object]:
    return lambda document: document | {"entries": document["entries"] | {key: value}}


NETWORK = {"tenantName": "default", "networkName": "x", "encap": "vxlan", "subnet": "10.5.0.0/24"}


@pytest.mark.parametrize(
    "broken",
    [
        lambda document: [],
        lambda document: {},
        lambda document: document | {"format": FORMAT - 1},
        lambda document: document | {"format": FORMAT + 1},
        lambda document: document | {"colour": "red"},
        lambda document: document | {"entries": []},
        with_entry("tenants/t9", {"v": 1, "o": {"tenantName": "other"}}),
        with_entry("tenants/t9", {"v": 2, "o": {"tenantName": "t9"}}),
        with_entry("tenants/t9", 7),
        with_entry("tenants/a_b", {"v": 1, "o": {"tenantName": "a_b"}}),
        with_entry("networks/default/x", {"v": 1, "o": NETWORK | {"subnet": "garbage"}}),
        with_entry("networks/default/x", {"v": 1, "o": NETWORK | {"gateway": "10.6.0.1"}}),
        with_entry("groups/default/x", {"v": 1, "o": {"tenantName": "default", "groupName": "x", "networkName": "red",
                                                      "ipPool": "9-1"}}),
        with_entry("endpoints/short", {"v": 1, "o": {}}),
        with_entry("claims/addresses/default/red/zz", {"v": 1, "o": {"holder": "x"}}),
        with_entry("claims/vlan/x", {"v": 1, "o": {"holder": "x"}}),
        with_entry("blocks/default", {"v": 1, "o": {}}),
        with_entry("leader", {"v": 1, "o": {}}),
        with_entry("restore", {"v": 1, "o": {}}),
        with_entry("alive/nodes/n1", {"v": 1, "o": {}}),
        with_entry("status/nodes/n1/applied", {"v": 1, "o": {}}),
        with_entry("requests/sync", {}),
        with_entry("none/of/ours", {"v": 1, "o": {}}),
        with_entry("", {"v": 1, "o": {}}),
    ],
)  # fmt: skip
async def test_a_broken_document_changes_nothing(rest: Rest, broken: Callable[[Document], object]) -> None:
    await populate(rest)
    document = await backup(rest)
    answer = await restore(rest, broken(document), force=True)
    assert answer.refused(400)
    assert await rest.state() == document["entries"]
    (await rest.put("tenants", tenantName="t2")).accepted()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
async def test_invalid_json_changes_nothing(rest: Rest, body: bytes) -> None:
    before = await rest.state()
    (await rest.send("POST", f"{API}/restore?force=true", data=body)).refused(400)
    assert await rest.state() == before


class Fragile(MemoryStore):
    """A store that is gone after so many more commits of objects, once armed."""

    left: int | None = None

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if self.left is not None and any(isinstance(write, Put | Delete) and "/" in write.key for write in writes):
            if self.left == 0:
                raise Unavailable("the store is away")
            self.left -= 1
        return await super().commit(compares, writes)


async def test_an_interrupted_restore_is_detected_and_completed() -> None:
    """No change is planned on a partial state; restoring again needs no force."""
    async with Fragile() as store:
        async with running_master(store=store) as rest:
            await populate(rest)
            document = await backup(rest)
            more = document["entries"] | {
                f"tenants/many{number}": {"v": 1, "o": {"tenantName": f"many{number}"}} for number in range(250)
            }
            store.left = 2
            (await restore(rest, document | {"entries": more}, force=True)).refused(503)
            store.left = None
        async with running_master(store=store, ready=False) as rest:
            ready = await rest.send("GET", "/readyz")
            assert ready.status == 503
            assert any("restore" in reason for reason in ready.body["reasons"])
            for answer in (
                await rest.put("tenants", tenantName="t2"),
                await rest.delete("tenants", "t1"),
                await rest.create_endpoint("e9", network="red"),
            ):
                assert "restore" in answer.refused(503)
            (await restore(rest, document)).accepted()
            assert await rest.state() == document["entries"]
            await rest.ready()
            await assert_it_works(rest)


async def test_a_large_backup_passes_through_a_follower(rest: Rest) -> None:
    """It may be larger than any other body, whoever is asked."""
    names = [f"{number:064}" for number in range(8000)]
    tenants = {f"tenants/{name}": {"v": 1, "o": {"tenantName": name}} for name in names}
    document = await backup(rest)
    document |= {"entries": document["entries"] | tenants}
    async with MemoryStore() as store, running_master(store=store), running_master(store=store) as follower:
        assert (await follower.send("GET", "/info")).accepted()["current-state"] == "follower"
        (await restore(follower, document)).accepted()
        assert await follower.state() == document["entries"]


async def test_a_restored_state_survives_a_restart(rest: Rest, tmp_path: Path) -> None:
    """The same document fits every store; on the embedded one it is there after kill -9."""
    await populate(rest)
    document = await backup(rest)
    async with MasterProcess(tmp_path) as master, client(master.url) as program:
        assert "networks/default/default-net" in await program.state()
        (await restore(program, document)).accepted()
        await master.start()
        assert await program.state() == document["entries"]
        await assert_it_works(program)


async def test_unknown_members_of_a_newer_weft_are_restored(rest: Rest) -> None:
    """They are kept where two versions run side by side, so a backup of that state has them too."""
    newer = {"v": 1, "o": {"tenantName": "t9", "colour": "red"}}
    (await restore(rest, with_entry("tenants/t9", newer)(await backup(rest)), force=True)).accepted()
    assert (await backup(rest))["entries"]["tenants/t9"] == newer
    assert (await rest.get("tenants", "t9")).accepted()["tenantName"] == "t9"
