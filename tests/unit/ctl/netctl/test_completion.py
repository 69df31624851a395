"""The generated completion scripts: up to date, and tried in the shells that are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from weft.ctl.netctl.completion import SHELLS, completion_script

SCRIPTS = ROOT / "src" / "weft" / "ctl" / "completions"
CASES = [
    ("netctl ne", {"net", "netprofile", "network"}),
    ("netctl --netmaster http://127.0.0.1:9999 net i", {"inspect"}),
    ("netctl --timeout 5 net d", {"delete"}),
    ("netctl ep l", {"list", "ls"}),
    ("netctl net create --encap v", {"vlan", "vxlan"}),
    ("netctl net create blue --subn", {"--subnet", "--subnetv6"}),
    ("netctl policy rule-add web 1 --action d", {"deny"}),
    ("netctl service delete --ten", {"--tenant"}),
    ("netctl completion z", {"zsh"}),
    ("netctl tenant create --wait --ignore", {"--ignore-unreachable"}),
    ("netctl network create --subnet ", set()),
    ("netctl node se", set()),
]

ASK_BASH = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_netctl
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASK_FISH = "source $argv[1]; complete -C $argv[2]"


def offered(command: list[str]) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


def bash_words(line: str) -> list[str]:
    """The words of a line as bash splits them for completion, at COMP_WORDBREAKS."""
    return re.findall(r"[^\s:=]+|[:=]+", line) + ([""] if line.endswith(" ") else [])


@pytest.mark.parametrize("shell", SHELLS)
def test_the_packaged_script_is_up_to_date(shell: str) -> None:
    assert (SCRIPTS / f"netctl.{shell}").read_text() == completion_script(shell), "run: make docs"


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash(line: str, expected: set[str]) -> None:
    assert offered(["bash", "-c", ASK_BASH, "bash", str(SCRIPTS / "netctl.bash"), *bash_words(line)]) == expected


def test_bash_completes_files(tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()
    words = ["netctl", "restore", f"{tmp_path}/st"]
    assert offered(["bash", "-c", ASK_BASH, "bash", str(SCRIPTS / "netctl.bash"), *words]) == {f"{tmp_path}/state.json"}


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish(line: str, expected: set[str]) -> None:
    assert offered(["fish", "--no-config", "-c", ASK_FISH, str(SCRIPTS / "netctl.fish"), line]) == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_parses_its_script() -> None:
    subprocess.run(["zsh", "-fn", str(SCRIPTS / "netctl.zsh")], check=True, timeout=60)
