"""Runs inputs against parsers, each within bounds of time and memory, and saves what breaks one.

An input is named by target, seed and number: `python -m tests.support.fuzz --replay TARGET:SEED:NUMBER` repeats it.
"""

from __future__ import annotations

import hashlib
import resource
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import NamedTuple

from tests.support.fuzz.mutations import Form, Mutator
from tests.support.paths import ROOT

from weft.domain.errors import WeftError

# Where inputs that broke something are kept.
FAILURES = ROOT / "build" / "fuzz"
# CPU seconds of one input, not seconds of a clock: the machine may be busy. A parser takes milliseconds.
CPU_LIMIT_S = 5.0
# What one input may add to the memory of the process.
MEMORY_LIMIT = 1 << 30
# Failures of one target after which its other inputs are skipped: they would be of the same fault.
ENOUGH_FAILURES = 20

Parse = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser, and what it may raise. `open` makes the parser in the process that runs it."""

    name: str
    open: Callable[[], Parse]
    samples: Callable[[], Sequence[bytes]]
    errors: tuple[type[BaseException], ...] = (WeftError,)
    form: Form = Form.BYTES
    words: tuple[bytes, ...] = ()
    # The share of inputs, relative to the others.
    weight: float = 1.0


class Failure(NamedTuple):
    """An input that broke a parser."""

    target: str
    seed: int
    number: int
    error: str
    file: Path

    def __str__(self) -> str:
        return f"--replay {self.target}:{self.seed}:{self.number}  {self.error}  ({self.file})"


class Hang(BaseException):
    """An input took more than `CPU_LIMIT_S`. Not an `Exception`, so that no parser handles it."""


@dataclass(slots=True)
class Results:
    """How many inputs a target has had, how many of them it accepted, and what broke it."""

    inputs: int = 0
    accepted: int = 0
    failures: list[Failure] = field(default_factory=list)


class Fuzzer:
    """The inputs of one target and one seed."""

    def __init__(self, target: Target, *, seed: int, failures: Path = FAILURES) -> None:
        self._target = target
        self._seed = seed
        self._failures = failures
        self._mutator = Mutator(target.samples(), form=target.form, words=target.words)
        self._parse = target.open()

    def input(self, number: int) -> bytes:
        """The input of this number: always the same for a seed."""
        return self._mutator.input(Random(f"{self._target.name}:{self._seed}:{number}"))

    def run(self, numbers: Iterable[int], *, started: Callable[[int], None] = lambda _: None) -> Results:
        """Try these inputs. `started` is called with each number before it is tried."""
        results = Results()
        for number in numbers:
            data = self.input(number)
            started(number)
            results.inputs += 1
            error = self.try_input(data)
            results.accepted += error is None
            if error:
                results.failures.append(self._save(number, data, error))
                if len(results.failures) == ENOUGH_FAILURES:
                    break
        return results

    def try_input(self, data: bytes) -> str | None:
        """What an input broke: None for a value, empty for a declared error."""
        try:
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            self._parse(data)
        except self._target.errors:
            return ""
        except (Exception, Hang) as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "src/weft" in frame.filename]
            place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            return f"{type(error).__name__}: {error!s:.200}{place}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return None

    def _save(self, number: int, data: bytes, error: str) -> Failure:
        self._failures.mkdir(parents=True, exist_ok=True)
        file = self._failures / f"{self._target.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        file.write_bytes(data)
        return Failure(self._target.name, self._seed, number, error, file)


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the time of each input, and the memory of the process, while the block runs."""

    def expired(_signal: int, _frame: FrameType | None) -> None:
        raise Hang(f"more than {CPU_LIMIT_S:g} s of CPU")

    before = signal.signal(signal.SIGPROF, expired)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_LIMIT, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, before)
