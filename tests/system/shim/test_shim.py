"""Input of both shims: verbs, versions, environment and configuration."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.shims import CONFIG, AgentDouble, InstalledShim, double_result, error_of

from weft.cni import install
from weft.cni.errors import CniError, Code
from weft.cni.request import AttachmentId
from weft.cni.result import encode_result
from weft.cni.versions import SUPPORTED, SpecVersion, encode_versions
from weft.lab.cni.libcni import Libcni
from weft.lab.cni.network_lists import parse_list
from weft.lab.cni.result_cache import Attachment, ResultCache
from weft.lab.servers.processes import DEADLINE


class TestVerbs:
    async def test_all_six_verbs_through_a_runtime(
        self, shim: InstalledShim, agent: AgentDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C-001, C-003, C-081, C-090, C-093, C-098: the verbs of a pod's lifecycle."""
        for name, value in shim.settings.items():
            monkeypatch.setenv(name, value)
        libcni = Libcni(search_path=[shim.folder], cache=ResultCache(tmp_path / "cache"))
        pod = Attachment(container="c1", netns="/run/netns/a", args=(("IgnoreUnknown", "1"), ("K8S_POD_NAME", "p")))
        plugin = {"type": "weft-cni", "capabilities": {"ips": True}}
        blue = parse_list(json.dumps({"cniVersion": "1.1.0", "name": "blue", "plugins": [plugin]}).encode())
        assert await libcni.versions("weft-cni") == SUPPORTED
        with pytest.raises(CniError) as away:
            await libcni.status(blue)
        assert away.value.code == Code.UNAVAILABLE
        assert await libcni.add(blue, pod) == double_result("/run/netns/a")
        await libcni.status(blue)
        await libcni.check(blue, pod)
        with pytest.raises(CniError, match="already attached"):
            await libcni.add(blue, pod)
        await libcni.gc(blue, [AttachmentId("c1", "eth0")])
        await libcni.check(blue, pod)
        agent.attached.clear()
        with pytest.raises(CniError, match="gone"):
            await libcni.check(blue, pod)
        await libcni.delete(blue, pod)
        await libcni.delete(blue, pod)
        verbs = [line["command"] for line in shim.logged()]
        assert verbs == ["VERSION", "STATUS", "ADD", "STATUS", "CHECK", "ADD", "GC", "CHECK", "CHECK", "DEL", "DEL"]

    @pytest.mark.parametrize("version", SUPPORTED)
    def test_each_version_gets_its_own_result_format(
        self, shim: InstalledShim, agent: AgentDouble, version: SpecVersion
    ) -> None:
        """C-043, C-093, P-03."""
        done = shim.call("ADD", CONFIG | {"cniVersion": version})
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == encode_result(double_result("/run/netns/a"), version)
        assert shim.call("DEL", CONFIG | {"cniVersion": version}).returncode == 0

    @pytest.mark.parametrize("verb", ["DEL", "CHECK", "GC", "STATUS"])
    def test_success_of_other_verbs_is_silent(self, shim: InstalledShim, agent: AgentDouble, verb: str) -> None:
        """C-003, C-081."""
        config = CONFIG | {"cniVersion": "1.1.0"}
        added = shim.call("ADD", config)
        done = shim.call(verb, config | {"prevResult": json.loads(added.stdout)})
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_the_other_program_names_are_the_same_plugin(self, shim: InstalledShim, agent: AgentDouble) -> None:
        for name in install.ALIASES:
            shim.program = shim.folder / name
            assert shim.call("ADD", containerid=name).returncode == 0
        assert {attachment.container for attachment in agent.attached} == set(install.ALIASES)

    def test_without_a_command_it_prints_its_version(self, shim: InstalledShim) -> None:
        """C-014."""
        done = shim.run(b"", {})
        assert (done.returncode, done.stdout) == (0, b"")
        assert all(version.encode() in done.stderr for version in SUPPORTED)


class TestVersion:
    """VERSION needs neither agent nor configuration."""

    @pytest.mark.parametrize("stdin", [b"", b'{"cniVersion":"1.0.0"}', b'{"cniVersion":"0.2.0","x":[]}', b"{", b"\xff"])
    def test_version_needs_no_agent(self, shim: InstalledShim, stdin: bytes) -> None:
        """C-008, C-093, C-094."""
        done = shim.run(stdin, shim.environment("VERSION", netns="dummy", ifname="dummy", path="dummy"))
        assert (done.returncode, done.stdout) == (0, encode_versions(stdin))

    def test_version_does_not_wait_for_an_open_stdin(self, shim: InstalledShim) -> None:
        """C-008."""
        done = shim.run_with_open_stdin(b'{"cniVersion":"0.4.0"}', shim.environment("VERSION"))
        assert json.loads(done.stdout)["cniVersion"] == "0.4.0"

    def test_version_needs_no_stdin(self, shim: InstalledShim) -> None:
        done = subprocess.run(
            ["sh", "-c", 'exec "$0" <&-', shim.program],
            env=shim.environment("VERSION"),
            capture_output=True,
            check=False,
            timeout=DEADLINE,
        )
        assert (done.returncode, json.loads(done.stdout)["cniVersion"]) == (0, "1.1.0")


