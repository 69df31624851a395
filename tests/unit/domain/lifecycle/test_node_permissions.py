"""A node writes only what is its own, before the commit and after it (docs/design/node-enrollment.md)."""

from __future__ import annotations

import msgspec
import pytest

from weft.domain import codec
from weft.domain.errors import Denied, Invalid, Malformed
from weft.domain.ids import EndpointId, NetworkName, NodeName, StoreKey, TenantName
from weft.domain.lifecycle.node_permissions import MAX_ALIVE, MAX_STATUS, check_ownership, missing_keys
from weft.domain.model import Block, Claim, Endpoint, Network, Node, SyncStatus, Tenant, Value
from weft.domain.store_types import Delete, DeleteAll, Put, Write

ME, OTHER = NodeName("node-1"), NodeName("node-2")


def key(text: str) -> StoreKey:
    return StoreKey(text)


def put(text: str, value: Value) -> Put:
    return Put(key(text), codec.encode(value))


def endpoint(host: str, name: str = "e", network: str = "blue") -> Endpoint:
    return Endpoint(tenant=TenantName("red"), network=NetworkName(network), endpoint_id=EndpointId(name), host=host)


def claim(name: str = "e", network: str = "blue") -> Claim:
    return Claim(holder=f"endpoint:red:{network}:{name}")


def network(subnet: str = "10.0.0.0/16") -> Network:
    return Network(
        tenant=TenantName("red"),
        name=NetworkName("blue"),
        encap="vxlan",
        subnet=subnet,
        gateway="10.0.0.9",
        ipv6_subnet="fd00::/64",
    )


N = "networks/red/blue"
_NETWORKS = {key(N): codec.encode(network())}
E = "endpoints/red/blue/e"
C = "claims/addresses/red/blue/0a000001"
B = "blocks/red/blue/0a000040"


class World(dict[StoreKey, bytes | None]):
    """The present values and network blue; what is asked for and not there is absent."""

    def allows(self, *writes: Write, node: NodeName = ME) -> bool:
        present: dict[StoreKey, bytes | None] = {}
        while needed := missing_keys(writes, present):
            present.update({each: self.get(each, _NETWORKS.get(each)) for each in needed})
        try:
            check_ownership(node, writes, present)
        except Denied:
            return False
        return True


def world(**values: Value) -> World:
    names = {"e": E, "c": C, "b": B}
    return World({key(names[name]): codec.encode(value) for name, value in values.items()})


class TestItself:
    @pytest.mark.parametrize("folder", ["nodes", "alive/nodes"])
    def test_a_node_writes_its_own_document_and_sign_of_life(self, folder: str) -> None:
        assert world().allows(put(f"{folder}/{ME}", Node(name=ME)))
        assert world().allows(Delete(key(f"{folder}/{ME}")))
        assert not world().allows(put(f"{folder}/{OTHER}", Node(name=OTHER)))
        assert not world().allows(Delete(key(f"{folder}/{OTHER}")))
        assert not world().allows(put(f"{folder}/{ME}/x", Node(name=ME)))

    def test_its_document_must_name_itself(self) -> None:
        with pytest.raises(Malformed, match=OTHER):
            world().allows(put(f"nodes/{ME}", Node(name=OTHER)))
        with pytest.raises(Malformed):
            world().allows(Put(key(f"nodes/{ME}"), b"not a document"))

    def test_a_node_writes_its_own_status(self) -> None:
        assert world().allows(Put(key(f"status/nodes/{ME}/bgp"), b"anything"), Delete(key(f"status/nodes/{ME}/x/y")))
        assert world().allows(DeleteAll(key(f"status/nodes/{ME}/")), DeleteAll(key(f"status/nodes/{ME}/x")))
        for text in (f"status/nodes/{OTHER}/bgp", f"status/nodes/{ME}", f"status/nodes/{ME}0/x", "status/x", "status"):
            assert not world().allows(Put(key(text), b""))

    def test_a_node_acknowledges_for_itself_only_and_requests_no_sync(self) -> None:
        assert world().allows(put(f"status/nodes/{ME}/applied", SyncStatus(revision=7)))
        assert world().allows(Delete(key(f"status/nodes/{ME}/applied")))
        assert not world().allows(put(f"status/nodes/{OTHER}/applied", SyncStatus(revision=7)))
        assert not world().allows(Put(key("requests/sync"), b"{}"))
        with pytest.raises(Malformed):
            world().allows(Put(key(f"status/nodes/{ME}/applied"), b"what masters could not read"))

    @pytest.mark.parametrize("prefix", ["", "s", "status/nodes/", f"status/nodes/{ME}", "endpoints/red/blue/", E])
    def test_nothing_else_is_deleted_by_prefix(self, prefix: str) -> None:
        assert not world().allows(DeleteAll(key(prefix)))


