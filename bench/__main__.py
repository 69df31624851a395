"""`python -m bench [PART]`: run the parts, print a table, and write the figures to build/bench.json."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

from bench.figures import Figure, Skipped

PARTS = ("control", "engine", "cni", "linux", "services", "policy", "ovs", "kubernetes")
RESULTS = Path("build/bench.json")


def main(words: list[str]) -> int:
    """Run the named parts, or all."""
    unknown = set(words) - set(PARTS)
    if unknown:
        print(f"bench: {', '.join(sorted(unknown))}: no such part; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results: dict[str, dict[str, Figure]] = {}
    if RESULTS.exists():
        results = msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, dict[str, Figure]])
    for part in words or PARTS:
        try:
            results[part] = importlib.import_module(f"bench.{part}").run()
        except Skipped as reason:
            print(f"\n{part}\nskipped: {reason}")
            continue
        show(part, results[part])
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))
    return 0


def show(part: str, figures: dict[str, Figure]) -> None:
    """Print a part as a table."""
    width = max(map(len, figures))
    print(f"\n{part}\n{'figure':{width}}  {'ours':>10}  {'peer':>10}  {'ratio':>7}  {'target':>8}  unit        met")
    for name, each in figures.items():
        peer = "" if each["peer"] is None else f"{each['peer']:.6g}"
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.3g}"
        target = "" if each["target"] is None else f"{each['target']:g}"
        met = {True: "yes", False: "NO", None: ""}[each["met"]]
        print(f"{name:{width}}  {each['ours']:>10.6g}  {peer:>10}  {ratio:>7}  {target:>8}  {each['unit']:10}  {met}")
        if each["met"] is False:
            print(f"{'':{width}}  {each.get('note', '')}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
