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
            changes = list(interval_map.change({}, {label: [added.pop(label)]}))
        else:
            added[label] = span
            changes = list(interval_map.change({label: [span]}, {}))
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
        for change in interval_map.change({label: [added[label]]}, {}):
            ranges.difference_update(change.before)
            ranges.update(change.after)
    return ranges


@given(
    st.dictionaries(st.sampled_from("abcd"), spans()),
    st.dictionaries(st.sampled_from("abcd"), spans()),
)
def test_one_change_of_many_labels_is_the_same_as_one_by_one(before: dict[str, Range], after: dict[str, Range]) -> None:
    interval_map: IntervalMap[str] = IntervalMap()
    ranges = {(Range(family, 0, last), frozenset[str]()) for family, last in LAST.items()}
    # Labels in both move: they are removed from one range and added to another in two changes.
    steps: list[tuple[dict[str, Range], dict[str, Range]]] = [
        (before, {}),
        ({label: span for label, span in after.items() if label not in before}, before),
        ({label: span for label, span in after.items() if label in before}, {}),
    ]
    for added, removed in steps:
        for change in interval_map.change(
            {label: [span] for label, span in added.items()}, {label: [span] for label, span in removed.items()}
        ):
            assert ranges.issuperset(change.before)
            ranges.difference_update(change.before)
            ranges.update(change.after)
    assert ranges == rebuilt(after)
