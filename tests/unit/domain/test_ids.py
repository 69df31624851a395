"""Names, and the keys that are made of them (O2)."""

from __future__ import annotations

import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.errors import Invalid
from weft.domain.ids import (
    MAX_LONG_NAME,
    MAX_NAME,
    NAME_PATTERN,
    EndpointId,
    EndpointKey,
    GroupKey,
    GroupName,
    NetworkKey,
    NetworkName,
    TenantName,
    check_endpoint_id,
    check_name,
    store_key,
)

LABEL = st.text("aZ09-", min_size=1, max_size=9).filter(lambda text: text[0] != "-" and text[-1] != "-")
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)


@given(NAME)
def test_good_names_are_given_back(name: str) -> None:
    assert check_name(name, field="x") == name
    assert check_endpoint_id(name) == name


@given(st.text(max_size=12))
def test_whatever_is_accepted_needs_no_escaping_anywhere(text: str) -> None:
    """Not in a key of the store, a path, a URL or an interface's name."""
    for check in (partial(check_name, field="x"), check_endpoint_id):
        try:
            accepted = check(text)
        except Invalid:
            continue
        assert re.fullmatch(r"[A-Za-z0-9._-]+", accepted)
        assert accepted not in {".", ".."}
        assert accepted[0].isalnum()
        assert accepted[-1].isalnum()


@given(st.text(alphabet="aB1-._:|/\n ", max_size=6))
def test_names_follow_the_published_pattern(text: str) -> None:
    accepted = True
    try:
        check_name(text, field="x")
    except Invalid as error:
        accepted = False
        assert error.field == "x"
    assert accepted == bool(re.fullmatch(NAME_PATTERN, text))


@pytest.mark.parametrize(
    "text", ["", "a:b", "a|b", "-a", "a-", "_", "a_b", "a.", ".a", "a..b", "a\n", "a b", "ä", "a/b", ".."]
)
def test_bad_names(text: str) -> None:
    with pytest.raises(Invalid):
        check_name(text, field="x")


def test_names_have_a_limit() -> None:
    assert check_name("a" * MAX_NAME, field="x")
    with pytest.raises(Invalid, match="64"):
        check_name("a" * (MAX_NAME + 1), field="x")
    assert check_name("a" * MAX_LONG_NAME, field="x", limit=MAX_LONG_NAME)
    assert check_endpoint_id("a" * MAX_LONG_NAME)
    with pytest.raises(Invalid):
        check_endpoint_id("a" * (MAX_LONG_NAME + 1))


@pytest.mark.parametrize("text", ["4f3a", "a_b", "a.b-c_d", "A"])
def test_endpoint_ids_may_have_an_underscore(text: str) -> None:
    assert check_endpoint_id(text) == text


@pytest.mark.parametrize("text", ["", "_a", "a_", "a/b", "..", "a b", "a\n", "a:b"])
def test_bad_endpoint_ids(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_endpoint_id(text)
    assert caught.value.field == "EndpointID"


def test_keys_are_shown_with_colons() -> None:
    tenant, network = TenantName("t1"), NetworkName("blue")
    assert str(NetworkKey(tenant, network)) == "t1:blue"
    assert str(GroupKey(tenant, GroupName("web"))) == "t1:web"
    assert str(EndpointKey(tenant, network, EndpointId("e1"))) == "t1:blue:e1"


@given(st.lists(NAME, min_size=1, max_size=4), st.lists(NAME, min_size=1, max_size=4))
def test_different_parts_give_different_keys(one: list[str], other: list[str]) -> None:
    assert (store_key(*one) == store_key(*other)) == (one == other)
