"""H3: an endpoint counts only while blocks and claims cover its addresses, in whatever order they change."""

from __future__ import annotations

from tests.support.fake_cluster import DEFAULT, network

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, StoreKey
from weft.domain.ipam import ipam
from weft.domain.store_types import Change, Entry, Event, Listing

LARGE = network(subnet="10.1.0.0/16")
BLUE = NetworkName("blue")
KEY = EndpointKey(DEFAULT, BLUE, EndpointId("e"))
ENDPOINT = kinds.ENDPOINT.store_key(*KEY)


def address(text: str) -> Address:
    return parse_address(text, field="address")


CLAIM = ipam.claim_key(LARGE, address("10.1.2.5"))
BLOCK = ipam.block_key(LARGE, address("10.1.2.0"))


def endpoint(ip: str = "10.1.2.5", host: str = "n1") -> bytes:
    return codec.encode(
        model.Endpoint(tenant=DEFAULT, network=BLUE, endpoint_id=KEY.endpoint, ip_address=ip, host=host)
    )


def claim(holder: str = "endpoint:default:blue:e") -> bytes:
    return codec.encode(model.Claim(holder=holder))


def block(owner: str = "n1") -> bytes:
    return codec.encode(model.Block(owner=owner))


class World:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self._revision = 0

    def change(self, *events: tuple[StoreKey, bytes | None]) -> bool:
        """Apply one change; whether the endpoint counts after it."""
        self._revision += 1
        self.cluster.apply(Change(self._revision, tuple(Event(*each) for each in events)))
        return self.counts

    @property
    def counts(self) -> bool:
        found = self.cluster.covered_endpoint(KEY)
        listed = list(self.cluster.covered_endpoints(LARGE.key))
        assert listed == ([found] if found else [])
        return found is not None

    @property
    def reported(self) -> bool:
        return self.cluster.cover_changed == [ENDPOINT]


def test_H3_an_endpoint_alone_does_not_count() -> None:
    world = World()
    assert not world.change((ENDPOINT, endpoint()))
    assert list(world.cluster.uncovered) == [tuple(KEY)]
    assert not world.change((ENDPOINT, None))
    assert not world.cluster.uncovered


def test_H3_without_an_address_there_is_nothing_to_prove() -> None:
    assert World().change((ENDPOINT, endpoint(ip="")))


def test_H3_a_claim_of_its_own_covers_it() -> None:
    world = World()
    assert not world.change((ENDPOINT, endpoint()))
    assert world.change((CLAIM, claim()))
    assert world.reported
    assert not world.change((CLAIM, claim("endpoint:default:blue:other")))
    assert world.reported
    assert world.change((CLAIM, claim()))
    assert not world.change((CLAIM, b"garbage"))
    assert world.change((CLAIM, claim()))
    assert not world.change((CLAIM, None))
    assert world.reported


def test_H3_a_block_of_its_node_covers_it() -> None:
    world = World()
    assert not world.change((ENDPOINT, endpoint()))
    assert not world.change((BLOCK, block("n2")))
    assert world.change((BLOCK, block("n1")))
    assert world.reported
    assert not world.change((BLOCK, block("")))
    assert world.change((BLOCK, block("n1")))
    assert not world.change((BLOCK, b"garbage"))
    assert world.change((BLOCK, block("n1")))
    assert not world.change((BLOCK, None))
    assert world.reported


def test_H3_in_one_commit_the_order_does_not_matter() -> None:
    events = [(ENDPOINT, endpoint()), (CLAIM, claim())]
    assert World().change(*events)
    assert World().change(*reversed(events))


def test_H3_an_endpoint_that_changes_its_address_or_node_proves_it_again() -> None:
    world = World()
    assert world.change((BLOCK, block()), (ENDPOINT, endpoint()))
    assert not world.change((ENDPOINT, endpoint(ip="10.1.3.5")))
    assert not world.change((ENDPOINT, endpoint(host="n2")))
    assert world.change((ENDPOINT, endpoint()))
    assert not world.cluster.cover_changed


def test_H3_both_families_must_be_covered() -> None:
    world = World()
    both = model.Endpoint(
        tenant=DEFAULT, network=BLUE, endpoint_id=KEY.endpoint, ip_address="10.1.2.5", ipv6_address="fd00::5", host="n1"
    )
    assert not world.change((CLAIM, claim()), (ENDPOINT, codec.encode(both)))
    sixth = ipam.claim_key(network(ipv6_subnet="fd00::/64"), address("fd00::5"))
    assert world.change((sixth, claim()))


def test_H3_a_listing_and_a_copy_say_the_same() -> None:
    cluster = Cluster()
    cluster.replace(Listing((Entry(CLAIM, claim(), 1), Entry(ENDPOINT, endpoint(), 1)), 1))
    assert cluster.covered_endpoint(KEY) is not None
    twin = cluster.copy()
    twin.apply(Change(2, (Event(CLAIM, None),)))
    assert twin.covered_endpoint(KEY) is None
    assert cluster.covered_endpoint(KEY) is not None
    cluster.replace(Listing((Entry(ENDPOINT, endpoint(), 1),), 1))
    assert cluster.covered_endpoint(KEY) is None


def test_H3_hostile_holders_are_harmless() -> None:
    world = World()
    world.change((ENDPOINT, endpoint()))
    for holder in ("endpoint:", "endpoint:a", "endpoint:default:blue:e:x", "endpoint", "service:default:blue:e"):
        assert not world.change((CLAIM, claim(holder)))
