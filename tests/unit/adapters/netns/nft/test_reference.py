"""docs/reference/nft-tables.md is up to date, and every chain, set and map has a purpose."""

from __future__ import annotations

import itertools
import re

import pytest
from tests.support.paths import DOCS

from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.netns.nft.reference import TABLES, TableReference, declared_names, reference, template_pattern

EACH_TABLE = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.heading)
# Kernels before 4.14 allow 31 characters; now NFT_NAME_MAXLEN is 256.
LONGEST_NAME = 32


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "reference" / "nft-tables.md").read_text() == reference(), "run `make docs`"


@EACH_TABLE
def test_every_chain_has_one_purpose(table: TableReference) -> None:
    assert_described(set(declared_names(table.ruleset, "chain")), set(table.chains))


@EACH_TABLE
def test_every_set_and_map_has_one_purpose(table: TableReference) -> None:
    assert_described(set(declared_names(table.ruleset, "set", "map")), set(table.sets))


def assert_described(names: set[str], templates: set[str]) -> None:
    assert names
    matches = [
        (name, template) for name in names for template in templates if template_pattern(template).fullmatch(name)
    ]
    assert sorted(name for name, _ in matches) == sorted(names)
    assert {template for _, template in matches} == templates


@EACH_TABLE
def test_nothing_is_used_that_is_not_declared(table: TableReference) -> None:
    """Of chains, sets and maps; a declaration that this test overlooks would fail it too."""
    words = table.ruleset.split()
    targets = {after.rstrip(",") for verb, after in itertools.pairwise(words) if verb in ("goto", "jump")}
    assert targets <= set(declared_names(table.ruleset, "chain"))
    used = set(re.findall(r"(?:^|[^@])@([a-z]\w*)", table.ruleset)) - {"th", "ll", "nh"}
    assert used <= set(declared_names(table.ruleset, "set", "map"))


@EACH_TABLE
def test_names_are_short_enough_for_old_kernels(table: TableReference) -> None:
    for name in declared_names(table.ruleset, "chain", "set", "map"):
        assert len(name) < LONGEST_NAME, name


def test_drop_reasons_are_distinct() -> None:
    assert len(set(DROP_REASONS.values())) == len(DROP_REASONS)
    assert all(re.fullmatch(r"weft/[a-z-]+", reason) for reason in DROP_REASONS.values())
