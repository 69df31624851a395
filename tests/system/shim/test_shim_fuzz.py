"""The C shim, built with sanitizers, between a hostile agent and a hostile runtime: it ends, with sound memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from random import Random

import pytest
from tests.support.fuzz.mutations import Form, Mutator

from weft.cni import main, wire
from weft.lab.servers.processes import DEADLINE

SEED = int(os.environ.get("WEFT_FUZZ_SEED", "18"))
CONFIG = b'{"cniVersion":"1.0.0","name":"blue","type":"weft-cni","prevResult":{"ips":[]},"x":"\\"{[}]"}'
RESULT = b'{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[{"address":"10.1.0.5/24"}]}'
WORDS = (wire.MAGIC, b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\x80\0\0", b'"cniVersion":"', b"\\", b'"', b"%s%n", b"\0")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the C shim")
    output = tmp_path_factory.mktemp("build") / "shim"
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    command = [compiler, *sanitizers, "-o", str(output), str(Path(main.__file__).with_name("shim.c"))]
    if subprocess.run(command, check=False, capture_output=True, timeout=DEADLINE).returncode:
        pytest.skip("the C compiler has no sanitizers")
    return output


def receive(connection: socket.socket) -> None:
    """Read the call, so that closing the connection does not discard the answer."""
    with connection.makefile("rb") as file:
        file.read(wire.body_size(file.read(wire.HEADER_SIZE)))


# Runs of about 10 ms; a soak has many.
@pytest.mark.parametrize("inputs", [60, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_answer_and_no_configuration_breaks_the_shim(program: Path, tmp_path: Path, inputs: int) -> None:
    answers = Mutator([wire.encode_answer(wire.Answer(exit_code=code, stdout=RESULT)) for code in (0, 1)], words=WORDS)
    configs = Mutator([CONFIG], form=Form.JSON, words=WORDS)
    path = tmp_path / "cni.sock"
    environment = {
        "CNI_CONTAINERID": "c", "CNI_IFNAME": "eth0", "CNI_NETNS": "/x", "WEFT_CNI_SOCKET": str(path),
        "WEFT_CNI_LOG": str(tmp_path / "log"), "WEFT_CNI_DEADLINE_MS": "10000",
        # Its memory goes with the process, as its source says.
        "ASAN_OPTIONS": "detect_leaks=0",
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(DEADLINE)
        for number in range(inputs):
            rng = Random(f"shim:{SEED}:{number}")
            config, answer = configs.input(rng), answers.input(rng)
            command = rng.choice(("ADD", "DEL", "STATUS", "VERSION"))
            with subprocess.Popen(
                [program], env={**environment, "CNI_COMMAND": command, "CNI_ARGS": "%s" * rng.randrange(600)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ) as shim:  # fmt: skip
                assert shim.stdin is not None
                shim.stdin.write(config)
                shim.stdin.close()
                shim.stdin = None
                if command != "VERSION":
                    connection, _ = listener.accept()
                    with connection:
                        receive(connection)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)
                stdout, stderr = shim.communicate(timeout=DEADLINE)
            # A negative status is a signal; sanitizers report on stderr, where the shim itself writes nothing.
            assert (shim.returncode >= 0, stderr) == (True, b""), f"seed {SEED}, input {number}: {answer[:200]!r}"
            assert stdout or shim.returncode >= 0
