"""Completion in the shells themselves; those that are not installed are skipped."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from weft.ctl.netctl.completion import completion_script

CASES = [
    ("netctl ne", {"netprofile", "network"}),
    ("netctl --netmaster http://127.0.0.1:9999 net i", {"inspect"}),
    ("netctl --timeout=5 net d", set()),
    ("netctl ep l", {"ls"}),
    ("netctl net create --encap v", {"vlan", "vxlan"}),
    ("netctl net create blue --subn", {"--subnet", "--subnetv6"}),
    ("netctl policy rule-add web 1 --action d", {"deny"}),
    ("netctl service delete --ten", {"--tenant"}),
    ("netctl completion z", {"zsh"}),
    ("netctl tenant create --wait --skip", {"--skip-silent"}),
    ("netctl network create --subnet ", set()),
    ("netctl netwrok ", set()),
]

ASK_BASH = """
source "$1"
COMP_LINE="$2"
COMP_POINT=${#COMP_LINE}
_netctl
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASK_FISH = "source $argv[1]; complete -C $argv[2]"


def script(shell: str, folder: Path) -> Path:
    path = folder / f"netctl.{shell}"
    path.write_text(completion_script(shell))
    return path


def offered(command: list[str]) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash(tmp_path: Path, line: str, expected: set[str]) -> None:
    assert offered(["bash", "-c", ASK_BASH, "bash", str(script("bash", tmp_path)), line]) == expected


def test_bash_completes_the_value_after_an_equals_sign(tmp_path: Path) -> None:
    line = "netctl net create --encap=vx"
    assert offered(["bash", "-c", ASK_BASH, "bash", str(script("bash", tmp_path)), line]) == {"vxlan"}


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish(tmp_path: Path, line: str, expected: set[str]) -> None:
    assert offered(["fish", "--no-config", "-c", ASK_FISH, str(script("fish", tmp_path)), line]) == expected


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    subprocess.run(["zsh", "-fn", str(script("zsh", tmp_path))], check=True, timeout=60)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_is_filled_in(shell: str) -> None:
    text = completion_script(shell)
    assert "@" not in text.replace('"$@"', "").replace("[@]", "").replace("(@)", "")
    assert "rule-add" in text
