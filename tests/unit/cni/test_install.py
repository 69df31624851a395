"""`weft install-cni` with the Python shim; tests/system/shim/test_shim_log.py installs the other and calls both."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from weft.cni.install import ALIASES, PROGRAM, build_program, main
from weft.cni.request import is_name
from weft.lab.cni.network_lists import parse_list, parse_single
from weft.lab.waiting import DEADLINE

NAMES = {PROGRAM, *ALIASES}


class Machine:
    """Folders to install into, and the command."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.conf = folder / "net.d"

    def run(self, *arguments: str, shim: str = "python") -> int:
        return main(["--bin-dir", str(self.bin), "--conf-dir", str(self.conf), "--shim", shim, *arguments])

    def files(self) -> dict[str, tuple[int, int]]:
        """Each file with its inode and time of change: nothing was written when they are the same."""
        found = (path.lstat() for path in self.paths())
        return {path.name: (stat.st_ino, stat.st_mtime_ns) for path, stat in zip(self.paths(), found, strict=True)}

    def paths(self) -> list[Path]:
        return sorted(path for folder in (self.bin, self.conf) if folder.exists() for path in folder.iterdir())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_plugin_answers_to_four_names(machine: Machine) -> None:
    assert machine.run() == 0
    assert {path.name for path in machine.bin.iterdir()} == NAMES
    assert all(os.access(path, os.X_OK) for path in machine.bin.iterdir())
    assert (machine.bin / "contivk8s").read_bytes().startswith(b"#!/usr/bin/python3 -IS")


def test_the_configuration_is_a_list_that_runtimes_can_read(machine: Machine) -> None:
    machine.run("--network", "blue")
    (path,) = machine.conf.iterdir()
    network = parse_list(path.read_bytes(), folder=machine.conf)
    assert (path.name, network.name, network.version) == ("10-weft.conflist", "blue", "1.1.0")
    assert network.plugins[0].type == PROGRAM
    wanted = {"ips", "mac", "dns", "aliases", "bandwidth", "portMappings"}
    assert wanted <= network.plugins[0].capabilities
    assert json.loads(path.read_bytes())["cniVersion"] == "1.0.0"
    assert is_name(network.name)


def test_contivs_own_configuration_can_be_had(machine: Machine) -> None:
    """contiv 1.7."""
    assert machine.run("--config", "contiv") == 0
    (path,) = machine.conf.iterdir()
    network = parse_single(path.read_bytes())
    assert (path.name, network.name, network.version) == ("1-contiv.conf", "contiv-net", "0.3.1")
    assert network.plugins[0].type == "contivk8s"


def test_without_configuration_only_programs_are_installed(machine: Machine) -> None:
    assert machine.run("--config", "none") == 0
    assert {path.name for path in machine.paths()} == NAMES


def test_a_second_run_changes_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.run()
    before = machine.files()
    capsys.readouterr()
    assert machine.run() == 0
    assert machine.files() == before
    assert capsys.readouterr().out.count("unchanged") == 5


def test_an_older_shim_of_ours_is_replaced(machine: Machine) -> None:
    machine.run()
    program = machine.bin / PROGRAM
    program.write_bytes(program.read_bytes() + b"# an older one\n")
    assert machine.run() == 0
    assert b"an older one" not in program.read_bytes()


