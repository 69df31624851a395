"""The path of a CNI ADD through the agent is the one that ARCHITECTURE.md lists."""

from __future__ import annotations

from importlib.util import find_spec

from tests.support.add_path import (
    CODEC_MODULES,
    COLLECTION_MODULES,
    MAX_MODULES,
    VALUE_MODULES,
    counted,
    measure,
    read_documented,
)

from weft.lab.netlab import NetLab


async def test_an_add_passes_through_the_documented_modules(lab: NetLab) -> None:
    """`scripts/add-path --write` updates the list."""
    modules = counted(await measure(lab))
    assert modules == read_documented()
    assert len(modules) <= MAX_MODULES


def test_uncounted_modules_exist() -> None:
    uncounted = VALUE_MODULES | CODEC_MODULES | COLLECTION_MODULES
    assert [module for module in uncounted if find_spec(module) is None] == []
