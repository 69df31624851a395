"""Addresses as claims and blocks (ADR 2). That none is ever given twice under any interleaving is tested apart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster, endpoint, group, network

from weft.domain import model
from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import NodeName
from weft.domain.ipam import ipam
from weft.domain.ipam.allocator import BLOCK_SIZE, NumberSet
from weft.domain.lifecycle.changes.endpoints import plan_publish

NODE = NodeName("n1")
LARGE = "10.1.0.0/16"


def at(text: str) -> Address:
    return parse_address(text, field="x")


def take_block(world: FakeCluster, wanted: model.Network, node: NodeName = NODE, *, family: int = 4) -> Address:
    reading = world.reading()
    block, writes = ipam.take_block(reading, wanted, node, family=family)
    world.carry_out(reading.plan(writes))
    return block


class TestSpans:
    def texts(self, world: FakeCluster, wanted: model.Network, owner: model.Group | None = None) -> str:
        return ipam.describe(ipam.spans_for(world.cluster, wanted, owner, 4), 4)

    def test_the_gateway_and_the_pools_of_groups_are_left_out(self) -> None:
        world = FakeCluster()
        blue = world.put(network(gateway="10.1.1.254"))
        low = world.put(group("low", ip_pool="10.1.1.1-10.1.1.9"))
        plain = world.put(group("plain"))
        assert self.texts(world, blue) == "10.1.1.10-10.1.1.253"
        assert self.texts(world, blue, plain) == "10.1.1.10-10.1.1.253"
        assert self.texts(world, blue, low) == "10.1.1.1-10.1.1.9"
        world.delete(low)
        assert self.texts(world, blue) == "10.1.1.1-10.1.1.253"

    def test_pools_are_v4_only(self) -> None:
        world = FakeCluster()
        blue = world.put(network(ipv6_subnet="fd00::/120", ipv6_gateway="fd00::1"))
        web = world.put(group(ip_pool="10.1.1.1-10.1.1.9"))
        spans = ipam.spans_for(world.cluster, blue, web, 6)
        assert ipam.describe(spans, 6) == "fd00::2-fd00::ff"
        assert ipam.spans_for(world.cluster, network(), None, 6) == []


class TestChoice:
    def test_the_lowest_free_address_that_is_not_held_or_resting(self) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet="10.1.1.0/29"))
        world.attach("e1")
        held, cooling = NumberSet([at("10.1.1.2").number]), NumberSet([at("10.1.1.3").number])

        def choose() -> str:
            return str(ipam.choose_address(world.cluster, blue, None, family=4, held=held, cooling=cooling))

        assert choose() == "10.1.1.4"
        for name in ("e4", "e5", "e6"):
            world.attach(name, address=f"10.1.1.{name[1]}")
        assert choose() == "10.1.1.3"
        world.attach("e3", address="10.1.1.3")
        with pytest.raises(Exhausted, match="default:blue"):
            choose()

    def test_blocks_of_nodes_are_left_to_them(self) -> None:
        """What is left are the first and the last block, which no node can take whole."""
        world = FakeCluster()
        blue = world.put(network(subnet="10.1.0.0/21"))
        for _ in range(30):
            take_block(world, blue)
        given_out = {world.attach(f"e{number}").ip_address for number in range(126)}
        ends = [f"10.1.0.{number}" for number in range(1, 64)] + [f"10.1.7.{number}" for number in range(192, 255)]
        assert given_out == set(ends)
        with pytest.raises(Exhausted):
            world.attach("more")

    @given(st.sets(st.integers(1, 14)), st.booleans())
    def test_what_is_chosen_is_free_and_may_be_claimed(self, taken: set[int], in_group: bool) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet="10.1.1.0/28", gateway="10.1.1.14"))
        web = world.put(group(ip_pool="10.1.1.3-10.1.1.6"))
        pool, rest = {3, 4, 5, 6}, set(range(1, 14)) - {3, 4, 5, 6}
        for number in taken & rest:
            world.attach(f"e{number}", address=f"10.1.1.{number}")
        for number in taken & pool:
            world.attach(f"e{number}", address=f"10.1.1.{number}", group="web")
        owner, free = (web, pool - taken) if in_group else (None, rest - taken)
        if not free:
            with pytest.raises(Exhausted):
                ipam.choose_address(world.cluster, blue, owner, family=4)
            return
        chosen = ipam.choose_address(world.cluster, blue, owner, family=4)
        assert str(chosen) == f"10.1.1.{min(free)}"
        assert world.attach("new", group="web" if in_group else "").ip_address == str(chosen)


class TestClaims:
    def claim(self, world: FakeCluster, blue: model.Network, text: str, holder: str) -> None:
        reading = world.reading()
        writes = ipam.claim(reading, blue, None, address=at(text), holder=holder, field="IPAddress")
        world.carry_out(reading.plan(writes))

    def test_an_address_has_one_holder(self) -> None:
        """W17."""
        world = FakeCluster()
        blue = world.put(network())
        self.claim(world, blue, "10.1.1.5", "endpoint:x")
        self.claim(world, blue, "10.1.1.5", "endpoint:x")
        with world.refuses(Conflict, field="IPAddress"):
            self.claim(world, blue, "10.1.1.5", "endpoint:y")

    def test_a_reserved_address_is_taken_over_by_the_first_endpoint(self) -> None:
        world = FakeCluster()
        blue = world.put(network())
        self.claim(world, blue, "10.1.1.5", ipam.reservation(blue.key))
        self.claim(world, blue, "10.1.1.5", "endpoint:x")
        with world.refuses(Conflict, field="IPAddress"):
            self.claim(world, blue, "10.1.1.5", "endpoint:y")

    @pytest.mark.parametrize("text", ["10.1.1.0", "10.1.1.255", "10.1.1.254", "10.1.1.9", "10.2.0.1", "fd00::1"])
    def test_an_address_that_cannot_be_allocated(self, text: str) -> None:
        world = FakeCluster()
        blue = world.put(network(gateway="10.1.1.254"))
        world.put(group(ip_pool="10.1.1.9"))
        with world.refuses(Invalid, field="IPAddress"):
            self.claim(world, blue, text, "endpoint:x")

    def test_a_claim_in_a_large_pool_shares_its_block(self) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet=LARGE))
        self.claim(world, blue, "10.1.0.70", "endpoint:x")
        assert world.cluster.blocks[blue.key][at("10.1.0.64")].value == model.Block()
        self.claim(world, blue, "10.1.0.71", "endpoint:y")
        block = take_block(world, blue)
        assert str(block) == "10.1.255.128"
        with world.refuses(Conflict, field="IPAddress"):
            self.claim(world, blue, "10.1.255.130", "endpoint:z")

    def test_reserved_addresses_are_known_by_group(self) -> None:
        world = FakeCluster()
        blue = world.put(network())
        web = world.put(group())
        self.claim(world, blue, "10.1.1.5", ipam.reservation(web.key))
        self.claim(world, blue, "10.1.1.6", ipam.reservation(blue.key))
        assert list(ipam.reserved_for(world.cluster, blue.key, web.key)) == [at("10.1.1.5")]


class TestBlocks:
    @pytest.mark.parametrize(
        ("subnet", "has"),
        [("10.1.0.0/21", True), ("10.1.0.0/22", False), ("10.1.0.0-10.1.4.3/16", True), ("10.1.0.1-10.1.4.0/16", True),
         ("10.1.0.1-10.1.3.255/16", False), ("10.0.0.0/8", True)],
    )  # fmt: skip
    def test_large_pools_have_blocks(self, subnet: str, has: bool) -> None:
        """From 1,024 usable addresses on."""
        assert ipam.has_blocks(network(subnet=subnet), 4) is has

    def test_nodes_take_whole_free_blocks_from_the_top(self) -> None:
        """The last one holds the broadcast address, so it is not whole."""
        world = FakeCluster()
        blue = world.put(network(subnet=LARGE, gateway="10.1.255.70"))
        world.put(group(ip_pool="10.1.254.200-10.1.254.210"))
        blocks = [str(take_block(world, blue, NodeName(f"n{number}"))) for number in range(5)]
        assert blocks == ["10.1.255.128", "10.1.255.0", "10.1.254.128", "10.1.254.64", "10.1.254.0"]

    def test_a_pool_without_free_blocks_says_so(self) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet="10.1.0.0/21"))
        for _ in range(30):
            take_block(world, blue)
        with pytest.raises(Exhausted):
            take_block(world, blue)

    @pytest.mark.parametrize("family", [4, 6])
    def test_a_node_chooses_from_its_own_blocks(self, family: int) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet=LARGE, ipv6_subnet="fd00::/64"))
        take_block(world, blue, NodeName("other"), family=family)
        first = take_block(world, blue, family=family)
        second = take_block(world, blue, family=family)
        low = min(first, second).number

        def choose(held: set[int], cooling: set[int]) -> Address | None:
            return ipam.choose_from_blocks(
                world.cluster, blue, NODE, family=family, held=NumberSet(held), cooling=NumberSet(cooling)
            )

        assert choose(set(), set()) == Address(family, low)
        assert choose({low}, {low + 1}) == Address(family, low + 2)
        everything = set(range(low, low + 128))
        assert choose(everything - {low + 5}, {low + 5}) == Address(family, low + 5)
        assert choose(everything, set()) is None

    def test_an_unused_block_is_returned(self) -> None:
        world = FakeCluster()
        blue = world.put(network(subnet=LARGE))
        before = dict(world.entries)
        block = take_block(world, blue)
        reading = world.reading()
        assert ipam.return_block(reading, blue, NodeName("other"), block) == []
        world.carry_out(reading.plan(ipam.return_block(reading, blue, NODE, block)))
        assert world.entries == before

    def test_used_addresses_are_those_of_claims_and_of_blocks(self) -> None:
        """What a node gave out is shown as allocated like any other."""
        world = FakeCluster()
        blue = world.put(network(subnet=LARGE))
        block = take_block(world, blue)
        world.attach("e1")
        mine = msgspec.structs.replace(endpoint("e2", address=str(block)), host=NODE)
        world.carry_out(plan_publish(world.reading(), mine))
        used = ipam.used_addresses(world.cluster, blue, family=4)
        assert list(used) == [at("10.1.0.1").number, block.number]


@given(st.integers(0, 0xFFFF))
def test_every_address_lies_in_its_block(number: int) -> None:
    blue = network(subnet=LARGE)
    address = Address(4, 0x0A010000 + number)
    block = ipam.block_of(blue, address)
    assert block.number <= address.number < block.number + BLOCK_SIZE
    assert (block.number - 0x0A010000) % BLOCK_SIZE == 0


def test_runs_are_written_as_the_original_did() -> None:
    spans = [
        (at(first).number, at(last).number) for first, last in (("10.1.1.1", "10.1.1.4"), ("10.1.1.6", "10.1.1.6"))
    ]
    assert ipam.describe(spans, 4) == "10.1.1.1-10.1.1.4, 10.1.1.6"
    assert ipam.describe([], 4) == ""


def test_release_of_nothing_is_nothing() -> None:
    assert ipam.release(network(), "", "") == []
