"""Zones as tables: their content does not depend on the order of changes; reverse names and prefixes."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns import table as module
from weft.dns.encode import encode_name, question_key
from weft.dns.table import MAX_ANSWERS, Prefix, Table, parse_prefix, reverse_prefix
from weft.dns.wire import Type
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.errors import Invalid

# Some of them are invalid: these are left out, and change nothing else.
records = st.builds(
    Record,
    name=st.sampled_from(["web", "db", "db.web", "a.db.web", "x" * 64, "ü", "a..b"]),
    type=st.sampled_from(["A", "A", "A", "SRV"]),
    data=st.integers(1, 9).map(lambda number: f"10.0.0.{number}") | st.just("nowhere"),
    rank=st.sampled_from(Rank),
)
denied = st.sampled_from([(), ("10.0.0.1",), ("nowhere", "10.0.0.1")])
entries = st.builds(Entry, records=st.lists(records, max_size=4).map(tuple), dns_egress_denied=denied)
steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abcd"), entries, max_size=3), st.sets(st.sampled_from("abcd"), max_size=2)
    ),
    max_size=6,
)


def table(zone: Zone) -> Table:
    made = Table(ttl=30)
    made.replace(zone)
    return made


def seen(table: Table) -> tuple[object, ...]:
    names = [encode_name(name) for name in ("web", "db", "db.web", "a.db.web", "x")]
    return (
        {key: (sorted(each.records), each.answer_count) for key, each in table.sets.items()},
        [table.has_name(name) for name in names],
        table.zone,
    )


@given(steps)
def test_changes_give_the_same_table_as_building_it_new(
    changes: list[tuple[dict[str, Entry], set[str]]],
) -> None:
    changed, state = Table(ttl=30), dict[str, Entry]()
    for put, drop in changes:
        changed.change(put, drop - put.keys())
        state = {owner: entry for owner, entry in state.items() if owner not in drop} | put
        assert seen(changed) == seen(table(Zone(state)))


@given(steps)
def test_replacing_gives_the_same_table_as_building_it_new(changes: list[tuple[dict[str, Entry], set[str]]]) -> None:
    replaced = Table(ttl=30)
    for state, _ in changes:
        replaced.replace(Zone(state))
        assert seen(replaced) == seen(table(Zone(state)))
        assert replaced.dns_egress_denied.keys() == {
            ip_address(text) for entry in state.values() for text in entry.dns_egress_denied if text != "nowhere"
        }


def test_the_first_rank_wins_a_name_that_several_objects_have() -> None:
    """contiv 7.14: services before groups before containers."""
    made = table(
        Zone(
            {
                "container": Entry((Record("web", "AAAA", "fd00::1", Rank.WORKLOAD),)),
                "group": Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),)),
                "service": Entry((Record("web", "A", "10.0.0.3", Rank.SERVICE),)),
            }
        )
    )
    key, key_v6 = (question_key(encode_name("web"), kind) for kind in (Type.A, Type.AAAA))
    for owner, ending in (("service", b"\x0a\0\0\3"), ("group", b"\x0a\0\0\2")):
        assert [record[-4:] for record in made.sets[key].records] == [ending]
        assert key_v6 not in made.sets
        made.change({}, [owner])
    assert key not in made.sets
    assert len(made.sets[key_v6].records) == 1


def test_only_kubernetes_services_answer_with_all_addresses() -> None:
    def count(rank: Rank, members: int) -> int:
        records = (Record("web", "A", f"10.0.0.{number}", rank) for number in range(members))
        (found,) = table(Zone({"a": Entry(tuple(records))})).sets.values()
        return found.answer_count

    assert count(Rank.GROUP, 30) == count(Rank.WORKLOAD, 30) == MAX_ANSWERS == 10
    assert count(Rank.CLUSTER, 30) == 30
    assert count(Rank.GROUP, 3) == 3


def test_a_record_of_two_objects_stays_until_both_are_dropped() -> None:
    same = Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),))
    made = table(Zone({"a": same, "b": same}))
    (found,) = made.sets.values()
    assert len(found.records) == 1
    made.change({}, ["a"])
    assert made.has_name(encode_name("web"))
    made.change({}, ["b", "never-there"])
    assert not made.has_name(encode_name("web"))


def test_H5_an_invalid_record_costs_only_itself() -> None:
    good = Record("web", "A", "10.0.0.2", Rank.GROUP)
    made = table(Zone({"a": Entry((good,))}))
    before = seen(made)[:2]
    for bad in (
        Entry((Record("x" * 64, "A", "10.0.0.2", Rank.GROUP), good)),
        Entry((good, Record("web", "A", "nowhere", Rank.GROUP))),
        Entry((good, Record("ü", "A", "10.0.0.2", Rank.GROUP))),
        Entry((good,), ("nowhere",)),
    ):
        made.change({"b": Entry((good,)), "a": bad}, [])
        assert seen(made)[:2] == before
        count, reason = made.rejected
        assert count == 1
        assert reason.startswith("a: ")
    made.replace(Zone({"a": Entry((good,))}, ("nowhere", "10.0.0.0/24")))
    assert seen(made)[:2] == before
    assert made.rejected[0] == 1
    assert made.owns_reverse(encode_name("2.0.0.10.in-addr.arpa"))
    made.replace(Zone({"a": Entry((good,))}))
    assert made.rejected == (0, "")


@given(steps)
def test_H5_a_zone_is_limited_and_what_had_no_room_gets_it_when_there_is_some(
    changes: list[tuple[dict[str, Entry], set[str]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RECORDS", 4)
        patch.setattr(module, "_STEP", 2)
        limited = Table(ttl=30)
        for put, drop in changes:
            limited.change(put, drop - put.keys())
            assert sum(len(each.records) for each in limited.sets.values()) <= 4
        entries = limited.zone.entries
        last, *others = entries or [""]
        limited.change({}, others)
        if entries:
            assert seen(limited) == seen(table(Zone({last: entries[last]})))
        limited.change({}, [last])
        assert seen(limited) == seen(Table(ttl=30))
        assert limited.rejected == (0, "")
        assert not limited.dns_egress_denied


def test_a_large_zone_is_replaced_in_steps() -> None:
    entries = {
        f"e{n}": Entry((Record(f"web{n}", "A", f"10.0.{n >> 8}.{n & 255}", Rank.WORKLOAD),)) for n in range(2_000)
    }
    made = Table(ttl=30)
    assert sum(1 for _ in made.replacing(Zone(entries))) >= 3
    assert seen(made) == seen(table(Zone(entries)))


def test_the_table_owns_reverse_names_in_the_tenants_subnets() -> None:
    made = table(Zone({}, ("10.1.0.0/16", "fd00::/64")))
    for address, held in (("10.1.2.3", True), ("10.2.0.1", False), ("fd00::5", True), ("fd01::5", False)):
        assert made.owns_reverse(encode_name(ip_address(address).reverse_pointer)) is held
    assert not made.owns_reverse(encode_name("10.in-addr.arpa"))


@given(st.ip_addresses())
def test_a_full_reverse_name_is_its_address(address: object) -> None:
    parsed = ip_address(str(address))
    found = reverse_prefix(encode_name(parsed.reverse_pointer))
    assert found == Prefix(parsed.version, int(parsed), parsed.max_prefixlen)


@given(st.ip_addresses(), st.integers(1, 32), st.ip_addresses())
def test_is_within_agrees_with_the_standard_library(one: object, length: int, other: object) -> None:
    address, base = ip_address(str(one)), ip_address(str(other))
    network = ip_network((base if length % 2 else address, length), strict=False)
    prefix = reverse_prefix(encode_name(address.reverse_pointer))
    assert prefix is not None
    assert prefix.is_within(parse_prefix(str(network))) == (address in network)


def test_a_partial_reverse_name_is_a_prefix() -> None:
    assert reverse_prefix(encode_name("1.10.in-addr.arpa")) == parse_prefix("10.1.0.0/16")
    assert reverse_prefix(encode_name("8.b.d.0.1.0.0.2.ip6.arpa")) == parse_prefix("2001:db8::/32")
    assert reverse_prefix(encode_name("in-addr.arpa")) == parse_prefix("0.0.0.0/0")
    assert not parse_prefix("10.0.0.0/8").is_within(parse_prefix("10.1.0.0/16"))


@pytest.mark.parametrize(
    "name",
    [
        "arpa",
        "web",
        "x.in-addr.arpa",
        "256.in-addr.arpa",
        "1.2.3.4.5.in-addr.arpa",
        "10.ip6.arpa",
        "_b._udp.1.in-addr.arpa",
    ],
)
def test_other_names_have_no_prefix(name: str) -> None:
    assert reverse_prefix(encode_name(name)) is None


def test_the_root_has_no_prefix() -> None:
    assert reverse_prefix(b"\0") is None


def test_an_invalid_subnet_is_rejected() -> None:
    with pytest.raises(Invalid):
        parse_prefix("10.0.0.1/8")
