"""What no source file may have (docs/design/security-lessons.md): shells, abstract sockets, setuid modes."""

from __future__ import annotations

import ast
import stat
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SHELLS = frozenset({"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell", "subprocess_shell"})

_RUNNERS = frozenset({"run", "call", "check_call", "check_output", "Popen"})


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """All calls in the sources."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call):
                yield path, node


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_cve_2026_32241_no_command_goes_through_a_shell() -> None:
    found = [
        f"{path}:{call.lineno}"
        for path, call in calls()
        if name_of(call) in _SHELLS
        or any(
            keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            for keyword in call.keywords
            if name_of(call) in _RUNNERS
        )
    ]
    assert found == []


def test_cve_2020_15257_no_socket_is_abstract() -> None:
    """Their names begin with a zero byte. A pod in the host's network namespace could connect to one."""
    found = [
        f"{path}:{call.lineno}"
        for path, call in calls()
        if name_of(call) in {"bind", "connect", "connect_ex"}
        for part in ast.walk(call)
        if isinstance(part, ast.Constant) and isinstance(part.value, str | bytes) and part.value[:1] in ("\0", b"\0")
    ]
    assert found == []


def test_cve_2024_33522_nothing_that_is_shipped_is_setuid() -> None:
    shipped = [path for folder in ("src", "packaging", "scripts") for path in (ROOT / folder).rglob("*")]
    assert not [path for path in shipped if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID) and path.is_file()]
