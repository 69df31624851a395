"""Memory of a process."""

from __future__ import annotations

import re
from pathlib import Path


def resident_mb(pid: int) -> float:
    """The resident set size of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
