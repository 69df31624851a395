"""CNI latency and throughput, compared with Debian's Go plugins `bridge` and `host-local`.

The driver is `cni_peer.py` in the shared folder beside the checkout. It alternates between both plugins in separate
host namespaces, counts the CPU time of all processes involved (for ours netmaster and netplugin too), and checks each
pod. Our pods send a packet once they are attached, and it must arrive (`bench.node`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import Figure, Skipped, figure
from bench.node import CNI_ARGS
from weft.cni.install import PROGRAM, build_program, install
from weft.lab.namespaces import private_namespaces

CHECKOUT = Path(__file__).parents[1]
DRIVER = CHECKOUT.parent / "shared" / "bench" / "cni_peer.py"
PEERS = Path("/usr/lib/cni")
WITHIN = 900
# Pods on every node before the measurement.
PACKETS = 24
MANY = 500
RULES = 50
PEER = "peer: Debian's bridge + host-local"
PYTHON = "/usr/bin/python3"
STARTS = 40

Measurement = dict[str, Any]


class Bench:
    """A folder with both shims and our CNI configuration."""

    def __init__(self, directory: Path, *, rules: int = 0) -> None:
        """With `rules` every pod is in a group with this number of rules."""
        self._directory = directory
        self._rules = rules
        self._nodes = 0
        self._config = directory / "weft.conflist"
        self._config.write_text(json.dumps({"cniVersion": "1.0.0", "name": "weft", "plugins": [{"type": PROGRAM}]}))
        for shim in ("c", "python"):
            program = build_program(shim, python=PYTHON)
            folder = directory / shim
            install(bin_dir=folder, conf_dir=folder, program=program, config=None, force=False)

    def compare_with_peer(self, shim: str, *, pods: int, at_once: int, rounds: int) -> Measurement:
        """Measure ours and the peer."""
        home, command = self._node(shim, present=PACKETS)
        theirs = ["--compare", "builtin:bridge", "--compare-cni-path", str(PEERS)]
        return self._drive([*self._ours(home, command, shim), *theirs], home, pods, at_once, rounds)

    def compare_many_with_few(self, *, pods: int, rounds: int) -> Measurement:
        """Measure ours with many pods on the node, and with few."""
        many, command = self._node("c", present=MANY)
        few, other_command = self._node("c", present=PACKETS)
        others = ["--compare", str(self._config), "--compare-setup", other_command]
        others += ["--compare-ready-path", f"{few}/ready", "--env", f"WEFT_CNI_SOCKET={many}/cni.sock"]
        return self._drive([*self._ours(many, command, "c"), *others], few, pods, 1, rounds)

    def _node(self, shim: str, *, present: int) -> tuple[Path, str]:
        self._nodes += 1
        home = self._directory / f"n{self._nodes}"
        home.mkdir()
        program = self._directory / shim / PROGRAM
        return home, f"exec {sys.executable} -m bench.node {home} {program} {present} {self._rules}"

    def _ours(self, home: Path, command: str, shim: str) -> list[str]:
        return [
            "--config", str(self._config), "--cni-path", str(self._directory / shim),
            "--setup", command, "--ready-path", f"{home}/ready", "--setup-timeout", "120",
        ]  # fmt: skip

    def _drive(self, words: Sequence[str], home: Path, pods: int, at_once: int, rounds: int) -> Measurement:
        """Run the driver; `home` is the node that the shims use by default."""
        numbers = ["-n", str(pods), "-c", str(at_once), "--rounds", str(rounds), "--ops", "ADD,DEL"]
        if self._rules:
            numbers += ["--cni-args", CNI_ARGS]
        own = {"WEFT_CNI_SOCKET": f"{home}/cni.sock", "WEFT_CNI_LOG": f"{self._directory}/cni.log"}
        done = subprocess.run(
            [sys.executable, str(DRIVER), *words, *numbers, "--verify", "--verify-wait", "1"],
            capture_output=True, check=False, timeout=WITHIN, cwd=CHECKOUT, env={**os.environ, **own},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"bench: {DRIVER.name}: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
        measured: Measurement = json.loads(done.stdout)
        return measured


def run() -> dict[str, Figure]:
    with _bench() as bench:
        return _measure(bench)


def run_with_rules() -> dict[str, Figure]:
    """Measure with rules for every pod; the peer has none."""
    with _bench(rules=RULES) as bench:
        alone = bench.compare_with_peer("c", pods=40, at_once=1, rounds=9)
        together = bench.compare_with_peer("c", pods=80, at_once=8, rounds=9)
    with_rules = f"{RULES} rules per pod"
    return {
        f"ADD p50, one at a time, {with_rules}": _latency(alone, "ADD", target=0.4),
        f"DEL p50, one at a time, {with_rules}": _latency(alone, "DEL", target=0.4),
        f"ADD rate, 8 at once, {with_rules}": _rate(together, ("ADD",), target=3.0),
        f"ADD+DEL churn, 8 at once, {with_rules}": _rate(together, ("ADD", "DEL"), target=2.0),
    }


@contextmanager
def _bench(*, rules: int = 0) -> Iterator[Bench]:
    if os.geteuid() != 0:
        raise Skipped("creating network namespaces needs root")
    for needed in (DRIVER, PEERS / "bridge"):
        if not needed.exists():
            raise Skipped(f"{needed} is missing")
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-", ignore_cleanup_errors=True) as directory,
        private_namespaces(),
    ):
        yield Bench(Path(directory), rules=rules)


def _measure(bench: Bench) -> dict[str, Figure]:
    alone = bench.compare_with_peer("c", pods=60, at_once=1, rounds=6)
    together = bench.compare_with_peer("c", pods=120, at_once=8, rounds=6)
    starts = _starts()
    python = bench.compare_with_peer("python", pods=40, at_once=1, rounds=4)
    starts += _starts()
    present = bench.compare_many_with_few(pods=60, rounds=6)
    return {
        "ADD p50, one at a time": _latency(alone, "ADD", target=0.4),
        "DEL p50, one at a time": _latency(alone, "DEL", target=0.4),
        "ADD p50, one at a time, Python shim": _latency(python, "ADD", target=1.0),
        "start of the Python interpreter": _floor(starts, python),
        "ADD CPU, one at a time": _cpu(alone, "ADD"),
        "ADD CPU, 8 at once": _cpu(together, "ADD"),
        "DEL CPU, 8 at once": _cpu(together, "DEL"),
        "ADD rate, 8 at once": _rate(together, ("ADD",), target=3.0),
        "ADD+DEL churn, 8 at once": _rate(together, ("ADD", "DEL"), target=2.0),
        f"ADD p50 with {MANY} pods on the node": _latency(present, "ADD", target=1.15, note=f"peer: with {PACKETS}"),
    }


def _latency(measured: Measurement, verb: str, *, target: float, note: str = PEER) -> Figure:
    ours, peer = (measured[side]["ops"][verb]["p50_ms"] for side in "ab")
    ratio = measured["ratio_a_over_b"][verb]["p50_ms"]["median"]
    return figure(
        ours, peer=peer, unit="ms", target=target * peer, note=f"{note}; median of the rounds' ratios {ratio}"
    )


def _starts() -> list[float]:
    """The start-up times of the Python interpreter in milliseconds, started and ended like the Python shim."""
    found = []
    for _ in range(STARTS):
        began = time.perf_counter()
        child = os.posix_spawn(PYTHON, [PYTHON, "-IS", "-c", "import posix; posix._exit(0)"], {})
        os.waitpid(child, 0)
        found.append((time.perf_counter() - began) * 1e3)
    return found


def _floor(starts: Sequence[float], measured: Measurement) -> Figure:
    """The lower bound of any shim in Python, next to the peer's ADD."""
    return figure(
        median(starts), peer=measured["b"]["ops"]["ADD"]["p50_ms"], unit="ms", note="peer: ADD of bridge + host-local"
    )


def _cpu(measured: Measurement, verb: str) -> Figure:
    ours, peer = (measured[side]["ops"][verb]["cpu_ms_per_op"] for side in "ab")
    return figure(ours, peer=peer, unit="ms CPU", note=f"{PEER}; all processes involved")


def _rate(measured: Measurement, verbs: Sequence[str], *, target: float) -> Figure:
    """Pods per second through all the given verbs."""
    ours, peer = (1 / sum(1 / measured[side]["ops"][verb]["ops_per_s"] for verb in verbs) for side in "ab")
    return figure(ours, peer=peer, unit="1/s", target=target * peer, more_is_better=True, note=PEER)
