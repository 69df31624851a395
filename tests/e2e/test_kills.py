"""Kill -9 of agents, shims, netmaster and store while pods come and go: nothing is lost, no address is given twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def besiege(*, kills: int, store: str, within: float) -> None:
    """Run the siege in a process of its own, which makes namespaces of its own."""
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    command = [sys.executable, "-m", "weft.testing.kills", "--kills", str(kills), "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=within)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20_000:]}"


@pytest.mark.timeout(1300)
def test_a_hundred_kills() -> None:
    besiege(kills=100, store="etcd", within=1200)


@pytest.mark.soak
@pytest.mark.timeout(7500)
@pytest.mark.parametrize("store", ["embedded", "etcd"])
def test_a_thousand_kills(store: str) -> None:
    besiege(kills=1000, store=store, within=7200)
