"""What is stored may be garbage: it costs itself, and never a process, an address or a policy (finding H2)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network, policy, rule

from weft.domain import codec, kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Unavailable
from weft.domain.ids import NetworkKey, NetworkName, NodeName, StoreKey
from weft.domain.ipam import ipam
from weft.domain.store_keys import UnparsedKey, parse_store_key
from weft.domain.store_types import Change, Entry, Event, Listing, RevisionEquals
from weft.domain.transaction import ReadSet

BLUE = NetworkKey(DEFAULT, NetworkName("blue"))
ENDPOINT_KEY = kinds.ENDPOINT.store_key("default", "blue", "e1")
NODE_KEY = kinds.NODE.store_key("n1")


def bad_endpoint(**members: object) -> bytes:
    return codec.encode(msgspec.structs.replace(endpoint("e1"), **members))


@pytest.mark.parametrize(
    "members",
    [
        {"ip_address": "garbage"},
        {"ip_address": "fd01::1"},
        {"ipv6_address": "10.1.1.1"},
        {"ipv6_address": "::ffff:10.1.1.1"},
        {"mac_address": "02:02"},
        {"mac_address": "02:02:0a:01:01:0g"},
        {"vtep_ip": "nowhere"},
        {"host": "a/b"},
        {"interface": "x" * 5000},
        {"labels": {"a": "b\n"}},
        {"pod": model.PodIdentity(namespace="x\0", name="y")},
        {"pod": model.PodIdentity(namespace="x", name="y", ports=(model.PodPort("http", 6, 70000),))},
    ],
)
def test_H2_an_endpoint_that_rest_would_refuse_is_absent_and_a_fault(members: dict[str, object]) -> None:
    cluster = Cluster()
    cluster.replace(Listing((Entry(ENDPOINT_KEY, bad_endpoint(**members), 3),), 3))
    assert cluster.get(kinds.ENDPOINT, "default", "blue", "e1") is None
    assert cluster.faults[ENDPOINT_KEY].revision == 3
    assert cluster.decode_errors == {"endpoint": 1}
    # A later good document, and its deletion, leave nothing behind.
    cluster.apply(Change(4, (Event(ENDPOINT_KEY, bad_endpoint()),)))
    assert cluster.get(kinds.ENDPOINT, "default", "blue", "e1") is not None
    cluster.apply(Change(5, (Event(ENDPOINT_KEY, bad_endpoint(**members)),)))
    assert list(cluster.endpoints(BLUE)) == []
    assert all(len(numbers) == 0 for numbers in cluster.in_use.values())
    cluster.apply(Change(6, (Event(ENDPOINT_KEY, None),)))
    assert cluster.faults == {}


@pytest.mark.parametrize(
    "members", [{"vtep_ip": "garbage"}, {"ctrl_ip": "x"}, {"vxlan_port": 0}, {"vxlan_port": 1 << 40}, {"version": "\n"}]
)
def test_H2_a_node_with_a_bad_address_or_port_is_absent(members: dict[str, object]) -> None:
    cluster = Cluster()
    document = msgspec.structs.replace(model.Node(name=NodeName("n1"), vtep_ip="192.0.2.1"), **members)
    cluster.put(NODE_KEY, codec.encode(document), 2)
    assert cluster.get(kinds.NODE, "n1") is None
    assert NODE_KEY in cluster.faults


def test_H2_a_fault_is_counted_once_for_each_revision() -> None:
    """A new listing after a lost watch brings the same document again."""
    cluster = Cluster()
    bad = Entry(ENDPOINT_KEY, b"\xff", 3)
    for _ in range(3):
        cluster.replace(Listing((bad,), 9))
    assert cluster.decode_errors == {"endpoint": 1}
    cluster.put(ENDPOINT_KEY, b"[]", 10)
    assert cluster.decode_errors == {"endpoint": 2}


@pytest.mark.parametrize(
    "key",
    [
        "claims/addresses/default/blue/" + "f" * 40,
        "claims/vlan/-5",
        "claims/vlan/" + "9" * 30,
        "blocks/a/b/" + "0" * 33,
    ],
)
def test_H2_a_number_outside_of_its_range_is_no_key(key: str) -> None:
    parsed = parse_store_key(StoreKey(key))
    assert isinstance(parsed, UnparsedKey)
    assert parsed.reason


def test_H2_an_unreadable_claim_or_block_stays_taken() -> None:
    """As absent it would look free, and every commit that takes it would fail."""
    world = FakeCluster()
    world.put(network())
    small = world.put(network("small", subnet="10.9.9.0/29", gateway=""))
    for number in range(1, 7):
        world.cluster.put(ipam.claim_key(small, Address(4, 0x0A090900 + number)), b"garbage", 7)
    with pytest.raises(Conflict):
        ipam.choose_address(world.cluster, small, None, family=4)
    large = world.put(network("large", subnet="10.16.0.0/16", gateway=""))
    top, _ = ipam.take_block(ReadSet(world.cluster, 1), large, NodeName("n1"), family=4)
    world.cluster.put(ipam.block_key(large, top), b"garbage", 7)
    next_block, _ = ipam.take_block(ReadSet(world.cluster, 1), large, NodeName("n1"), family=4)
    assert next_block != top
    assert world.cluster.blocks[large.key][top].value.owner != "n1"


def test_H2_configuration_keeps_its_last_good_value_also_over_a_new_listing() -> None:
    cluster = Cluster()
    key = kinds.GROUP.store_key("default", "web")
    cluster.put(key, codec.encode(group(policies=("p",))), 2)
    cluster.apply(Change(3, (Event(key, b"garbage"),)))
    cluster.replace(Listing((Entry(key, b"garbage", 3),), 5))
    kept = cluster.get(kinds.GROUP, "default", "web")
    assert kept is not None
    assert kept.value.policies == ("p",)
    assert kept.revision == 3, "a commit that replaces it compares the garbage"
    assert key in cluster.faults
    cluster.apply(Change(6, (Event(key, None),)))
    assert cluster.get(kinds.GROUP, "default", "web") is None


def test_H2_a_decision_may_replace_an_unreadable_object() -> None:
    """Else the key could neither be created nor deleted again: as absent, the compare of its absence fails."""
    cluster = Cluster()
    cluster.put(NODE_KEY, b"garbage", 8)
    reading = ReadSet(cluster, 9)
    assert reading.get(kinds.NODE, "n1") is None
    assert reading.plan([]).compares == (RevisionEquals(NODE_KEY, 8),)


def test_H2_a_document_of_a_newer_weft_is_never_replaced() -> None:
    cluster = Cluster()
    cluster.put(NODE_KEY, b'{"v":2,"o":{"name":"n1"}}', 8)
    with pytest.raises(Unavailable, match="upgrade"):
        ReadSet(cluster, 9).get(kinds.NODE, "n1")


@pytest.mark.parametrize("value", [policy(), rule("1"), network()])
def test_H2_every_kind_is_validated(value: model.Value) -> None:
    kind = next(kind for kind in kinds.ALL if isinstance(value, kind.type))
    wrong: dict[str, dict[str, object]] = {
        "policy": {"name": "a b"},
        "rule": {"port": -1},
        "network": {"subnet": "10.0.0.0/99"},
    }
    bad = wrong[kind.name]
    changed = msgspec.structs.replace(value, **bad)
    cluster = Cluster()
    cluster.put(kind.store_key(*kind.key_parts(changed)), codec.encode(changed), 2)
    assert list(cluster.all(kind)) == []
    assert len(cluster.faults) == 1
