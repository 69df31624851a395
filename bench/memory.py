"""How much memory a process has."""

from __future__ import annotations

import re
from pathlib import Path


def resident_mb(pid: int) -> float:
    """What the kernel calls its resident set."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
