"""Answers of the agent, and the errors of both shims when it is unreachable, slow or dying."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.shims import CONFIG, SHORT_DEADLINE_MS, AgentDouble, InstalledShim, error_of

from weft.cni import main, wire
from weft.lab.servers.processes import DEADLINE


class TestAgentUnreachable:
    @pytest.mark.parametrize("verb", ["ADD", "DEL", "CHECK", "GC", "FROB"])
    def test_the_error_is_try_again_later_in_the_requested_version(self, shim: InstalledShim, verb: str) -> None:
        """C-050, C-068: code 11, so runtimes retry, DEL too."""
        error = error_of(shim.call(verb, CONFIG | {"cniVersion": "0.4.0"}))
        assert (error.code, error.version) == (11, "0.4.0")
        assert error.details == f"connecting to {shim.socket}: No such file or directory"

    def test_status_is_not_available(self, shim: InstalledShim) -> None:
        """C-090: the specification has a separate code for it."""
        assert error_of(shim.call("STATUS", CONFIG | {"cniVersion": "1.1.0"})).code == 50

    def test_a_socket_without_a_listener(self, shim: InstalledShim) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(shim.socket))
        error = error_of(shim.call("ADD"))
        assert (error.code, error.details) == (11, f"connecting to {shim.socket}: Connection refused")

    @pytest.mark.parametrize("path", ["/" + "x" * 200, '/no"such\\socket\n'])
    def test_any_path_gives_json(self, shim: InstalledShim, path: str) -> None:
        """C-003."""
        error = error_of(shim.run(b"{}", shim.environment("ADD") | {"WEFT_CNI_SOCKET": path}))
        assert error.code == 11

    @pytest.mark.parametrize(
        "config",
        [
            b'{"prevResult":{"cniVersion":"0.3.1"},"cniVersion":"1.0.0"}',
            b'{"a\\"":"\\\\","cniVersion" :\n "1.0.0"}',
            b'{"cniVersion":"1.0.0"',
            b'{"cniVersion":"1.0.0',
            b'{"cniVersion":"1.0.0\\',
            b'{"cniVersion":"0.2.0","cniVersion":"1.0.0"}',
            b'{"a":"cniVersion","b":"1.0.0"}',
            b'{"cniVersion":["1.0.0"]}',
            b'{"cniVersion":"1.0.0\\n"}',
            b'{"cniVersion":"' + b"1" * 32 + b'"}',
            b'{"cniVersion":"' + b"1" * 33 + b'"}',
            b'{"cniVersion"::"1.0.0"}',
            b'{"cniVersion":"1\x000"}',
            b'\x00{"cniVersion":"1.0.0"}',
            b'}{"cniVersion":"1.0.0"}',
            b"\xff\xfe",
            b"",
        ],
    )
    def test_both_shims_find_the_same_version(self, shim: InstalledShim, config: bytes) -> None:
        """C-043: the scanners in Python and in C agree."""
        expected = main.requested_version(config).decode() or "0.1.0"
        assert error_of(shim.call("ADD", config)).version == expected


class TestAgentFaults:
    def test_a_slow_agent_times_out_at_the_deadline(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-050."""

        hung_up = threading.Event()

        def wait_for_disconnect(connection: socket.socket) -> None:
            call = agent.receive(connection)
            assert 0 < call.deadline <= SHORT_DEADLINE_MS / 1000
            assert connection.recv(1) == b""
            hung_up.set()

        agent.serve = wait_for_disconnect
        error = error_of(shim.run(json.dumps(CONFIG).encode(), shim.short_deadline()))
        assert (error.code, error.version) == (11, "1.0.0")
        assert error.details == f"no answer from {shim.socket} within {SHORT_DEADLINE_MS} ms"
        assert hung_up.wait(DEADLINE)

    def test_a_slowly_sent_answer_does_not_extend_the_deadline(self, shim: InstalledShim, agent: AgentDouble) -> None:
        def trickle(connection: socket.socket) -> None:
            agent.receive(connection)
            frame = wire.encode_answer(wire.Answer(exit_code=0, stdout=b"{}" + b" " * 100_000))
            for index in range(len(frame)):
                try:
                    connection.sendall(frame[index : index + 1])
                except OSError:
                    return
                time.sleep(0.02)  # paces the bytes: the answer must trickle past the deadline

        agent.serve = trickle
        assert error_of(shim.run(json.dumps(CONFIG).encode(), shim.short_deadline())).code == 11

    def test_a_late_status_is_not_available(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-090."""

        def wait_for_disconnect(connection: socket.socket) -> None:
            agent.receive(connection)
            connection.recv(1)

        agent.serve = wait_for_disconnect
        error = error_of(shim.run(json.dumps(CONFIG).encode(), shim.short_deadline("STATUS")))
        assert error.code == 50

    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"WF",
            b"WFT1\0\0\0\x10",
            b'WFT1\0\0\0\x10\0{"cniVersion"',
            b"WFT2\0\0\0\x03\0{}",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"WFT1\0\0\0\0",
            b"WFT1\xff\xff\xff\xff\0{}",
        ],
    )
    def test_the_agent_dies_while_it_answers(self, shim: InstalledShim, agent: AgentDouble, sent: bytes) -> None:
        """C-003: never a partial result on stdout."""

        def die(connection: socket.socket) -> None:
            agent.receive(connection)
            connection.sendall(sent)

        agent.serve = die
        error = error_of(shim.call("ADD"))
        assert (error.code, error.details) == (11, f"incomplete answer from {shim.socket}")

    def test_the_agent_dies_before_it_answers(self, shim: InstalledShim, agent: AgentDouble) -> None:
        agent.serve = lambda connection: None
        error = error_of(shim.call("ADD", json.dumps(CONFIG).encode() + b" " * 8_000_000))
        assert error.code == 11

    def test_the_listen_queue_of_the_agent_is_full(self, shim: InstalledShim) -> None:
        """The shim waits for a busy agent until the deadline."""
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
            busy.bind(str(shim.socket))
            busy.listen(0)
            first.connect(str(shim.socket))
            error = error_of(shim.run(json.dumps(CONFIG).encode(), shim.short_deadline()))
        assert error.code == 11
        assert error.message == "the weft agent did not answer in time"


class TestAnswer:
    @pytest.mark.parametrize("exit_code", [0, 1, 2, 255])
    def test_exit_code_and_output_are_the_agents(self, shim: InstalledShim, agent: AgentDouble, exit_code: int) -> None:
        """C-002."""
        agent.answer = lambda call: wire.Answer(exit_code=exit_code, stdout=b'{"a":"\xc3\xa9\\u0000"}')
        done = shim.call("ADD")
        assert (done.returncode, done.stdout) == (exit_code, b'{"a":"\xc3\xa9\\u0000"}')

    def test_a_large_answer_is_printed_completely(self, shim: InstalledShim, agent: AgentDouble) -> None:
        answer = json.dumps({"filler": "x" * 3_000_000}).encode()
        agent.answer = lambda call: wire.Answer(exit_code=0, stdout=answer)
        assert shim.call("ADD").stdout == answer

    def test_an_unread_result_is_a_failure(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """The runtime must not treat a container as attached if it did not receive the result."""
        readable, writable = os.pipe()
        os.close(readable)
        try:
            done = subprocess.run(
                [shim.program], input=b"{}", stdout=writable, env=shim.environment("ADD"), check=False, timeout=DEADLINE
            )
        finally:
            os.close(writable)
        assert done.returncode == 1

    def test_concurrent_calls_get_their_own_results(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-017."""
        agent.answer = lambda call: wire.Answer(exit_code=0, stdout=call.environment["CNI_CONTAINERID"].encode())
        with ThreadPoolExecutor(max_workers=16) as pool:
            done = list(pool.map(lambda index: shim.call("ADD", containerid=f"c{index}"), range(64)))
        assert [each.stdout.decode() for each in done] == [f"c{index}" for index in range(64)]
        assert len(shim.logged()) == 64

    def test_the_agent_notices_a_killed_shim(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """So that the agent can undo an ADD whose result the runtime will never get."""
        received, hung_up = threading.Event(), threading.Event()

        def wait_for_disconnect(connection: socket.socket) -> None:
            agent.receive(connection)
            received.set()
            assert connection.recv(1) == b""
            hung_up.set()

        agent.serve = wait_for_disconnect
        with subprocess.Popen([shim.program], stdin=subprocess.DEVNULL, env=shim.environment("ADD")) as process:
            assert received.wait(DEADLINE)
            process.kill()
        assert hung_up.wait(DEADLINE)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "12345678", "1e3"])
def test_an_invalid_deadline_is_the_default(shim: InstalledShim, agent: AgentDouble, text: str) -> None:
    shim.run(json.dumps(CONFIG).encode(), shim.environment("ADD") | {"WEFT_CNI_DEADLINE_MS": text})
    assert 30 < agent.calls[0].deadline <= main.DEADLINE_MS / 1000
