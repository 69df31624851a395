"""SIGKILL of agents, shims, netmaster and store during pod churn: nothing is lost, no address is allocated twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RULES = 60


def run_chaos(*, kills: int, store: str, within: float, rules: int = 0, datapath: str = "linux") -> None:
    """Run chaos in its own process, which creates its own namespaces."""
    if os.geteuid() != 0:
        pytest.skip("creating namespaces needs root")
    flags = {"kills": kills, "store": store, "rules": rules, "datapath": datapath}
    command = [sys.executable, "-m", "tests.support.chaos", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=within)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20_000:]}"


@pytest.mark.timeout(1300)
def test_a_hundred_kills() -> None:
    run_chaos(kills=100, store="etcd", within=1200)


@pytest.mark.timeout(700)
def test_thirty_kills_with_rules() -> None:
    """Nothing is lost or doubled, and all rules are enforced in the end."""
    run_chaos(kills=30, store="etcd", within=600, rules=RULES)


@pytest.mark.soak
@pytest.mark.timeout(7500)
@pytest.mark.parametrize("store", ["embedded", "etcd"])
@pytest.mark.parametrize("rules", [0, RULES])
def test_a_thousand_kills(store: str, rules: int) -> None:
    run_chaos(kills=1000, store=store, within=7200, rules=rules)


@pytest.mark.soak
@pytest.mark.timeout(2500)
def test_a_hundred_kills_on_open_vswitch() -> None:
    """ovs-vswitchd and ovsdb-server are killed too."""
    run_chaos(kills=100, store="embedded", within=2400, rules=RULES, datapath="ovs")
