"""A figure: our value, the peer's from the same run, their ratio, the target and whether it is met."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import NotRequired, TypedDict


class Skipped(Exception):
    """The reason why a part cannot be measured here."""


class Figure(TypedDict):
    """One value with its peer. `ratio` is ours by the peer's; `met` is None without a target."""

    ours: float
    peer: float | None
    ratio: float | None
    unit: str
    target: float | None
    met: bool | None
    note: NotRequired[str]


def figure(
    ours: float,
    *,
    unit: str,
    note: str,
    peer: float | None = None,
    target: float | None = None,
    more_is_better: bool = False,
) -> Figure:
    """A figure whose target is an upper bound, or a lower bound if more is better."""
    met = None if target is None else (ours >= target if more_is_better else ours <= target)
    return Figure(
        ours=round(ours, 4),
        peer=None if peer is None else round(peer, 4),
        ratio=None if peer is None else round(ours / peer, 6),
        unit=unit,
        target=target,
        met=met,
        note=f"{note}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    )


def paired_figure(ours: Sequence[float], peers: Sequence[float], *, unit: str, most: float, note: str) -> Figure:
    """A figure of paired measurements, with a target of `most` times the peer's.

    The ratio is the median of the pairs' ratios: a temporarily slow machine affects both values of a pair.
    """
    ratio = median(our / peer for our, peer in zip(ours, peers, strict=True))
    result = figure(median(ours), peer=median(peers), unit=unit, target=most * median(peers), note=note)
    return {**result, "ratio": round(ratio, 6), "met": ratio <= most}
