"""The kill tests once more, with many rules in force: nothing is lost or doubled, and all rules hold in the end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RULES = 60


def besiege(*, kills: int, store: str, within: float) -> None:
    """Run the siege in a process of its own, which makes namespaces of its own."""
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    flags = {"kills": kills, "store": store, "rules": RULES}
    command = [sys.executable, "-m", "weft.testing.kills", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=within)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20_000:]}"


@pytest.mark.timeout(700)
def test_thirty_kills_with_rules() -> None:
    besiege(kills=30, store="etcd", within=600)


@pytest.mark.soak
@pytest.mark.timeout(7500)
@pytest.mark.parametrize("store", ["embedded", "etcd"])
def test_a_thousand_kills_with_rules(store: str) -> None:
    besiege(kills=1000, store=store, within=7200)
