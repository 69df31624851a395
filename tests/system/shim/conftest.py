"""Both shims, installed, and a double of the agent."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.shims import AgentDouble, InstalledShim

from weft.cni import install, main
from weft.lab.servers.processes import DEADLINE


@pytest.fixture(scope="session")
def c_program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The C shim, which must compile without a warning."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the C shim")
    output = tmp_path_factory.mktemp("build") / "shim"
    source = Path(main.__file__).with_name("shim.c")
    command = [compiler, "-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror", "-o", str(output), str(source)]
    subprocess.run(command, check=True, timeout=DEADLINE)
    return output.read_bytes()


@pytest.fixture(params=["python", "c"])
def shim(request: pytest.FixtureRequest, tmp_path: Path) -> InstalledShim:
    if request.param == "c":
        program: bytes = request.getfixturevalue("c_program")
    else:
        program = install.build_program("python", python="/usr/bin/python3")
    return InstalledShim(program, tmp_path)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentDouble]:
    with AgentDouble(tmp_path / "cni.sock") as double:
        yield double
