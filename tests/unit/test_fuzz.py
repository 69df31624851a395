"""Whatever bytes a peer, a file or a store has, a parser returns a value or raises a declared error, in bounded time.

`make soak` runs ten million inputs; here is a small part that is always the same.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.support.fuzz.campaign import run_campaign, shares
from tests.support.fuzz.engine import Fuzzer, Target, bounded
from tests.support.fuzz.mutations import MAX_INPUT, Form, Mutator
from tests.support.fuzz.regressions import REGRESSIONS
from tests.support.fuzz.targets import TARGETS

SEED = 18
INPUTS = 120
SOAK_INPUTS = int(os.environ.get("WEFT_FUZZ_INPUTS", "10000000"))


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_hostile_bytes(name: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(TARGETS[name], seed=SEED, failures=tmp_path)
    with bounded():
        results = fuzzer.run(range(INPUTS))
    assert results.failures == []


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, found in REGRESSIONS.items() for number in range(len(found))]
)
def test_an_input_that_once_broke_a_parser(name: str, number: int, tmp_path: Path) -> None:
    fuzzer = Fuzzer(TARGETS[name], seed=SEED, failures=tmp_path)
    with bounded():
        assert not fuzzer.try_input(REGRESSIONS[name][number])


@pytest.mark.parametrize("form", Form)
def test_a_seed_gives_the_same_inputs_again(form: Form) -> None:
    samples = {Form.BYTES: b"\0\1\2\3", Form.JSON: b'{"a":[1,"b",{}]}', Form.MSGPACK: b"\x81\xa1a\x92\x01\xa1b"}
    inputs = [[Mutator([samples[form]], form=form).input(Random(seed)) for seed in range(200)] for _ in range(2)]
    assert inputs[0] == inputs[1]
    assert len(set(inputs[0])) > 100
    assert max(map(len, inputs[0])) <= MAX_INPUT


def broken(data: bytes) -> object:
    if data.startswith(b"\0"):
        raise KeyError("a fault of ours")
    if b"\7" in data:
        while True:
            pass
    return bytearray(len(data) << 34) if b"\xff" in data else data


def test_the_fuzzer_finds_crashes_hangs_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself is tried: a parser with three faults, each of which it must report and save."""
    monkeypatch.setattr("tests.support.fuzz.engine.CPU_LIMIT_S", 0.05)
    target = Target(name="broken", open=lambda: broken, samples=lambda: [b"\1\2\3\4"], words=(b"\7",))
    fuzzer = Fuzzer(target, seed=1, failures=tmp_path)
    with bounded():
        assert [fuzzer.try_input(data) for data in (b"\1", b"\0", b"\7", b"\1\xff")] == [
            None, "KeyError: 'a fault of ours'", "Hang: more than 0.05 s of CPU", "MemoryError: ",
        ]  # fmt: skip
        results = fuzzer.run(range(400))
    assert results.failures
    for failure in results.failures:
        assert failure.file.read_bytes() == fuzzer.input(failure.number)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_ten_million_inputs() -> None:
    """WEFT_FUZZ_SEED repeats a run; WEFT_FUZZ_INPUTS makes it shorter."""
    seed = int(os.environ.get("WEFT_FUZZ_SEED", secrets.randbits(32)))
    totals = run_campaign(shares(SOAK_INPUTS), seed=seed, workers=os.cpu_count() or 2)
    assert {name: total.failures for name, total in totals.items() if total.failures} == {}, f"seed {seed}"
    assert sum(total.inputs for total in totals.values()) >= SOAK_INPUTS * 0.99
