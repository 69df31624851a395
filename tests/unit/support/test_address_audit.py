"""The auditor finds nothing in a sound state, and names each thing that is wrong in others."""

from __future__ import annotations

import json

import pytest
from tests.support.address_audit import audit
from tests.support.fake_cluster import FakeCluster, group, network, service

CLAIM = "claims/addresses/default/blue/0a010101"
LARGE_BLOCK = "blocks/default/large/0a020040"


@pytest.fixture
def sound() -> dict[str, bytes]:
    """Endpoints by claims in a small and a large pool, in a group's pool and in a node's block; a service."""
    world = FakeCluster()
    world.put(network("blue", subnet="10.1.1.0/24", gateway="10.1.1.254", ipv6_subnet="fd01::/64"))
    world.put(network("large", subnet="10.2.0.0/16"))
    world.put(group("web", network="blue", ip_pool="10.1.1.100-10.1.1.110"))
    world.put(service("s", network="blue", ip_address="10.1.1.50"))
    world.attach("one")
    world.attach("two", group="web")
    world.attach("three", network="large")
    entries = {str(key): value for key, value in world.entries.items()}
    entries["nodes/n1"] = document(name="n1")
    entries[LARGE_BLOCK] = document(owner="n1")
    entries["endpoints/default/large/four"] = document(
        tenantName="default", networkName="large", endpointID="four", ipAddress="10.2.0.70", homingHost="n1"
    )
    return entries


def document(**members: object) -> bytes:
    return json.dumps({"v": 1, "o": members}).encode()


def changed(value: bytes, **members: object) -> bytes:
    return document(**(json.loads(value)["o"] | members))


def test_a_sound_state_has_no_faults(sound: dict[str, bytes]) -> None:
    assert audit(sound) == []


@pytest.mark.parametrize("gone", ["networks/default/blue", "groups/default/web", CLAIM, "nodes/n1", LARGE_BLOCK])
def test_what_others_need_is_missed(sound: dict[str, bytes], gone: str) -> None:
    del sound[gone]
    assert audit(sound)


@pytest.mark.parametrize("left", ["endpoints/default/blue/one", "services/default/s", "endpoints/default/large/three"])
def test_a_claim_without_its_holder_is_named(sound: dict[str, bytes], left: str) -> None:
    del sound[left]
    assert any("does not have it" in fault for fault in audit(sound))


def test_an_address_with_two_holders_is_named(sound: dict[str, bytes]) -> None:
    """W17."""
    twice = changed(sound["endpoints/default/blue/two"], ipAddress="10.1.1.1")
    sound["endpoints/default/blue/two"] = twice
    assert any(
        "is held by endpoint:default:blue:two and by endpoint:default:blue:one" in fault for fault in audit(sound)
    )


@pytest.mark.parametrize(("member", "address"), [("vip", "10.1.1.1"), ("ipv6Vip", "fd01::2")])
def test_an_address_of_a_service_has_no_other_holder(sound: dict[str, bytes], member: str, address: str) -> None:
    sound["services/default/s"] = changed(sound["services/default/s"], **{member: address})
    assert any("is held by serviceLB:default:s and by endpoint:default:blue:one" in fault for fault in audit(sound))


@pytest.mark.parametrize("address", ["10.1.1.254", "10.1.1.0", "10.1.1.255", "10.1.9.9"])
def test_an_unusable_address_is_named(sound: dict[str, bytes], address: str) -> None:
    sound["endpoints/default/blue/one"] = changed(sound["endpoints/default/blue/one"], ipAddress=address)
    assert any("it is not a usable address" in fault for fault in audit(sound))


def test_an_address_of_a_pool_belongs_to_its_group(sound: dict[str, bytes]) -> None:
    sound["endpoints/default/blue/one"] = changed(sound["endpoints/default/blue/one"], ipAddress="10.1.1.109")
    assert any("pool of group web" in fault for fault in audit(sound))


def test_a_claim_in_a_nodes_block_is_named(sound: dict[str, bytes]) -> None:
    sound["blocks/default/large/0a020000"] = document(owner="n1")
    assert any("not shared" in fault for fault in audit(sound))


@pytest.mark.parametrize(("key", "members"), [("networks/default/large", {"tags": {"vlan": 1, "vni": 1}})])
def test_a_tag_with_two_holders_is_named(sound: dict[str, bytes], key: str, members: dict[str, object]) -> None:
    """W6."""
    sound[key] = changed(sound[key], **members)
    assert any("vni 1 is held by" in fault for fault in audit(sound))
