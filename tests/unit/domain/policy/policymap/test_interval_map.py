"""The interval map, compared with labels kept address by address."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import BITS, Address, Range
from weft.domain.policy.policymap.interval_map import IntervalMap

LAST = {family: (1 << bits) - 1 for family, bits in BITS.items()}
NUMBERS = {family: [*range(12), *range(last - 3, last + 1)] for family, last in LAST.items()}


@st.composite
def spans(draw: st.DrawFn) -> Range:
    family = draw(st.sampled_from([4, 6]))
    first, last = sorted((draw(st.sampled_from(NUMBERS[family])), draw(st.sampled_from(NUMBERS[family]))))
    return Range(family, first, last)


@given(st.lists(st.tuples(st.sampled_from("abc"), spans()), max_size=25))
def test_every_address_has_the_labels_that_were_added_to_its_ranges(steps: list[tuple[str, Range]]) -> None:
    interval_map: IntervalMap[str] = IntervalMap()
    added: dict[str, Range] = {}
    ranges = {(Range(family, 0, last), frozenset[str]()) for family, last in LAST.items()}
    for label, span in steps:
        if label in added:
            changes = list(interval_map.remove(label, [added.pop(label)]))
        else:
            added[label] = span
            changes = list(interval_map.add(label, [span]))
        for change in changes:
            assert ranges.issuperset(change.before)
            ranges.difference_update(change.before)
            ranges.update(change.after)
        for family, numbers in NUMBERS.items():
            for address in (Address(family, number) for number in numbers):
                wanted = {name for name, each in added.items() if each.holds(address)}
                assert interval_map.at(address) == wanted
                assert [labels for each, labels in ranges if each.holds(address)] == [wanted]
        assert ranges == rebuilt(added)


def rebuilt(added: dict[str, Range]) -> set[tuple[Range, frozenset[str]]]:
    """The ranges of a map to which the same labels were added in another order."""
    interval_map: IntervalMap[str] = IntervalMap()
    ranges = {(Range(family, 0, last), frozenset[str]()) for family, last in LAST.items()}
    for label in sorted(added, reverse=True):
        for change in interval_map.add(label, [added[label]]):
            ranges.difference_update(change.before)
            ranges.update(change.after)
    return ranges
