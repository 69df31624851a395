"""Endpoints: one commit each with their addresses, and everything back at the end (E1, E12, O22, W17, W19)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Exhausted, Invalid, NotFound
from weft.domain.ids import EndpointId, EndpointKey, NetworkName
from weft.domain.ipam.allocator import NumberSet
from weft.domain.lifecycle.changes import endpoints
from weft.domain.lifecycle.changes.endpoints import Busy

E1 = EndpointKey(DEFAULT, NetworkName("blue"), EndpointId("e1"))


@pytest.fixture
def world() -> FakeCluster:
    world = FakeCluster()
    world.put(network(gateway="10.1.1.254", ipv6_subnet="fd00::/120", ipv6_gateway="fd00::1"))
    return world


def test_both_families_are_taken_in_one_commit_and_freed_in_one(world: FakeCluster) -> None:
    """W19: the original never freed the v6 address."""
    before, revision = dict(world.entries), world.revision
    made = world.attach("e1")
    assert (made.ip_address, made.ipv6_address, made.mac_address) == ("10.1.1.1", "fd00::2", "02:02:0a:01:01:01")
    assert world.revision == revision + 1
    assert world.entries.keys() - before.keys() == {
        "endpoints/default/blue/e1",
        "claims/addresses/default/blue/0a010101",
        f"claims/addresses/default/blue/fd{0:028x}02",
    }
    world.detach("e1")
    assert world.entries == before


def test_new_labels_make_no_other_endpoint(world: FakeCluster) -> None:
    """A node that comes back with an endpoint as it was before its container was labelled keeps it."""
    made = world.attach("e1")
    changed, plan = endpoints.plan_update(
        world.reading(), made.key, labels={"app": "web"}, container_id="c1", container_name="web"
    )
    world.carry_out(plan)
    assert endpoints.is_same(changed, made)
    assert endpoints.plan_publish(world.reading(), made).writes == ()
    for other in (
        msgspec.structs.replace(made, host="two"),
        msgspec.structs.replace(made, ip_address="10.1.1.9"),
    ):
        assert not endpoints.is_same(changed, other)
        with pytest.raises(Conflict):
            endpoints.plan_publish(world.reading(), other)


def test_a_hardware_address_that_is_asked_for_is_kept(world: FakeCluster) -> None:
    """P-11."""
    wanted = msgspec.structs.replace(endpoint("e1"), mac_address="02:11:22:33:44:55")
    made, _ = endpoints.plan_create(world.reading(), wanted, busy=endpoints.Busy())
    assert made.mac_address == "02:11:22:33:44:55"


def test_an_endpoint_that_exists_is_given_back_unchanged(world: FakeCluster) -> None:
    made = world.attach("e1")
    wanted = msgspec.structs.replace(endpoint("e1", address="10.1.1.77"), host="elsewhere")
    again, plan = endpoints.plan_create(world.reading(), wanted, busy=Busy())
    assert again == made
    assert plan.writes == ()


def test_addresses_can_be_asked_for(world: FakeCluster) -> None:
    made = world.attach("e1", address="10.1.1.7", address_v6="fd00::7")
    assert (made.ip_address, made.ipv6_address) == ("10.1.1.7", "fd00::7")
    with world.refuses(Conflict, field="IPAddress"):
        world.attach("e2", address="10.1.1.7")
    with world.refuses(Conflict, field="IPv6Address"):
        world.attach("e2", address_v6="fd00::7")
    with world.refuses(Invalid, field="IPAddress"):
        world.attach("e2", address="fd00::8")
    with world.refuses(Invalid, field="IPv6Address"):
        world.attach("e2", address_v6="fd01::8")


def test_references_must_exist_and_fit(world: FakeCluster) -> None:
    world.put(network("red", "10.2.0.0/24"))
    world.put(group(network="red"))
    with world.refuses(Invalid, field="ServiceName"):
        world.attach("e1", group="none")
    with world.refuses(Conflict, field="ServiceName"):
        world.attach("e1", group="web")
    with world.refuses(Invalid, field="NetworkName"):
        world.attach("e1", network="none")
    with world.refuses(NotFound):
        world.detach("e1")


def test_what_is_held_or_rests_is_passed_over(world: FakeCluster) -> None:
    pool = (network().key, 4)
    busy = Busy(held={pool: NumberSet([0x0A010101])}, cooling={pool: NumberSet([0x0A010102])})
    made, _ = endpoints.plan_create(world.reading(), endpoint("e1"), busy=busy)
    assert made.ip_address == "10.1.1.3"


def test_an_update_changes_labels_and_names_only(world: FakeCluster) -> None:
    made = world.attach("e1")

    def update(labels: dict[str, str], container: str) -> int:
        changed, plan = endpoints.plan_update(
            world.reading(), E1, labels=labels, container_id=container, container_name="shop"
        )
        world.carry_out(plan)
        stored = world.cluster.get(kinds.ENDPOINT, *E1)
        assert stored is not None
        assert stored.value == changed
        assert changed.ip_address == made.ip_address
        return len(plan.writes)

    assert update({"app": "web"}, "c1") == 1
    assert update({"app": "web"}, "c1") == 0
    assert update({}, "c1") == 1
    with world.refuses(Invalid, field="labels"):
        update({"a": "\n"}, "c1")
    world.detach("e1")
    with world.refuses(NotFound):
        update({}, "c1")


class TestReservations:
    def reserve(self, world: FakeCluster, asked: str = "", of: model.Group | None = None) -> str:
        stored = world.cluster.get(kinds.NETWORK, "default", "blue")
        assert stored is not None
        address, plan = endpoints.plan_reserve(world.reading(), stored.value, of, asked=asked, busy=Busy())
        world.carry_out(plan)
        return str(address)

    def release(self, world: FakeCluster, text: str) -> None:
        world.carry_out(endpoints.plan_release(world.reading(), network(), text))

    def test_an_address_ahead_of_its_endpoint(self, world: FakeCluster) -> None:
        before = dict(world.entries)
        assert self.reserve(world) == "10.1.1.1"
        assert self.reserve(world) == "10.1.1.2"
        assert self.reserve(world, "fd00::9") == "fd00::9"
        with world.refuses(Conflict, field="PreferredIPv4Address"):
            self.reserve(world, "10.1.1.2")
        with world.refuses(Invalid, field="PreferredIPv4Address"):
            self.reserve(world, "10.1.1.254")
        for text in ("10.1.1.1", "10.1.1.2", "fd00::9", "10.1.1.3"):
            self.release(world, text)
        assert world.entries == before

    def test_it_goes_to_its_endpoint_and_then_only_with_it(self, world: FakeCluster) -> None:
        before = dict(world.entries)
        assert self.reserve(world, "10.1.1.7") == "10.1.1.7"
        assert world.attach("e1", address="10.1.1.7").ip_address == "10.1.1.7"
        with world.refuses(Conflict, field="IPv4Address"):
            self.release(world, "10.1.1.7")
        world.detach("e1")
        self.release(world, "10.1.1.7")
        assert world.entries == before

    def test_a_network_or_group_that_is_gone(self, world: FakeCluster) -> None:
        web = world.put(group())
        gone = network("gone", "10.7.0.0/24")
        with world.refuses(NotFound):
            endpoints.plan_reserve(world.reading(), gone, None, asked="", busy=Busy())
        world.delete(web)
        with world.refuses(NotFound):
            self.reserve(world, of=web)


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["", "web"]), st.integers(0, 8)), max_size=40))
def test_never_twice_never_lost_and_all_released(steps: list[tuple[int, str, int]]) -> None:
    """Endpoints come and go in any order, with and without a group and a requested, on a network that is soon full."""
    world = FakeCluster()
    world.put(network(subnet="10.1.1.0/29", gateway="10.1.1.6"))
    world.put(group(ip_pool="10.1.1.3-10.1.1.4"))
    before = dict(world.entries)
    here: dict[str, str] = {}
    pools = {"": {1, 2, 5}, "web": {3, 4}}
    for number, owner, requested in steps:
        name = f"e{number}"
        if name in here:
            world.detach(name)
            del here[name]
            continue
        taken = {int(text.rpartition(".")[2]) for text in here.values()}
        free = pools[owner] - taken
        if requested and requested not in pools[owner]:
            with world.refuses(Invalid, field="IPAddress"):
                world.attach(name, group=owner, address=f"10.1.1.{requested}")
        elif requested and requested in taken:
            with world.refuses(Conflict, field="IPAddress"):
                world.attach(name, group=owner, address=f"10.1.1.{requested}")
        elif not requested and not free:
            with world.refuses(Exhausted):
                world.attach(name, group=owner)
        else:
            made = world.attach(name, group=owner, address=f"10.1.1.{requested}" if requested else "")
            assert made.ip_address == f"10.1.1.{requested or min(free)}"
            here[name] = made.ip_address
    for name in here:
        world.detach(name)
    assert world.entries == before
