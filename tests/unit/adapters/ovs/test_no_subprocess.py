"""No module runs tools, whose errors would have to be parsed from their output (W34)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import weft.adapters.ovs

MODULES = sorted(Path(weft.adapters.ovs.__file__).parent.rglob("*.py"))
FORBIDDEN = {"subprocess", "os", "multiprocessing", "pty"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_no_module_runs_subprocesses(module: Path) -> None:
    tree = ast.parse(module.read_text())
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in named} & FORBIDDEN
