"""Limits and redirects as messages: what was packed is read back, whatever it is (the lab checks them with `tc`)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.errors import DatapathFault
from weft.kernel.netlink.tc import (
    IngressRedirect,
    Limit,
    drop_limit,
    drop_redirect,
    parse_limit,
    parse_redirect,
    put_limit,
    put_redirect,
)

LINKS = st.integers(1, (1 << 31) - 1)


@given(LINKS, st.integers(1, (1 << 63) - 1), st.integers(1, 1 << 28))
def test_a_limit_is_read_as_it_was_put(link: int, rate: int, burst: int) -> None:
    limit = Limit(link=link, rate=rate, burst=burst)
    assert parse_limit(put_limit(limit).payload) == limit


@given(LINKS, LINKS)
def test_a_redirect_is_read_as_it_was_put(link: int, into: int) -> None:
    redirect = IngressRedirect(link=link, into=into)
    qdisc, match_all = put_redirect(redirect)
    assert parse_redirect(match_all.payload) == redirect
    assert parse_redirect(qdisc.payload) is None


def test_each_is_told_from_the_other() -> None:
    limit = put_limit(Limit(link=3, rate=125_000, burst=10_000))
    assert parse_redirect(limit.payload) is None
    for request in (*put_redirect(IngressRedirect(link=3, into=4)), drop_redirect(3), drop_limit(3)):
        assert parse_limit(request.payload) is None


@given(st.data())
def test_a_message_that_is_cut_short_is_a_fault_or_nothing(data: st.DataObject) -> None:
    payloads = (put_limit(Limit(link=3, rate=125_000, burst=10_000)), put_redirect(IngressRedirect(link=3, into=4))[1])
    for request, parse in zip(payloads, (parse_limit, parse_redirect), strict=True):
        cut = request.payload[: data.draw(st.integers(0, len(request.payload) - 1))]
        try:
            assert parse(cut) is None
        except DatapathFault:
            continue


def test_what_is_refused_is_told_in_words() -> None:
    assert str(put_limit(Limit(link=3, rate=125_000, burst=10_000))) == (
        "put limit of 125000 B/s with bursts of 10000 B for link 3"
    )
    assert str(put_redirect(IngressRedirect(link=3, into=4))[1]) == "add ingress redirect of link 3 into link 4"
