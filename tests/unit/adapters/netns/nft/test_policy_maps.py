"""Policy parts as entries: which map, which bytes. The lab has the kernel for a judge."""

from __future__ import annotations

import itertools

import pytest

from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_chains import REASONS, chains, declarations
from weft.adapters.netns.nft.policy_epoch import stamp_of, watched
from weft.adapters.netns.nft.policy_maps import POLICY_SETS, entries_of
from weft.adapters.netns.nft.prefix_lookup import WAY_CHAINS
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
    PolicyPart,
    VerdictCounter,
)
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol

BLUE = TenantName("blue")
ADDRESSES = {family: parse_address(text, field="address") for family, text in ((4, "10.0.0.1"), (6, "fd00::1"))}


@pytest.mark.parametrize("family", [4, 6])
def test_an_address_is_known_at_both_ends(family: int) -> None:
    element = Element(key=pack_address(ADDRESSES[family]), value=mark(7))
    assert set(entries_of(IpIdentity(BLUE, ADDRESSES[family], 7))) == {
        Entry(f"who_asks{family}", element),
        Entry(f"who_answers{family}", element),
    }


@pytest.mark.parametrize("family", [4, 6])
def test_a_range_is_prefixes_by_their_middles_and_single_addresses(family: int) -> None:
    """From .1 to .10: .1, .2/31, .4/30, .8/31 and .10."""
    first = ADDRESSES[family]
    found = set(entries_of(CidrIdentity(BLUE, Range(family, first.number, first.number + 9), 7)))
    assert found == {
        Entry(f"{name}_{end}{family}", Element(key=pack_address(first._replace(number=number)), value=mark(7)))
        for end in ("asks", "answers")
        for name, numbers in (("spot", (0, 9)), ("where", (2, 5, 8)))
        for number in (first.number + offset for offset in numbers)
    }


@pytest.mark.parametrize(
    ("row", "name", "element"),
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
def test_a_row_is_one_element_of_the_map_for_its_form(row: PolicyEntry, name: str, element: Element) -> None:
    assert list(entries_of(row)) == [Entry(name, element)]


def test_a_row_of_several_ports_is_prefixes_and_single_ports() -> None:
    row = PolicyEntry(BLUE, Direction.INGRESS, 1, 2, 9, 17, (80, 90))
    assert set(entries_of(row)) == {
        Entry(f"ingress_pair_{name}", Element(key=key(mark(1), mark(2), protocol(17), port(number)), value=mark(9)))
        for name, number in (("ports", 84), ("ports", 89), ("port", 90))
    }


@pytest.mark.parametrize("direction", Direction)
def test_the_row_for_everything_says_that_there_are_rules_at_all(direction: Direction) -> None:
    assert set(entries_of(PolicyEntry(BLUE, direction, 1, None, 9))) == {
        Entry(f"{direction}_any_all", Element(key=mark(1), value=mark(9))),
        Entry(f"{direction}_policed", Element(key=mark(1))),
    }


@pytest.mark.parametrize(
    "part",
    [
        IpIdentity(BLUE, ADDRESSES[4], 7),
        CidrIdentity(BLUE, Range(6, 1, 2), 7),
        PolicyEntry(BLUE, Direction.EGRESS, 1, None, 9),
        VerdictCounter(BLUE, 9),
    ],
)
def test_every_set_is_declared_and_read_back(part: PolicyPart) -> None:
    declared = {line.split()[1] for line in declarations()}
    assert set(POLICY_SETS) <= declared
    assert {entry.name for entry in entries_of(part)} <= set(POLICY_SETS)


def test_every_chain_that_is_gone_to_is_there() -> None:
    made = chains()
    words = [word for rules in made.values() for rule in rules for word in rule.split()]
    targets = {after for verb, after in itertools.pairwise(words) if verb in ("goto", "jump")}
    assert targets - made.keys() - set(WAY_CHAINS) == {
        "known",
        "stamp",
        "stamp_watched",
        "count",
        "homeward",
        "segment",
    }


def test_no_mark_can_be_taken_for_another() -> None:
    """Outcomes have 28 bits and the one of refusal, numbers have 28 and two flags; stamps are on connections only."""
    outcome_bits, number_bits = VERDICT_DENY | WORKLOAD - 1, WORKLOAD | UNKNOWN_IDENTITY | WORKLOAD - 1
    assert all(reason & ~outcome_bits for reason in REASONS)
    assert all(reason & VERDICT_DENY for reason in REASONS)
    for generation in (0, 1, 2**32 - 1):
        assert stamp_of(generation) & ~number_bits
        assert 0 < stamp_of(generation) < watched(stamp_of(generation)) < VERDICT_DENY
