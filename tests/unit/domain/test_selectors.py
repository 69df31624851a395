"""Label expressions: three spellings, one meaning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.errors import Invalid
from weft.domain.selectors import (
    EVERYTHING,
    LabelExpression,
    LabelSelector,
    Operator,
    Requirement,
    parse_label_selector,
    parse_pairs,
    parse_selector,
    select,
)

names = st.from_regex(r"[a-z]([a-z0-9_.-]{0,8}[a-z0-9])?", fullmatch=True)
requirements = st.one_of(
    st.builds(
        Requirement,
        names,
        st.sampled_from([Operator.IN, Operator.NOT_IN]),
        st.lists(st.one_of(names, st.just("")), min_size=1, max_size=3).map(tuple),
    ),
    st.builds(Requirement, names, st.sampled_from([Operator.EXISTS, Operator.DOES_NOT_EXIST])),
)
selectors = st.lists(requirements, max_size=4).map(select)
labels = st.dictionaries(names, names, max_size=4)


def expression(key: str, operator: str, *values: str) -> LabelExpression:
    return LabelExpression(key=key, operator=operator, values=values or None)


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        ("app=web", {"app": "web", "tier": "a"}, {"app": "db"}),
        ("app==web", {"app": "web"}, {}),
        ("app!=web", {"app": "db"}, {"app": "web"}),
        ("app!=web", {}, {"app": "web"}),
        ("app in (web, db)", {"app": "db"}, {"app": "cache"}),
        ("app notin (web,db)", {"tier": "a"}, {"app": "db"}),
        ("app", {"app": ""}, {"tier": "app"}),
        ("!app", {"tier": "app"}, {"app": ""}),
        ("app=", {"app": ""}, {"app": "web"}),
        (" app = web , !old ", {"app": "web"}, {"app": "web", "old": ""}),
        ("kubernetes.io/metadata.name=x", {"kubernetes.io/metadata.name": "x"}, {"metadata.name": "x"}),
    ],
)
def test_text(text: str, matching: dict[str, str], other: dict[str, str]) -> None:
    selector = parse_selector(text)
    assert selector.matches(matching)
    assert not selector.matches(other)


def test_nothing_to_require_selects_everything() -> None:
    assert parse_selector("") == parse_selector("  ") == parse_pairs([]) == EVERYTHING
    assert parse_label_selector(LabelSelector(match_labels={}, match_expressions=()), field="f") == EVERYTHING
    assert EVERYTHING.matches({})


@pytest.mark.parametrize(
    "text", [",", "a=b,", "a b", "a in b", "a in ()x", "a in (b", "-a=b", "a=-b", "=b", "!", "a=b=c", "ü=b", "a/b/c=d"]
)
def test_text_that_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_selector(text, field="podSelector")
    assert refusal.value.field == "podSelector"


def test_one_meaning_has_one_form() -> None:
    spelled = [
        parse_selector("tier in (b,a,b),app=web"),
        parse_selector("app in (web), app=web, tier in (a,b)"),
        parse_label_selector(
            LabelSelector(match_labels={"app": "web"}, match_expressions=(expression("tier", "In", "b", "a"),)),
            field="f",
        ),
    ]
    assert len(set(spelled)) == 1
    assert str(spelled[0]) == "app=web,tier in (a,b)"


@given(selectors)
def test_what_is_printed_reads_back(selector: object) -> None:
    assert parse_selector(str(selector)) == selector


@given(selectors, labels)
def test_a_selector_matches_when_every_requirement_does(selector: object, some: dict[str, str]) -> None:
    parts = [part for part in _split(str(selector)) if part]
    assert parse_selector(str(selector)).matches(some) is all(parse_selector(part).matches(some) for part in parts)


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (LabelSelector(match_labels={"-x": "a"}), "s.matchLabels"),
        (LabelSelector(match_labels={"x": "a b"}), "s.matchLabels.x"),
        (LabelSelector(match_labels={"x": "a" * 64}), "s.matchLabels.x"),
        (LabelSelector(match_labels={f"{'a' * 254}/x": "a"}), "s.matchLabels"),
        (LabelSelector(match_expressions=(expression("x", "Matches", "a"),)), "s.matchExpressions[0].operator"),
        (LabelSelector(match_expressions=(expression("x", "in", "a"),)), "s.matchExpressions[0].operator"),
        (LabelSelector(match_expressions=(expression("x", "In"),)), "s.matchExpressions[0].values"),
        (LabelSelector(match_expressions=(expression("x", "NotIn"),)), "s.matchExpressions[0].values"),
        (LabelSelector(match_expressions=(expression("x", "Exists", "a"),)), "s.matchExpressions[0].values"),
        (LabelSelector(match_expressions=(expression("x", "In", "a/b"),)), "s.matchExpressions[0].values"),
        (
            LabelSelector(match_expressions=(expression("x", "Exists"), expression("", "Exists"))),
            "s.matchExpressions[1].key",
        ),
    ],
)
def test_a_wrong_label_selector_is_refused_with_its_field(source: LabelSelector, field: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_label_selector(source, field="s")
    assert refusal.value.field == field


def test_contiv_pairs_match_by_containment() -> None:
    """W22: the same containment whenever it is asked, at the service's creation and at a container's start."""
    selector = parse_pairs(["app=web", "tier=front"])
    assert selector.matches({"app": "web", "tier": "front", "pod": "7"})
    assert selector.matches({"tier": "front", "app": "web"})
    assert not selector.matches({"app": "web"})
    assert not selector.matches({})


@pytest.mark.parametrize("pair", ["app", "=web", "a=b=c", ""])
def test_a_pair_has_one_equals_sign(pair: str) -> None:
    with pytest.raises(Invalid):
        parse_pairs(["app=web", pair])
