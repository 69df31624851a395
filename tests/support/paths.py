"""Paths of the checkout, its documentation, and the shared folder beside it on our own machines."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ORACLES = ROOT.parent / "shared" / "oracles"