def test_foreign_programs_are_not_replaced(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.bin.mkdir(parents=True)
    (machine.bin / "contivk8s").write_text("the original")
    (machine.bin / "kuryr-cni").symlink_to("/usr/bin/true")
    assert machine.run() == 2
    assert {path.name for path in machine.paths()} == {"contivk8s", "kuryr-cni"}
    error = capsys.readouterr().err
    assert "contivk8s" in error
    assert "kuryr-cni" in error
    assert machine.run("--force") == 0
    assert (machine.bin / "contivk8s").readlink() == Path(PROGRAM)


def test_a_foreign_configuration_is_not_replaced(machine: Machine) -> None:
    machine.conf.mkdir(parents=True)
    foreign = machine.conf / "10-weft.conflist"
    foreign.write_text('{"name": "x", "plugins": [{"type": "bridge"}]}')
    assert machine.run() == 2
    assert machine.paths() == [foreign]
    assert machine.run("--force") == 0
    assert PROGRAM in foreign.read_text()


def test_an_edited_configuration_is_kept(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.run()
    path = machine.conf / "10-weft.conflist"
    edited = path.read_text().replace('"weft"', '"mine"')
    path.write_text(edited)
    assert machine.run() == 0
    assert path.read_text() == edited
    assert f"kept {path}" in capsys.readouterr().out
    machine.run("--force")
    assert path.read_text() != edited


@pytest.mark.parametrize("name", ["10-weft.conflist", "20-other.conflist"])
def test_a_chain_that_cannot_work_is_refused(machine: Machine, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """P-51, P-52: beside us, `portmap` and `bandwidth` would do nothing, and say nothing."""
    machine.conf.mkdir(parents=True)
    chained = machine.conf / name
    chained.write_text('{"name": "x", "plugins": [{"type": "weft-cni"}, {"type": "portmap"}, {"type": "bandwidth"}]}')
    assert machine.run() == 2
    assert f"{chained} chains portmap and bandwidth" in capsys.readouterr().err
    assert machine.paths() == [chained]
    assert machine.run("--force") == (0 if name == "10-weft.conflist" else 2)


def test_uninstall_removes_what_is_ours_and_only_that(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.run()
    machine.run("--config", "contiv")
    for path in (machine.bin / "bridge", machine.conf / "99-other.conf"):
        path.write_text("theirs")
    (machine.bin / "netcontiv").unlink()
    (machine.bin / "netcontiv").write_text("theirs")
    assert machine.run("--uninstall") == 0
    assert {path.name for path in machine.paths()} == {"bridge", "netcontiv", "99-other.conf"}
    assert f"kept {machine.bin / 'netcontiv'}: not ours" in capsys.readouterr().out
    assert machine.run("--uninstall") == 0


def test_uninstall_where_nothing_is_succeeds(machine: Machine) -> None:
    assert machine.run("--uninstall") == 0


def test_a_prebuilt_program_can_be_installed(machine: Machine, tmp_path: Path) -> None:
    built = tmp_path / "shim"
    built.write_bytes(build_program("python", python="/usr/bin/python3"))
    assert machine.run(shim=str(built)) == 0
    (tmp_path / "else").write_bytes(b"\x7fELF")
    assert machine.run(shim=str(tmp_path / "else")) == 2
    assert machine.run(shim=str(tmp_path / "nothing")) == 2


@pytest.mark.parametrize("folder", ["", "a-folder-whose-name-leaves-no-room-for-more-on-a-first-line"])
def test_another_python_can_be_named(machine: Machine, folder: str) -> None:
    """A kernel takes so much of the first line and no more."""
    with tempfile.TemporaryDirectory(prefix="w") as short:
        python = Path(short, folder, "python3")
        python.parent.mkdir(exist_ok=True)
        python.symlink_to("/usr/bin/python3")
        assert machine.run("--python", str(python)) == 0
        program = (machine.bin / PROGRAM).read_bytes()
        first = program.partition(b"\n")[0]
        assert first.startswith(f"#!{python} -IS".encode())
        assert len(first) < 127
        assert "supportedVersions" in _version_of(program, machine.bin)


def _version_of(program: bytes, folder: Path) -> str:
    """What a shim says when it is asked for its versions."""
    file = folder / PROGRAM
    file.write_bytes(program)
    file.chmod(0o755)
    own = {"CNI_COMMAND": "VERSION", "WEFT_CNI_LOG": ""}
    done = subprocess.run([file], input=b"{}", capture_output=True, check=True, timeout=DEADLINE, env=own)
    return done.stdout.decode()


def test_the_python_shim_comes_compiled_and_another_python_finds_its_source(tmp_path: Path) -> None:
    """A machine's Python may be another after an upgrade, and what was compiled for the old one would kill it."""
    program = build_program("python", python="/usr/bin/python3")
    assert build_program("python", python="/usr/bin/python3") == program
    before, known, after = program.partition(b"MAGIC_NUMBER == b'")
    assert known
    assert _version_of(before + known + b"another" + after, tmp_path) == _version_of(program, tmp_path)


def test_a_python_that_cannot_compile_gets_the_source(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    first, _, rest = build_program("python", python=str(python)).partition(b"\n")
    assert first == f"#!{python} -IS".encode()
    assert "supportedVersions" in _version_of(b"#!/usr/bin/python3 -IS\n" + rest, tmp_path)


def test_without_compiler_and_python_it_says_what_to_give(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.run("--python", str(tmp_path / "python3"), shim="auto") == 2
    assert "give --python or --shim" in capsys.readouterr().err
    assert machine.run(shim="c") == 2
    assert "there is no C compiler" in capsys.readouterr().err
    assert machine.paths() == []


def test_without_compiler_the_python_shim_is_installed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.run(shim="auto") == 0
    assert (machine.bin / PROGRAM).read_bytes().startswith(b"#!")


def test_a_compiler_that_fails_is_not_the_end(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without a static C library gets the Python shim."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho cannot find -lc >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.run(shim="auto") == 0
    assert "(Python)" in capsys.readouterr().out
    assert machine.run(shim="c") == 2
    assert "cannot find -lc" in capsys.readouterr().err
