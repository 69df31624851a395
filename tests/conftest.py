"""What all tests share: properties are checked without a stopwatch, for the machine may be busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

BUILD_WITHIN = 600.0

settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


@pytest.fixture(scope="session")
def cnitool() -> str:
    """The program of the CNI project that calls plugins; built when it is not there yet."""
    command = [str(Path(__file__).parents[1] / "scripts" / "build-cnitool")]
    environment = {**os.environ, "PYTHON": sys.executable}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_WITHIN)
    assert built.returncode == 0, built.stderr
    return built.stdout.strip()
