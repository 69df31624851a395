"""Many inputs in worker processes, which a watchdog ends when one is stuck in an input.

Workers share the inputs of every target: worker w of n takes the numbers w, w + n, w + 2n …, so that the seed alone
names an input, whatever the number of workers.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
from tests.support.fuzz.engine import Failure, Fuzzer, Target, bounded
from tests.support.fuzz.targets import TARGETS
from tests.support.paths import ROOT

# Seconds in which a worker must get on with its inputs. A busy machine may stop it for long; a hang lasts for ever.
STUCK_AFTER_S = 180.0
# The worker's place: the index of its target, and the number of the input that it tries.
_PLACE = struct.Struct("=IQ")


class TargetReport(msgspec.Struct, frozen=True):
    """What a worker prints when it is through with a target."""

    target: str
    inputs: int
    accepted: int
    cpu_s: float
    failures: list[str]


@dataclass(slots=True)
class Totals:
    """Inputs, accepted inputs, CPU seconds, and failures of a target over all workers."""

    inputs: int = 0
    accepted: int = 0
    cpu_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def shares(inputs: int, targets: Mapping[str, Target] = TARGETS) -> dict[str, int]:
    """How many of so many inputs each target gets, by weight."""
    total = sum(target.weight for target in targets.values())
    return {name: max(1, round(inputs * target.weight / total)) for name, target in targets.items()}


def run_campaign(
    counts: Mapping[str, int], *, seed: int, workers: int = 2, report: Callable[[str], None] = print
) -> dict[str, Totals]:
    """Run so many inputs of each target; the totals. Never raises for a parser's fault: the totals have it."""
    report(f"fuzz seed {seed}")
    totals = {name: Totals() for name in counts}
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as folder, selectors.DefaultSelector() as selector:
        running = [_Worker(Path(folder), number, workers, seed=seed, counts=counts) for number in range(workers)]
        for worker in running:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select(timeout=1):
                line = key.data.output.readline()
                if not line:
                    selector.unregister(key.fileobj)
                    key.data.ended(totals)
                    continue
                told = msgspec.json.decode(line, type=TargetReport)
                total = totals[told.target]
                total.inputs += told.inputs
                total.accepted += told.accepted
                total.cpu_s += told.cpu_s
                total.failures += told.failures
                key.data.done.add(told.target)
                report(f"{told.target}: {told.inputs} inputs, {told.accepted} accepted, {len(told.failures)} failures")
                for failure in told.failures:
                    report(f"  {failure}")
            for worker in running:
                worker.watch()
    return totals


class _Worker:
    """A process that runs its share, and how far it has got."""

    def __init__(self, folder: Path, number: int, workers: int, *, seed: int, counts: Mapping[str, int]) -> None:
        place = folder / str(number)
        place.write_bytes(bytes(_PLACE.size))
        self._names = list(counts)
        with place.open("rb") as file:
            self._place = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._log = (folder / f"{number}.log").open("w+b")
        self.done: set[str] = set()
        self._is_stuck = False
        self._moved = (b"", time.monotonic())
        order = msgspec.json.encode(
            {"seed": seed, "counts": counts, "worker": number, "workers": workers, "place": str(place)}
        )
        # PYTHONFAULTHANDLER: a crash of the interpreter shows the parser that it was in.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fuzz.campaign", order.decode()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout

    def watch(self) -> None:
        """Kill the process when it does not get on."""
        place, since = self._moved
        if place != self._place[:]:
            self._moved = (self._place[:], time.monotonic())
        elif time.monotonic() - since > STUCK_AFTER_S and self._process.poll() is None:
            self._is_stuck = True
            self._process.kill()

    def ended(self, totals: dict[str, Totals]) -> None:
        """Account for a process that did not end by itself: the input that it was in broke its parser."""
        status = self._process.wait()
        target, number = _PLACE.unpack(self._place[:])
        if status and self._names[target] in totals:
            self._log.seek(0)
            why = (
                "it hangs"
                if self._is_stuck
                else f"it ended the interpreter ({status}): {self._log.read()[-2000:].decode(errors='replace')}"
            )
            totals[self._names[target]].failures.append(f"input {number}: {why}")
        self._log.close()
        self.output.close()


class Order(msgspec.Struct, frozen=True):
    """The share of a worker."""

    seed: int
    counts: dict[str, int]
    worker: int
    workers: int
    place: str


def work(order: Order) -> None:
    """Run a worker's share, one target after the other."""
    logging.disable()
    with Path(order.place).open("r+b") as file:
        place = mmap.mmap(file.fileno(), 0)
    for index, (name, count) in enumerate(order.counts.items()):
        fuzzer = Fuzzer(TARGETS[name], seed=order.seed)

        def started(number: int, index: int = index) -> None:
            _PLACE.pack_into(place, 0, index, number)

        before = time.process_time()
        with bounded():
            results = fuzzer.run(range(order.worker, count, order.workers), started=started)
        done = TargetReport(
            name, results.inputs, results.accepted, time.process_time() - before, [*map(_line, results.failures)]
        )
        sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
        sys.stdout.flush()


def _line(failure: Failure) -> str:
    return str(failure)


if __name__ == "__main__":
    work(msgspec.json.decode(sys.argv[1], type=Order))
