"""The systemd units, understood by systemd and true to what the programs need; and the manifests for Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from weft import __version__
from weft.lab.waiting import DEADLINE

UNITS = sorted((ROOT / "packaging" / "systemd").glob("*.service"))
MANIFESTS = ROOT / "packaging" / "kubernetes"


def settings(unit: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in lines}


def test_there_is_a_unit_for_each_program() -> None:
    assert [unit.stem for unit in UNITS] == ["weft-netdns", "weft-netmaster", "weft-netplugin"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_crash_restarts_and_a_configuration_error_does_not(unit: Path) -> None:
    values = settings(unit)
    assert (values["Restart"], values["RestartPreventExitStatus"]) == ("on-failure", "22")
    assert values["NoNewPrivileges"] == "yes"


def test_stopping_the_agent_keeps_the_datapath() -> None:
    values = settings(UNITS[-1])
    assert (values["KillMode"], values["RuntimeDirectoryPreserve"]) == ("process", "yes")
    assert not [name for name in values if name.startswith(("Protect", "Private"))], "it would pin namespaces unseen"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"(?m)^ExecStart=.*$", "ExecStart=/bin/true", unit.read_text()))
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert unit.name not in done.stderr, done.stderr


def test_the_manifest_is_up_to_date() -> None:
    written = subprocess.run(
        [str(ROOT / "scripts" / "write-manifest")], capture_output=True, text=True, check=True, timeout=DEADLINE
    ).stdout
    assert (MANIFESTS / "weft.yaml").read_text() == written, "run: make docs"


def test_every_manifest_has_the_image_of_this_version() -> None:
    texts = [path.read_text() for path in MANIFESTS.glob("*.yaml")]
    images = {image for text in texts for image in re.findall(r"image: (\S+)", text)}
    assert images == {f"weft:{__version__}"}
    assert f"-t weft:{__version__} " in (ROOT / "packaging" / "Containerfile").read_text()
