"""Policy state as nft entries: which map, which bytes. The lab tests run them in the kernel."""

from __future__ import annotations

import itertools

import pytest

from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_chains import chains, declarations
from weft.adapters.netns.nft.policy_epoch import epoch_mark, slow_path_mark
from weft.adapters.netns.nft.policy_maps import POLICY_SETS, policy_map_entries
from weft.adapters.netns.nft.prefix_lookup import PREFIX_LOOKUP_CHAINS
from weft.domain.addresses import Range, parse_address
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import (
    UNKNOWN_IDENTITY,
    VERDICT_DENY,
    WORKLOAD,
    CidrIdentity,
    IpIdentity,
    PolicyEntry,
    PolicyItem,
    VerdictCounter,
)
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol

BLUE = TenantName("blue")
ADDRESSES = {family: parse_address(text, field="address") for family, text in ((4, "10.0.0.1"), (6, "fd00::1"))}


@pytest.mark.parametrize("family", [4, 6])
def test_an_address_has_an_identity_as_source_and_as_destination(family: int) -> None:
    element = Element(key=pack_address(ADDRESSES[family]), value=mark(7))
    assert set(policy_map_entries(IpIdentity(BLUE, ADDRESSES[family], 7))) == {
        Entry(f"ip_identity_src{family}", element),
        Entry(f"ip_identity_dst{family}", element),
    }


@pytest.mark.parametrize("family", [4, 6])
def test_a_range_becomes_prefixes_and_single_addresses(family: int) -> None:
    """From .1 to .10: .1, .2/31, .4/30, .8/31 and .10."""
    first = ADDRESSES[family]
    found = set(policy_map_entries(CidrIdentity(BLUE, Range(family, first.number, first.number + 9), 7)))
    assert found == {
        Entry(f"{name}_{end}{family}", Element(key=pack_address(first._replace(number=number)), value=mark(7)))
        for end in ("src", "dst")
        for name, numbers in (("cidr_host_identity", (0, 9)), ("cidr_identity", (2, 5, 8)))
        for number in (first.number + offset for offset in numbers)
    }


@pytest.mark.parametrize(
    ("item", "name", "element"),
    [
        (
            PolicyEntry(BLUE, Direction.EGRESS, 1, 2, 9, 6, (80, 80)),
            "egress_pair_port",
            Element(key=key(mark(1), mark(2), protocol(6), port(80)), value=mark(9)),
        ),
        (
            PolicyEntry(BLUE, Direction.EGRESS, 1, None, 9, 132, (0, 65535)),
            "egress_any_ports",
            Element(key=key(mark(1), protocol(132), port(0x8000)), value=mark(9)),
        ),
        (
            PolicyEntry(BLUE, Direction.INGRESS, 1, None, 9, 1),
            "ingress_any_protocol",
            Element(key=key(mark(1), protocol(1)), value=mark(9)),
        ),
        (
            PolicyEntry(BLUE, Direction.INGRESS, 1, 2, 9),
            "ingress_pair_all",
            Element(key=key(mark(1), mark(2)), value=mark(9)),
        ),
    ],
)
def test_a_policy_entry_is_one_element_of_the_map_of_its_form(item: PolicyEntry, name: str, element: Element) -> None:
    assert list(policy_map_entries(item)) == [Entry(name, element)]


def test_a_range_of_ports_becomes_prefixes_and_single_ports() -> None:
    row = PolicyEntry(BLUE, Direction.INGRESS, 1, 2, 9, 17, (80, 90))
    assert set(policy_map_entries(row)) == {
        Entry(f"ingress_pair_{name}", Element(key=key(mark(1), mark(2), protocol(17), port(number)), value=mark(9)))
        for name, number in (("ports", 84), ("ports", 89), ("port", 90))
    }


@pytest.mark.parametrize("direction", Direction)
def test_the_default_entry_of_an_identity_enforces_its_direction(direction: Direction) -> None:
    assert set(policy_map_entries(PolicyEntry(BLUE, direction, 1, None, 9))) == {
        Entry(f"{direction}_any_all", Element(key=mark(1), value=mark(9))),
        Entry(f"{direction}_enforced", Element(key=mark(1))),
    }


@pytest.mark.parametrize(
    "item",
    [
        IpIdentity(BLUE, ADDRESSES[4], 7),
        CidrIdentity(BLUE, Range(6, 1, 2), 7),
        PolicyEntry(BLUE, Direction.EGRESS, 1, None, 9),
        VerdictCounter(BLUE, 9),
    ],
)
def test_every_set_is_declared_and_read_back(item: PolicyItem) -> None:
    declared = {line.split()[1] for line in declarations()}
    assert set(POLICY_SETS) <= declared
    assert {entry.name for entry in policy_map_entries(item)} <= set(POLICY_SETS)


def test_every_jump_target_exists() -> None:
    made = chains()
    words = [word for rules in made.values() for rule in rules for word in rule.split()]
    targets = {after for verb, after in itertools.pairwise(words) if verb in ("goto", "jump")}
    # `policy_epoch`, `service_chains`, `host.nat_tenant` and `bridge_filter` make these.
    assert targets - made.keys() - set(PREFIX_LOOKUP_CHAINS) == {
        "ct_fastpath",
        "ct_mark_accept",
        "ct_mark_accept_slow",
        "service_stats",
        "remote_host_return",
        "bridge_policy",
    }


def test_packet_and_conntrack_marks_cannot_be_confused() -> None:
    """Verdict ids have 28 bits and the deny bit, identities 28 and two flags; epochs are conntrack marks only."""
    verdict_bits, identity_bits = VERDICT_DENY | WORKLOAD - 1, WORKLOAD | UNKNOWN_IDENTITY | WORKLOAD - 1
    assert all(reason & ~verdict_bits for reason in DROP_REASONS)
    assert all(reason & VERDICT_DENY for reason in DROP_REASONS)
    for generation in (0, 1, 2**32 - 1):
        assert epoch_mark(generation) & ~identity_bits
        assert 0 < epoch_mark(generation) < slow_path_mark(epoch_mark(generation)) < VERDICT_DENY
