"""`python -m bench.compare OLD PART… [--pairs N]`: compare the figures of two checkouts, in pairs.

OLD is a checkout with its own `.venv`. Each pair runs a part once in either tree, the first one alternating, so that a
temporarily slow machine affects both. The result is the median of the pairs' ratios, new by old. Exits with 1 if a
figure is worse by more than the tolerance.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec

from bench.figures import Figure

CHECKOUT = Path(__file__).parents[1]
WITHIN = 3600
# Figures of which more is better; all others are times, memory or losses.
RATES = ("1/s", "Gbit/s", "MB/s", "per s")
Figures = dict[str, Figure]


def measure(checkout: Path, part: str) -> Figures:
    """Run one part in a checkout and read its figures."""
    results = checkout / "build" / "bench.json"
    results.unlink(missing_ok=True)
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "bench", part]
    subprocess.run(command, cwd=checkout, check=True, timeout=WITHIN, stdout=subprocess.DEVNULL)
    return msgspec.json.decode(results.read_bytes(), type=dict[str, Figures])[part]


def compare(old: Path, part: str, *, pairs: int) -> dict[str, list[float]]:
    """Return the ratios new by old of each figure that both trees have, oriented so that more than 1 is worse."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for number in range(pairs):
        order = (old, CHECKOUT) if number % 2 else (CHECKOUT, old)
        figures = {checkout: measure(checkout, part) for checkout in order}
        for name, theirs in _counterparts(figures[CHECKOUT], figures[old]):
            ours = figures[CHECKOUT][name]
            if ours["ours"] and theirs["ours"]:
                ratio = ours["ours"] / theirs["ours"]
                ratios[name].append(1 / ratio if ours["unit"] in RATES else ratio)
        print(f"{part}: pair {number + 1} of {pairs}", file=sys.stderr, flush=True)
    return ratios


def _counterparts(ours: Figures, theirs: Figures) -> Iterator[tuple[str, Figure]]:
    """Pair figures by name, or by position where the other checkout has other names for the same list."""
    if len(ours) == len(theirs):
        yield from zip(ours, theirs.values(), strict=True)
    else:
        yield from ((name, theirs[name]) for name in ours if name in theirs)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=0.05)
    args = parser.parse_args(words)
    worse = 0
    for part in args.parts:
        ratios = compare(args.old.resolve(), part, pairs=args.pairs)
        width = max(map(len, ratios), default=0)
        print(f"\n{part}\n{'figure':{width}}  {'median':>7}  {'lowest':>7}  {'highest':>7}  pairs")
        for name, each in ratios.items():
            is_worse = median(each) > 1 + args.tolerance
            worse += is_worse
            flag = "  WORSE" if is_worse else ""
            print(f"{name:{width}}  {median(each):7.3f}  {min(each):7.3f}  {max(each):7.3f}  {len(each):5}{flag}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