@pytest.mark.parametrize(
    "text",
    [
        "leader", "restore", "globals/global", "tenants/red", "networks/red/blue", "groups/red/g", "policies/red/p",
        "rules/red/p/1", "profiles/red/p", "services/red/s", f"bgps/{ME}", "claims/vlan/7", "claims/local-vlan/7",
        "claims/vni/7", "claims/group-id/7", "alive/masters/10.0.0.1:9999", "alive/leases/7f", "", "/", "endpoints/red",
        "unknown/x", f"nodes/{ME}/", "endpoints/red/blue/e/f",
    ],
)  # fmt: skip
def test_everything_else_belongs_to_the_master(text: str) -> None:
    assert not world().allows(put(text, Tenant(name=TenantName("red"))))
    assert not world().allows(Delete(key(text)))


class TestEndpoints:
    def test_an_endpoint_is_created_changed_and_deleted_where_it_runs(self) -> None:
        assert world().allows(put(E, endpoint(ME)))
        assert world(e=endpoint(ME)).allows(put(E, endpoint(ME)))
        assert world(e=endpoint(ME)).allows(Delete(key(E)))
        assert world().allows(Delete(key(E))), "absent already is fine"

    def test_another_nodes_endpoint_is_left_alone(self) -> None:
        assert not world().allows(put(E, endpoint(OTHER)))
        assert not world(e=endpoint(OTHER)).allows(put(E, endpoint(ME))), "it would move here"
        assert not world(e=endpoint(ME)).allows(put(E, endpoint(OTHER))), "it would move there"
        assert not world(e=endpoint(OTHER)).allows(Delete(key(E)))
        assert not world(e=endpoint("")).allows(put(E, endpoint(ME))), "it is still the master's"

    def test_an_endpoint_stands_under_its_own_key(self) -> None:
        assert not world().allows(put(E, endpoint(ME, name="f")))
        assert not world().allows(put(E, endpoint(ME, network="green")))


