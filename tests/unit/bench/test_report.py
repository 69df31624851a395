"""docs/figures.md is what `bench.report` writes from docs/figures.json."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from bench import report
from bench.__main__ import PARTS
from bench.figures import Figure
from tests.support.paths import DOCS


def a_figure(*, ours: float = 3.0, note: str = "peer: none; load 1.5 on 2 cores") -> Figure:
    return Figure(ours=ours, peer=6.0, ratio=0.5, unit="ms", target=2.0, met=False, note=note)


def test_the_page_is_generated() -> None:
    assert (DOCS / "figures.md").read_text() == report.render(report.read_figures(report.FIGURES))


def test_every_part_of_the_bench_is_described() -> None:
    assert set(report.ABOUT) == set(PARTS)
    assert set(report.read_figures(report.FIGURES)) <= set(PARTS)


def test_a_row_has_the_load_of_the_note() -> None:
    page = report.render({"cni": {"ADD p50": a_figure()}})
    assert "| ADD p50 | 3 ms | 6 | 0.5 | 2 | **no** | 1.5 |" in page.splitlines()


def test_a_row_without_peer_target_and_load() -> None:
    figure = Figure(ours=1234.5, peer=None, ratio=None, unit="1/s", target=None, met=None)
    assert "| rate | 1,234/s |  |  |  |  |  |" in report.render({"cni": {"rate": figure}}).splitlines()


def test_a_bench_run_replaces_its_parts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, old, new = a_figure(), a_figure(ours=1.0), a_figure(ours=2.0)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures.json")
    report.FIGURES.write_bytes(msgspec.json.encode({"engine": {"memory": kept}, "cni": {"ADD": old, "gone": old}}))
    (tmp_path / "bench.json").write_bytes(msgspec.json.encode({"cni": {"ADD": new}}))
    assert report.main(["--merge", str(tmp_path / "bench.json")]) == 0
    merged = report.read_figures(report.FIGURES)
    assert merged == {"engine": {"memory": kept}, "cni": {"ADD": new}}
    assert capsys.readouterr().out == report.render(merged)
