"""Frames survive being cut at any place; errors arrive as they were raised."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain import errors
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Event
from weft.runtime.store.wire import HEARTBEAT_FRAME, Frame, error_of, fault_of, framed, frames

changes = st.builds(
    Change,
    st.integers(1, 2**62),
    st.lists(st.builds(Event, st.text(max_size=9).map(StoreKey), st.none() | st.binary(max_size=300)), max_size=3).map(
        tuple
    ),
)


@given(st.lists(st.none() | changes, max_size=6), st.lists(st.integers(1, 50), min_size=1))
async def test_frames_are_found_whatever_the_pieces(sent: list[Change | None], sizes: list[int]) -> None:
    data = b"".join(HEARTBEAT_FRAME if change is None else framed(Frame(change=change)) for change in sent)

    async def pieces() -> AsyncIterator[bytes]:
        start, turn = 0, 0
        while start < len(data):
            size = sizes[turn % len(sizes)]
            yield data[start : start + size]
            start, turn = start + size, turn + 1

    received = [frame.change async for frame in frames(pieces())]
    assert received == [change for change in sent if change is not None]


@pytest.mark.parametrize(
    "kind",
    [
        errors.Invalid,
        errors.Malformed,
        errors.NotFound,
        errors.Conflict,
        errors.Stale,
        errors.Mismatch,
        errors.Exhausted,
        errors.Denied,
        errors.Unavailable,
        errors.Compacted,
    ],
)
def test_an_error_arrives_as_it_was_raised(kind: type[errors.WeftError]) -> None:
    error = error_of(fault_of(kind("a message", field="a", details={"n": 1})))
    assert type(error) is kind
    assert (error.message, error.field, dict(error.details)) == ("a message", "a", {"n": 1})


def test_an_unknown_error_is_taken_for_a_passing_one() -> None:
    assert type(error_of(fault_of(errors.WeftError("internal")))) is errors.Unavailable
