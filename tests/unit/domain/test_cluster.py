"""The snapshot: what the store says, decoded and indexed; never an end, whatever is stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network, policy, rule

from weft.domain import codec, kinds, model
from weft.domain.addresses import Range
from weft.domain.cluster import Cluster
from weft.domain.ids import NetworkKey, NetworkName, NodeName, StoreKey, TenantName
from weft.domain.store_types import Change, Entry, Event, Listing

BLUE = NetworkKey(DEFAULT, NetworkName("blue"))


def test_an_empty_cluster_has_default_settings() -> None:
    assert Cluster().global_settings() == model.Global()


def test_objects_come_change_and_go() -> None:
    world = FakeCluster()
    stored = world.put(network())
    found = world.cluster.get(kinds.NETWORK, "default", "blue")
    assert found is not None
    assert found.value == stored
    assert found.revision == world.revision
    assert list(world.cluster.networks(DEFAULT)) == [stored]
    world.delete(stored)
    assert world.cluster.get(kinds.NETWORK, "default", "blue") is None
    assert world.entries.keys() == {"tenants/default"}


def test_objects_are_listed_by_the_start_of_their_key_and_in_order() -> None:
    world = FakeCluster()
    for name in ("q", "p"):
        world.put(policy(name))
    world.put(rule("2"))
    world.put(rule("1"))
    world.put(rule("1", policy="q"))
    assert [one.rule_id for one in world.cluster.all(kinds.RULE, "default", "p")] == ["1", "2"]
    assert [one.policy for one in world.cluster.all(kinds.RULE)] == ["p", "p", "q"]
    assert list(world.cluster.all(kinds.RULE, "none")) == []


def test_endpoints_are_known_by_network_and_group() -> None:
    world = FakeCluster()
    world.put(network())
    web = world.put(group())
    world.attach("e1", group="web")
    world.attach("e2")
    assert {one.endpoint_id for one in world.cluster.endpoints(BLUE)} == {"e1", "e2"}
    assert [one.endpoint_id for one in world.cluster.group_members(web)] == ["e1"]
    world.detach("e1")
    world.detach("e2")
    assert list(world.cluster.endpoints(BLUE)) == []
    assert world.cluster.by_network == {}


def test_an_endpoint_is_found_by_a_part_of_its_names() -> None:
    world = FakeCluster()
    world.put(network())
    world.attach("4f3a")
    world.attach("4f3b")
    assert [one.endpoint_id for one in world.cluster.find_endpoints("4f3")] == ["4f3a", "4f3b"]
    assert [one.endpoint_id for one in world.cluster.find_endpoints("default:blue:4f3b")] == ["4f3b"]
    assert list(world.cluster.find_endpoints("")) == []


def test_the_pool_of_a_group_follows_the_group() -> None:
    """Also when a restore puts another group of the same name in its place."""
    cluster = Cluster()
    key = kinds.GROUP.store_key("default", "web")

    def put(wanted: model.Group, revision: int) -> None:
        cluster.put(key, codec.encode(wanted), revision)

    put(group(ip_pool="10.1.1.1-10.1.1.9"), 1)
    assert cluster.pools[BLUE] == {"web": Range(4, 0x0A010101, 0x0A010109)}
    put(group(ip_pool="10.1.1.5"), 2)
    assert cluster.pools[BLUE] == {"web": Range(4, 0x0A010105, 0x0A010105)}
    put(group(network="red", ip_pool="10.2.1.5"), 3)
    assert not cluster.pools[BLUE]
    put(group(), 4)
    assert not any(cluster.pools.values())
    put(group(ip_pool="10.1.1.5"), 5)
    cluster.drop(key)
    assert not any(cluster.pools.values())


def test_who_lives_who_leads_and_whether_a_restore_runs() -> None:
    cluster = Cluster()
    node = NodeName("n1")
    assert cluster.is_unreachable(node)
    cluster.put(kinds.alive_node(node), b"", 1)
    cluster.put(kinds.LEADER_KEY, b"127.0.0.1:9999", 2)
    cluster.put(kinds.RESTORE_KEY, b"running", 3)
    assert not cluster.is_unreachable(node)
    assert (cluster.leader, cluster.restoring) == (("127.0.0.1:9999", 2), True)
    for key in (kinds.alive_node(node), kinds.LEADER_KEY, kinds.RESTORE_KEY):
        cluster.drop(key)
    assert _content(cluster) == _content(Cluster())


KEYS = [
    "tenants/default", "tenants", "tenants/a/b", "networks/default/blue", "networks/default", "groups/default/web",
    "endpoints/default/blue/e1", "endpoints/default", "endpoints/a/b/c/d", "claims/vlan/7", "claims/vlan/07",
    "claims/addresses/default/blue/0a010101", "claims/addresses/default/blue/zz", "claims/addresses/x", "claims",
    "blocks/default/blue/0a010100", "blocks/default", "blocks", "alive/nodes/n1", "alive/nodes", "alive", "leader",
    "claims/vlan", "claims/vlan/x", "claims/vlan/x/7", "alive/others/x", "restore", "none/of/ours", "", "/", "//",
]  # fmt: skip
DOCUMENTS = [
    b"", b"{}", b"\xff", b"[" * 50_000, b'{"v":1,"o":{}}', b'{"v":9,"o":{}}', b'{"v":1,"o":{"holder":"x"}}',
    codec.encode(model.Tenant(name=DEFAULT)),
    codec.with_unknown(codec.encode(model.Tenant(name=DEFAULT)), {"colour": "red"}),
    codec.encode(network()),
    codec.encode(group(ip_pool="10.1.1.1")),
    codec.encode(group(ip_pool="garbage")),
    codec.encode(endpoint("e1", address="10.1.1.1")),
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.sampled_from(DOCUMENTS)), max_size=30))
def test_whatever_is_stored_the_cluster_is_what_a_fresh_listing_gives(steps: list[tuple[str, bytes | None]]) -> None:
    """Nothing raises, a key that cannot be read is a fault, and changes lead where a listing leads."""
    cluster = Cluster()
    entries: dict[StoreKey, Entry] = {}
    for revision, (text, data) in enumerate(steps, start=1):
        key = StoreKey(text)
        cluster.apply(Change(revision, (Event(key, data),)))
        entries.pop(key, None)
        if data is not None:
            entries[key] = Entry(key, data, revision)
    fresh = Cluster()
    fresh.replace(Listing(tuple(entries[key] for key in sorted(entries)), len(steps)))
    assert cluster.faults == fresh.faults
    assert cluster.faults.keys() <= entries.keys()
    # Configuration that became unreadable keeps its last good value, which a fresh listing cannot know.
    for key in fresh.faults:
        cluster.drop(key)
    for key in list(fresh.faults):
        fresh.drop(key)
    assert _content(cluster) == _content(fresh)


def _content(cluster: Cluster) -> dict[str, object]:
    """All that is in a cluster, without the folders that are empty."""
    content: dict[str, object] = {
        name: {key: table for key, table in getattr(cluster, name).items() if table}
        for name in ("tables", "by_network", "pools", "blocks", "alive")
    }
    for name in ("numbers", "addresses"):
        pools = getattr(cluster, name)
        content[name] = {key: (pool.holders, list(pool.taken)) for key, pool in pools.items() if pool.holders}
    return content | {
        "leader": cluster.leader,
        "restoring": cluster.restoring,
        "faults": cluster.faults.keys(),
        "unknown": cluster.unknown,
    }


def test_a_copy_is_apart() -> None:
    world = FakeCluster()
    world.put(network())
    world.attach("e1")
    twin = world.cluster.copy()
    before = _content(world.cluster)
    assert _content(twin) == before
    twin.drop(StoreKey("endpoints/default/blue/e1"))
    twin.drop(StoreKey("claims/addresses/default/blue/0a010101"))
    assert _content(world.cluster) == before
    assert _content(twin) != before


def test_a_document_under_a_strange_key_is_a_fault() -> None:
    cluster = Cluster()
    cluster.put(kinds.TENANT.store_key("t1"), codec.encode(model.Tenant(name=TenantName("t2"))), 1)
    assert list(cluster.all(kinds.TENANT)) == []
    assert "t2" in cluster.faults[StoreKey("tenants/t1")].reason
    cluster.put(kinds.TENANT.store_key("t1"), codec.encode(model.Tenant(name=TenantName("t1"))), 2)
    assert cluster.faults == {}
    assert [tenant.name for tenant in cluster.all(kinds.TENANT)] == ["t1"]