class TestClaims:
    def test_an_address_is_claimed_with_its_endpoint_and_given_back_with_it(self) -> None:
        assert world().allows(put(E, endpoint(ME)), put(C, claim()))
        assert world(e=endpoint(ME)).allows(put(C, claim()))
        assert world(e=endpoint(ME), c=claim()).allows(Delete(key(E)), Delete(key(C)))
        assert world(e=endpoint(ME), c=claim()).allows(Delete(key(C)))
        assert world().allows(Delete(key(C))), "absent already is fine"

    def test_no_address_is_claimed_for_what_does_not_run_here(self) -> None:
        assert not world().allows(put(C, claim()))
        assert not world(e=endpoint(OTHER)).allows(put(C, claim()))
        assert not world(e=endpoint(ME)).allows(Delete(key(E)), put(C, claim())), "its endpoint goes"
        for holder in ("service:red:s", "network:red:blue", "reserved:red:blue", "", "endpoint:red:blue", "endpoint"):
            assert not world(e=endpoint(ME)).allows(put(C, Claim(holder=holder)))

    def test_no_address_of_another_is_taken_or_given_back(self) -> None:
        theirs = world(e=endpoint(OTHER), c=claim())
        mine = put("endpoints/red/blue/f", endpoint(ME, name="f"))
        assert not theirs.allows(Delete(key(C)))
        assert not theirs.allows(mine, put(C, claim("f")))
        assert not world(c=Claim(holder="service:red:s")).allows(mine, put(C, claim("f")))
        assert not world(c=Claim(holder="service:red:s")).allows(Delete(key(C)))
        assert not world(c=claim()).allows(Delete(key(C))), "its former holder is unknown"

    def test_an_address_reserved_ahead_goes_to_the_endpoint_that_comes(self) -> None:
        reserved = world(c=Claim(holder="reserved:red:blue"))
        assert reserved.allows(put(E, endpoint(ME)), put(C, claim()))
        assert not reserved.allows(Delete(key(C)))

    def test_an_address_is_claimed_in_the_network_of_its_endpoint(self) -> None:
        elsewhere = "claims/addresses/red/green/0a000001"
        assert not world().allows(put(E, endpoint(ME)), put(elsewhere, claim()))


class TestBlocks:
    def test_a_free_block_is_taken_or_made_shared(self) -> None:
        assert world().allows(put(B, Block(owner=ME)))
        assert world().allows(put(B, Block()))
        assert not world().allows(put(B, Block(owner=OTHER)))

    def test_its_own_block_is_kept_or_given_back(self) -> None:
        mine = world(b=Block(owner=ME))
        assert mine.allows(put(B, Block(owner=ME)))
        assert mine.allows(Delete(key(B)))
        assert not mine.allows(put(B, Block(owner=OTHER)))
        assert not mine.allows(put(B, Block()))

    def test_another_nodes_block_and_a_shared_one_are_left_alone(self) -> None:
        for owner in (OTHER, ""):
            assert not world(b=Block(owner=owner)).allows(put(B, Block(owner=ME)))
            assert not world(b=Block(owner=owner)).allows(Delete(key(B)))


def test_one_foreign_write_spoils_the_commit() -> None:
    assert not world().allows(put(E, endpoint(ME)), put(C, claim()), Delete(key("leader")))


