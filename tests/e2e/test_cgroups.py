"""Cgroups of killed test runs are removed by the next run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.support.cgroups import make_cgroup, own_cgroup


def places(name: str) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"{name}*"), *Path("/sys/fs/cgroup").glob(f"*/{name}*")]


async def test_cgroups_of_a_killed_test_are_removed_by_the_next() -> None:
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    orphan, own = f"weft-{ended.pid}-one", f"weft-{os.getpid()}-cgroups"
    make_cgroup(orphan)
    async with own_cgroup(own):
        assert places(orphan) == []
        make_cgroup(own)
        assert places(own) != []
    assert places(own) == []
