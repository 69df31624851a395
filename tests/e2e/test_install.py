"""Weft as a user installs it: built, installed into an empty environment, and run with the README's commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

DEADLINE = 600

# The commands run in their own network namespace, so that the default port is free.
SCRIPT = """
set -euo pipefail
ip link set lo up
cd "$1"
export PATH="$2/bin:$PATH" HOME="$1"
say() {{ printf '\\n$ %s\\n' "$1"; }}
{commands}
"""


def readme_commands() -> list[str]:
    """The lines after `$` in the README, without comments."""
    lines = re.findall(r"^\$ (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return [re.sub(r"\s+# .*$", "", line) for line in lines]


def as_step(command: str) -> str:
    """A step of the script; the exit code of `weft trace` reports a denied flow, which is not a failure."""
    if command.startswith("netmaster"):
        wait = "for i in $(seq 300); do netctl version >/dev/null 2>&1 && break; sleep 0.1; done"
        return f"say '{command}'\n{command} 2> netmaster.log\nMASTER=$!\ntrap 'kill $MASTER' EXIT\n{wait}"
    tolerated = " || test $? = 1" if command.startswith("weft trace") else ""
    return f"say {shlex.quote(command)}\n{command}{tolerated}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with Weft and its runtime dependencies only."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=DEADLINE)
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(ROOT)], check=True, timeout=DEADLINE)
    return venv


@pytest.mark.timeout(DEADLINE)
def test_the_commands_of_the_readme_work(installed: Path, tmp_path: Path) -> None:
    commands = readme_commands()
    assert commands[0].startswith("netmaster")
    script = SCRIPT.format(commands="\n".join(map(as_step, commands)))
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", script, "readme", str(tmp_path), str(installed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "blue:web-net" in done.stdout
    assert "BLOCKED" in done.stdout
    assert "contiv/blue/web-only/rest" in done.stdout


@pytest.mark.timeout(DEADLINE)
def test_the_lab_demo_completes(installed: Path) -> None:
    done = subprocess.run(
        [str(installed / "bin" / "weft"), "lab"], capture_output=True, text=True, check=False, timeout=DEADLINE
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for expected in ("dig +short shop AAAA", "shop-3 on two"):
        assert expected in done.stdout
    assert re.search(r"(\d+) of \1 packets between the hosts arrived during the restart", done.stdout), done.stdout
