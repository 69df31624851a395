"""The log of both shims, and their installation and replacement."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.shims import CONFIG, AgentDouble, InstalledShim

from weft.cni import install, main, wire
from weft.lab.servers.processes import DEADLINE


class TestLog:
    def test_each_call_is_one_line(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """Contiv's file name, with the fields that an operator needs."""
        args = "IgnoreUnknown=1;K8S_POD_NAME=p"
        done = shim.call("ADD", args=args)
        shim.call("DEL", netns="")
        added, deleted = shim.logged()
        assert added == {
            "command": "ADD",
            "container": "c1",
            "ifname": "eth0",
            "netns": "/run/netns/a",
            "args": args,
            "exit": "0",
            "answer": done.stdout.decode().strip(),
        }
        assert (deleted["command"], deleted["netns"], deleted["answer"]) == ("DEL", "-", "-")

    def test_a_call_without_the_agent_is_logged_too(self, shim: InstalledShim) -> None:
        shim.call("ADD")
        (line,) = shim.logged()
        assert line["exit"] == "1"
        assert json.loads(line["answer"])["code"] == 11

    def test_a_value_cannot_inject_a_line(self, shim: InstalledShim, agent: AgentDouble) -> None:
        shim.call("ADD", args="A=b\n2026-01-01 forged exit=0", containerid="a b\x1b[31m", netns="/" + "n" * 100_000)
        (line,) = shim.logged()
        assert line["args"] == "A=b?2026-01-01?forged?exit=0"
        assert line["container"] == "a?b?[31m"
        assert len(line["netns"]) == 512

    def test_a_long_answer_is_truncated(self, shim: InstalledShim, agent: AgentDouble) -> None:
        agent.answer = lambda call: wire.Answer(exit_code=0, stdout=b"x" * 5_000)
        shim.call("ADD")
        assert shim.logged()[0]["answer"] == "x" * 1_024

    def test_a_full_log_is_rotated(self, shim: InstalledShim) -> None:
        """contiv 1.7: at 50 MiB."""
        shim.log.touch()
        os.truncate(shim.log, main.LOG_LIMIT - 1)
        shim.call("ADD")
        assert not shim.log.with_name("cni.log.old").exists()
        shim.call("ADD")
        assert shim.log.with_name("cni.log.old").stat().st_size > main.LOG_LIMIT
        assert len(shim.logged()) == 1

    def test_concurrent_calls_rotate_once(self, shim: InstalledShim) -> None:
        """No line is lost, and the rotated log is not replaced by a newer one."""
        shim.log.touch()
        os.truncate(shim.log, main.LOG_LIMIT)
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(lambda index: shim.call("ADD", containerid=f"c{index}"), range(48)))
        old = shim.log.with_name("cni.log.old").read_bytes()
        assert len(old) >= main.LOG_LIMIT
        lines = old[main.LOG_LIMIT :].splitlines() + shim.log.read_bytes().splitlines()
        found = {line.split(b"container=")[1].split()[0].decode() for line in lines}
        assert found == {f"c{index}" for index in range(48)}

    @pytest.mark.parametrize("log", ["", "/", "/nowhere/cni.log", "/dev/full"])
    def test_an_unwritable_log_is_no_error(self, shim: InstalledShim, agent: AgentDouble, log: str) -> None:
        done = shim.run(json.dumps(CONFIG).encode(), shim.environment("ADD") | {"WEFT_CNI_LOG": log})
        assert (done.returncode, done.stderr) == (0, b"")

    def test_a_log_pipe_without_a_reader_does_not_block(self, shim: InstalledShim, agent: AgentDouble) -> None:
        os.mkfifo(shim.log)
        assert shim.call("ADD").returncode == 0


def test_install_builds_the_c_shim_where_it_can(c_program: bytes, tmp_path: Path) -> None:
    """C-119. A second run changes nothing: the build is reproducible."""
    arguments = ["--bin-dir", str(tmp_path / "bin"), "--conf-dir", str(tmp_path / "net.d")]
    assert install.main(arguments) == 0
    program = tmp_path / "bin" / install.PROGRAM
    assert program.read_bytes().startswith(b"\x7fELF")
    inode = program.stat().st_ino
    assert install.main(arguments) == 0
    assert program.stat().st_ino == inode
    assert subprocess.run([program], env={}, capture_output=True, check=True, timeout=DEADLINE).stdout == b""


def test_the_program_can_be_replaced_while_it_runs(shim: InstalledShim, agent: AgentDouble) -> None:
    """C-119: never "text file busy", and a running shim completes with the old program."""
    called, replaced = threading.Event(), threading.Event()

    def wait_for_replacement(connection: socket.socket) -> None:
        called.set()
        assert replaced.wait(DEADLINE)
        agent.serve_one(connection)

    agent.serve = wait_for_replacement
    with ThreadPoolExecutor() as pool:
        running = pool.submit(shim.call, "ADD", containerid="old")
        assert called.wait(DEADLINE)
        shim.install(shim.program.read_bytes() + b"\n")
        replaced.set()
        assert shim.call("ADD", containerid="new").returncode == 0
        assert running.result(DEADLINE).returncode == 0
