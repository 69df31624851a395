"""The effect of a write on policy: computed in bounded time, or the write is refused."""

from __future__ import annotations

import pytest

from weft.domain.errors import Unavailable
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.diff import diff
from weft.master.api import guarded_writes
from weft.master.api.guarded_writes import compute_diff


async def test_an_effect_that_takes_too_long_to_compute_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an internal error, also for `POST /api/v1/policydiff`."""
    assert await compute_diff(lambda: diff(Engine(), Engine())) == ()
    monkeypatch.setattr(guarded_writes, "DIFF_TIMEOUT_S", 0.0)
    with pytest.raises(Unavailable, match="smaller"):
        await compute_diff(lambda: diff(Engine(), Engine()))
