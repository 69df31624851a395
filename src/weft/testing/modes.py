"""In which forwarding modes a test runs: marks for tests, or modules of them, whose lab has a fixture `fwdmode`."""

from __future__ import annotations

from typing import Final

import pytest

BOTH_MODES: Final = pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
BRIDGE_IN_SOAK: Final = pytest.mark.parametrize("fwdmode", ["routing", pytest.param("bridge", marks=pytest.mark.soak)])
"""The same test in bridge mode is one of the long runs."""
