"""docs/cni-conformance.md names every item of the checklist once, and only tests that exist."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

ROW = re.compile(r"^\| ([CP]-\d+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)

SPECIFICATION = [(1, 18), (20, 30), (40, 50), (60, 71), (80, 88), (90, 100), (110, 120), (130, 133)]
REFERENCE_PLUGINS = [(1, 24), (30, 36), (40, 47), (50, 56)]


def rows() -> list[tuple[str, str]]:
    return ROW.findall((ROOT / "docs" / "cni-conformance.md").read_text())


def test_every_item_has_its_row() -> None:
    wanted = [f"C-{item:03}" for first, last in SPECIFICATION for item in range(first, last + 1)]
    wanted += [f"P-{item:02}" for first, last in REFERENCE_PLUGINS for item in range(first, last + 1)]
    assert [item for item, _ in rows()] == wanted


def test_every_test_named_exists() -> None:
    defined = {name for file in (ROOT / "tests").rglob("test_*.py") for name in DEFINED.findall(file.read_text())}
    named = {name for _, verdict in rows() for name in TEST.findall(verdict)}
    assert named <= defined


def test_every_item_has_a_test_or_a_reason() -> None:
    reasons = ("does not apply", "tests")
    assert [
        item for item, verdict in rows() if not TEST.search(verdict) and not any(r in verdict for r in reasons)
    ] == []
