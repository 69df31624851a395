"""The `weft` command itself: it finds its subcommands and imports only the one that is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from weft import __version__
from weft.cli import SUBCOMMANDS, main


def test_every_subcommand_exists() -> None:
    for name, subcommand in SUBCOMMANDS.items():
        module, _, function = subcommand.where.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert subcommand.about


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown and each.about in shown for name, each in SUBCOMMANDS.items())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"weft {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["oracle"], ["oracle", "nonsense", "x"]])
def test_what_is_no_command_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: weft" in capsys.readouterr().err


def test_only_the_subcommand_asked_for_is_imported() -> None:
    program = "import sys, weft.cli; print([m for m in sys.modules if m.startswith('weft.') or m == 'msgspec'])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "weft.domain.policy.engine.engine" not in loaded.stdout
    assert "msgspec" not in loaded.stdout
