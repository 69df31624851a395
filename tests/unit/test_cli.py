"""The `weft` command: dispatch, help, and lazy imports of subcommands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft import __version__
from weft.cli import SUBCOMMANDS, main


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: weft {name}" in capsys.readouterr().out
    assert SUBCOMMANDS[name].summary


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown and each.summary in shown for name, each in SUBCOMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"weft {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["verify"], ["verify", "nonsense", "x"]])
def test_an_invalid_command_line_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: weft" in capsys.readouterr().err


def test_only_the_subcommand_that_runs_is_imported() -> None:
    program = "import sys, weft.cli; print([m for m in sys.modules if m.startswith('weft.') or m == 'msgspec'])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "weft.domain.policy.engine.engine" not in loaded.stdout
    assert "weft.lab" not in loaded.stdout
    assert "weft.agent" not in loaded.stdout
    assert "msgspec" not in loaded.stdout