class TestAddresses:
    """H3: a node gets no address by publishing an endpoint; others would route to it."""

    A = "10.0.0.1"
    MINE = msgspec.structs.replace(endpoint(ME), ip_address=A)

    def test_H3_an_address_without_block_or_claim_is_refused(self) -> None:
        assert not world().allows(put(E, self.MINE))
        assert not world(e=endpoint(ME)).allows(put(E, self.MINE)), "also by a change of an endpoint of its own"
        v6 = msgspec.structs.replace(endpoint(ME), ipv6_address="fd00::1")
        assert not world().allows(put(E, v6))

    def test_H3_an_address_of_a_foreign_block_or_claim_is_refused(self) -> None:
        block = {key("blocks/red/blue/0a000000"): codec.encode(Block(owner=OTHER))}
        assert not World(block).allows(put(E, self.MINE))
        assert not world(c=claim("other")).allows(put(E, self.MINE))
        reserved = {key(C): codec.encode(Claim(holder="reserved:red:blue"))}
        assert not World(reserved).allows(put(E, self.MINE)), "reserved, and not taken over in this commit"
        garbage = {key(C): b"garbage", key("blocks/red/blue/0a000000"): b"garbage"}
        assert not World(garbage).allows(put(E, self.MINE))
        assert not World(garbage).allows(put(E, self.MINE), put(C, claim()))

    def test_an_address_of_an_own_block_or_claim_is_allowed(self) -> None:
        block = {key("blocks/red/blue/0a000000"): codec.encode(Block(owner=ME))}
        assert World(block).allows(put(E, self.MINE))
        assert world().allows(put("blocks/red/blue/0a000000", Block(owner=ME)), put(E, self.MINE))
        assert world().allows(put(C, claim()), put(E, self.MINE))
        assert world(e=self.MINE, c=claim()).allows(put(E, msgspec.structs.replace(self.MINE, labels={"a": "b"})))

    def test_H3_a_block_does_not_give_an_address_that_another_has_claimed(self) -> None:
        block = {key("blocks/red/blue/0a000000"): codec.encode(Block(owner=ME))}
        for holder in ("endpoint:red:blue:other", "service:red:s", "reserved:red:blue"):
            claimed = {key(C): codec.encode(Claim(holder=holder))}
            assert not World(block | claimed).allows(put(E, self.MINE))
            assert not World(claimed).allows(put("blocks/red/blue/0a000000", Block(owner=ME)), put(E, self.MINE))

    def test_H3_a_network_without_blocks_has_addresses_by_claims_only(self) -> None:
        small = {key(N): codec.encode(network(subnet="10.0.0.0/24"))}
        block = {key("blocks/red/blue/0a000000"): codec.encode(Block(owner=ME))}
        assert not World(small).allows(put("blocks/red/blue/0a000000", Block(owner=ME)))
        assert not World(small | block).allows(put(E, self.MINE))
        assert World(small).allows(put(C, claim()), put(E, self.MINE))

    @pytest.mark.parametrize("address", ["8.8.8.8", "10.1.0.5", "10.0.0.9", "10.0.0.0", "10.0.255.255"])
    def test_H3_an_address_that_is_none_of_the_network_is_refused(self, address: str) -> None:
        """Nodes would route it to us: one of the world, of another network of the tenant, or the gateway."""
        mine = msgspec.structs.replace(endpoint(ME), ip_address=address)
        number = b"".join(bytes([int(part)]) for part in address.split("."))
        assert not world().allows(put(f"claims/addresses/red/blue/{number.hex()}", claim()), put(E, mine))
        absent = World({key(N): None})
        assert not absent.allows(put(C, claim()), put(E, self.MINE))

    @pytest.mark.parametrize("first", ["08080800", "0a010000", "0a000041", "0a00ffff", "fd01" + "0" * 28])
    def test_H3_a_block_that_is_none_of_the_network_is_refused(self, first: str) -> None:
        assert not world().allows(put(f"blocks/red/blue/{first}", Block(owner=ME)))
        assert not World({key(N): None}).allows(put(B, Block(owner=ME)))

    def test_H3_a_claim_is_not_released_under_an_endpoint_that_keeps_its_address(self) -> None:
        assert not world(e=self.MINE, c=claim()).allows(Delete(key(C)))
        assert world(e=self.MINE, c=claim()).allows(Delete(key(C)), Delete(key(E)))

    def test_an_endpoint_that_cannot_be_read_may_be_written_again(self) -> None:
        block = {key("blocks/red/blue/0a000000"): codec.encode(Block(owner=ME)), key(E): b"garbage"}
        assert World(block).allows(put(E, self.MINE))


@pytest.mark.parametrize(
    "write",
    [
        put(E, msgspec.structs.replace(endpoint(ME), ip_address="garbage")),
        put(E, msgspec.structs.replace(endpoint(ME), mac_address="zz")),
        put(f"nodes/{ME}", Node(name=ME, vtep_ip="garbage")),
        put(f"status/nodes/{ME}/applied", SyncStatus(revision=-1)),
        Put(key(f"status/nodes/{ME}/x"), bytes(MAX_STATUS + 1)),
        Put(key(f"alive/nodes/{ME}"), bytes(MAX_ALIVE + 1)),
        put(f"nodes/{ME}", Node(name=ME, version="x" * 3000)),
    ],
)
def test_H2_what_a_node_writes_is_validated_as_what_a_user_writes(write: Write) -> None:
    with pytest.raises(Invalid):
        world().allows(write)
