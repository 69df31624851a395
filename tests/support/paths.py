"""Where things are: the checkout, its pages, and the shared folder that lies beside it on our own machines."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ORACLES = ROOT.parent / "shared" / "oracles"
