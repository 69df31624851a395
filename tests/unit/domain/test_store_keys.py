"""Every key that we build is parsed back to what it was built of, and no key whatever raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain import kinds, model
from weft.domain.addresses import parse_address
from weft.domain.ids import EndpointKey, GroupKey, GroupName, NetworkKey, NodeName, StoreKey
from weft.domain.ipam import ipam
from weft.domain.store_keys import (
    AddressClaimKey,
    AliveKey,
    AppliedKey,
    BlockKey,
    NumberClaimKey,
    ObjectKey,
    ParsedKey,
    SingletonKey,
    UnparsedKey,
    is_transient,
    network_key,
    parse_store_key,
)

BLUE = network_key("default", "blue")
V4, V6 = (parse_address(text, field="address") for text in ("10.1.1.64", "fd00::40"))
NETWORK = model.Network(tenant=BLUE.tenant, name=BLUE.network, encap="vxlan", subnet="10.1.0.0/16")


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        (ipam.claim_key(NETWORK, V4), AddressClaimKey(BLUE, V4)),
        (ipam.claim_key(NETWORK, V6), AddressClaimKey(BLUE, V6)),
        (ipam.block_key(NETWORK, V4), BlockKey(BLUE, V4)),
        (StoreKey(kinds.number_claims("vni") + "7"), NumberClaimKey("vni", 7)),
        (kinds.alive_node("n1"), AliveKey("nodes", "n1")),
        (kinds.alive_master("192.0.2.1:9999"), AliveKey("masters", "192.0.2.1:9999")),
        (kinds.applied_key("n1"), AppliedKey(NodeName("n1"))),
        *((key, SingletonKey(key)) for key in sorted(kinds.SINGLETONS)),
    ],
)
def test_built_keys_are_parsed_back(key: StoreKey, parsed: ParsedKey) -> None:
    assert parse_store_key(key) == parsed


@pytest.mark.parametrize("kind", kinds.ALL, ids=lambda kind: kind.name)
def test_object_keys_have_the_parts_of_their_kind(kind: kinds.Kind[model.Value]) -> None:
    parts = tuple(f"part{number}" for number in range(len(kind.key_attributes)))
    assert parse_store_key(kind.store_key(*parts)) == ObjectKey(kind, parts)
    for wrong in (parts[:-1], (*parts, "more")):
        refused = parse_store_key(kind.store_key(*wrong))
        assert isinstance(refused, UnparsedKey)
        assert kind.name in refused.reason


def test_object_keys_are_typed() -> None:
    endpoint = ObjectKey(kinds.ENDPOINT, ("default", "blue", "e1"))
    assert endpoint.endpoint == EndpointKey(BLUE.tenant, BLUE.network, endpoint.endpoint.endpoint)
    assert (endpoint.tenant, endpoint.network) == ("default", NetworkKey(*BLUE))
    assert ObjectKey(kinds.GROUP, ("default", "web")).group == GroupKey(BLUE.tenant, GroupName("web"))
    assert ObjectKey(kinds.POLICY, ("default", "p")).policy == ("default", "p")
    assert ObjectKey(kinds.RULE, ("default", "p", "1")).rule == ("default", "p", "1")


@pytest.mark.parametrize(
    "text", ["claims/vlan/07", "claims/vlan/x", "claims/addresses/a/b/zz", "blocks/a/b", "alive/n"]
)
def test_malformed_keys_of_known_folders_have_a_reason(text: str) -> None:
    parsed = parse_store_key(StoreKey(text))
    assert isinstance(parsed, UnparsedKey)
    assert parsed.reason


@pytest.mark.parametrize("text", ["", "/", "later/x", "status/nodes/n1/later", "status/x", "leader/x"])
def test_keys_of_other_versions_are_unknown_without_a_reason(text: str) -> None:
    assert parse_store_key(StoreKey(text)) == UnparsedKey()


@given(
    st.text(alphabet="abc/019-", max_size=30) | st.from_regex(r"(claims|blocks|alive|status|endpoints)(/\w{0,9}){0,6}")
)
def test_no_key_raises(text: str) -> None:
    parse_store_key(StoreKey(text))


def test_keys_of_live_processes_and_of_the_store_itself_are_transient() -> None:
    transient = (*kinds.SINGLETONS, kinds.alive_node("n1"), kinds.applied_key("n1"), StoreKey("status/nodes/n1/later"))
    assert all(map(is_transient, transient))
    assert not any(map(is_transient, (kinds.NODE.store_key("n1"), ipam.block_key(NETWORK, V4), StoreKey("later/x"))))