class TestRequest:
    def test_the_agent_gets_the_unmodified_request(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-001, C-018: every CNI_ variable and no other, stdin byte for byte, and the remaining time."""
        environment = shim.environment("ADD", args="IgnoreUnknown=1;A=b=c", new="") | {
            "TRACEPARENT": "00-1",
            "HOME": "/",
        }
        stdin = json.dumps(CONFIG, indent=2).encode() + b"\n\n"
        assert shim.run(stdin, environment).returncode == 0
        (call,) = agent.calls
        assert call.environment == {name: value for name, value in environment.items() if name.startswith("CNI_")}
        assert call.stdin == stdin
        assert 0 < call.deadline <= 60

    def test_invalid_utf_8_is_passed_unmodified(self, shim: InstalledShim, agent: AgentDouble) -> None:
        assert shim.call("ADD", netns="/run/netns/\udcff").returncode == 0
        assert agent.calls[0].environment["CNI_NETNS"] == "/run/netns/\udcff"

    @pytest.mark.parametrize(
        ("verb", "changes", "named"),
        [
            ("ADD", {"containerid": "", "netns": "", "ifname": ""}, ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
            ("DEL", {"containerid": "", "ifname": ""}, ["CNI_CONTAINERID", "CNI_IFNAME"]),
            ("GC", {"path": ""}, ["CNI_PATH"]),
            ("FROB", {}, ["CNI_COMMAND"]),
            ("ADD", {"containerid": "../x"}, ["CNI_CONTAINERID"]),
            ("ADD", {"ifname": "a/b"}, ["CNI_IFNAME"]),
            ("ADD", {"args": "A"}, ["CNI_ARGS"]),
        ],
    )
    def test_a_bad_environment_is_code_4(
        self, shim: InstalledShim, agent: AgentDouble, verb: str, changes: dict[str, str], named: list[str]
    ) -> None:
        """C-004, C-005, C-006, C-007, C-009, C-010, C-011, C-016, C-070."""
        error = error_of(shim.call(verb, CONFIG | {"cniVersion": "1.1.0"}, **changes))
        assert (error.code, error.version) == (4, "1.1.0")
        assert all(name in error.message for name in named)

    @pytest.mark.parametrize("stdin", [b"", b"garbage", b"{", b"[1]", b"\x00\xff" * 1000, b"{" * 200_000])
    def test_garbage_is_code_6(self, shim: InstalledShim, agent: AgentDouble, stdin: bytes) -> None:
        """C-013."""
        for verb in ("ADD", "DEL"):
            error = error_of(shim.call(verb, stdin))
            assert (error.code, error.version) == (6, "0.1.0")

    def test_bad_configurations_have_their_codes(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-012, C-024, C-025."""
        assert error_of(shim.call("ADD", CONFIG | {"name": "a/b"})).code == 7
        assert error_of(shim.call("ADD", CONFIG | {"cniVersion": "9.9.9"})).code == 1
        done = shim.call("ADD", {"name": "blue", "type": "weft-cni"})
        assert json.loads(done.stdout)["cniVersion"] == "0.1.0"

    def test_a_large_configuration_passes(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """A node with thousands of attachments sends them all to GC."""
        valid = [{"containerID": f"c{index}", "ifname": "eth0"} for index in range(50_000)]
        done = shim.call("GC", CONFIG | {"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid})
        assert (done.returncode, done.stdout) == (0, b"")
        assert len(agent.calls[0].stdin) > 2_000_000

    def test_an_endless_configuration_is_code_6(self, shim: InstalledShim, agent: AgentDouble) -> None:
        with Path("/dev/zero").open("rb") as endless:
            done = shim.run(endless.fileno(), shim.environment("ADD"))
        assert error_of(done).code == 6
        assert agent.calls == []

    def test_a_stdin_that_cannot_be_read_is_code_5(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-013."""
        unreadable = os.open("/dev/null", os.O_WRONLY)
        try:
            done = shim.run(unreadable, shim.environment("ADD"))
        finally:
            os.close(unreadable)
        error = error_of(done)
        assert (error.code, error.details) == (5, "Bad file descriptor")

    def test_a_stdin_that_does_not_end_is_code_5_at_the_deadline(self, shim: InstalledShim, agent: AgentDouble) -> None:
        """C-013: every wait has a deadline."""
        done = shim.run_with_open_stdin(b'{"cniVersion":"0.4.0",', shim.short_deadline())
        error = error_of(done)
        assert (error.code, error.version) == (5, "0.4.0")
