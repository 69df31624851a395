"""Fuzz all parsers of foreign bytes, or some, or try one input again."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from pathlib import Path

from tests.support.fuzz.campaign import run_campaign, shares
from tests.support.fuzz.engine import Fuzzer, bounded
from tests.support.fuzz.targets import TARGETS


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="default: a random one, which is printed"
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100,000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--replay", metavar="TARGET:SEED:NUMBER", help="try this input again, and show it")
    parser.add_argument("--file", metavar="TARGET:PATH", help="try the bytes of a file")
    arguments = parser.parse_args()
    if arguments.replay or arguments.file:
        return _replay(arguments)
    targets = {name: TARGETS[name] for name in arguments.targets or TARGETS}
    totals = run_campaign(shares(arguments.inputs, targets), seed=arguments.seed, workers=arguments.workers, report=say)
    for name, total in totals.items():
        cost = 1e6 * total.cpu_s / max(total.inputs, 1)
        say(f"{name}: {total.inputs} inputs, {cost:.0f} us each, {len(total.failures)} failures")
    failures = sum(len(total.failures) for total in totals.values())
    say(f"{sum(total.inputs for total in totals.values())} inputs, {failures} failures")
    return 1 if failures else 0


def _replay(arguments: argparse.Namespace) -> int:
    logging.disable()
    if arguments.replay:
        name, seed, number = arguments.replay.split(":")
        fuzzer = Fuzzer(TARGETS[name], seed=int(seed))
        data = fuzzer.input(int(number))
    else:
        name, _, path = arguments.file.partition(":")
        fuzzer, data = Fuzzer(TARGETS[name], seed=0), Path(path).read_bytes()
    say(repr(data[:2000]))
    with bounded():
        error = fuzzer.try_input(data)
    say("accepted" if error is None else error or "a declared error")
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
