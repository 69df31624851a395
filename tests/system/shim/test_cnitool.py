"""cnitool, the reference runtime, with both shims; our libcni must make exactly the same calls."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support.shims import AgentDouble, InstalledShim

from weft.cni.wire import Call
from weft.lab.cni.libcni import Libcni
from weft.lab.cni.network_lists import read_network
from weft.lab.cni.result_cache import Attachment, ResultCache
from weft.lab.servers.processes import DEADLINE

NETNS = "/proc/self/ns/net"


class Cnitool:
    """cnitool with a network of the test's own; the unique name separates its entries in cnitool's cache."""

    def __init__(self, program: str, shim: InstalledShim, folder: Path) -> None:
        self.folder = folder / "net.d"
        self.network = f"cnitool-{os.getpid()}-{folder.name}"[:60].strip("-_.")
        self._program = program
        self._environment = {
            **shim.settings,
            "CNI_PATH": str(shim.folder),
            "NETCONFPATH": str(self.folder),
            "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=p",
            "CAP_ARGS": json.dumps({"ips": ["10.1.0.5"], "dns": {}}),
        }
        plugin = {"type": "weft-cni", "capabilities": {"ips": True, "mac": True}, "colour": {"deep": [1]}}
        network = {"cniVersion": "1.0.0", "cniVersions": ["1.1.0"], "name": self.network, "plugins": [plugin]}
        self.folder.mkdir()
        (self.folder / "10.conflist").write_text(json.dumps(network))

    def run(self, verb: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._program, verb, self.network, NETNS],
            env=self._environment,
            capture_output=True,
            check=False,
            timeout=DEADLINE,
        )


def received(calls: list[Call]) -> list[tuple[dict[str, str], object]]:
    """The calls that the agent received. libcni adds `capabilities` (cni 4), older ones an empty `dns` (C-133)."""
    configs = [json.loads(call.stdin) for call in calls]
    for config in configs:
        config.pop("capabilities", None)
        if "prevResult" in config and config["prevResult"].get("dns") == {}:
            del config["prevResult"]["dns"]
    return [(dict(call.environment), config) for call, config in zip(calls, configs, strict=True)]


async def test_cnitool_and_our_libcni_make_the_same_calls(
    cnitool: str, shim: InstalledShim, agent: AgentDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-026, C-095, C-110 to C-113, C-116, C-117."""
    tool = Cnitool(cnitool, shim, tmp_path)
    added = tool.run("add")
    assert (added.returncode, added.stderr) == (0, b"")
    assert json.loads(added.stdout)["ips"][0]["address"] == "10.1.0.5/24"
    again = tool.run("add")
    assert again.returncode == 1
    assert b"already attached" in again.stdout + again.stderr
    for verb in ("check", "del", "del"):
        done = tool.run(verb)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    theirs, agent.calls = agent.calls, []

    for name, value in shim.settings.items():
        monkeypatch.setenv(name, value)
    libcni = Libcni(search_path=[shim.folder], cache=ResultCache(tmp_path / "cache"))
    network = read_network(tool.folder, tool.network)
    attachment = Attachment(
        container=theirs[0].environment["CNI_CONTAINERID"],
        netns=NETNS,
        args=(("IgnoreUnknown", "1"), ("K8S_POD_NAME", "p")),
        capabilities={"ips": ["10.1.0.5"], "dns": {}},
    )
    await libcni.add(network, attachment)
    with pytest.raises(Exception, match="already attached"):
        await libcni.add(network, attachment)
    await libcni.check(network, attachment)
    await libcni.delete(network, attachment)
    await libcni.delete(network, attachment)
    assert received(agent.calls) == received(theirs)


def test_cnitool_status_and_gc(cnitool: str, shim: InstalledShim, agent: AgentDouble, tmp_path: Path) -> None:
    """C-090, C-097: its GC detaches the cached attachments itself and sends no list."""
    tool = Cnitool(cnitool, shim, tmp_path)
    status = tool.run("status")
    assert b"the double is not ready" in status.stderr + status.stdout
    assert tool.run("add").returncode == 0
    assert tool.run("status").returncode == 0
    assert tool.run("gc").returncode == 0
    verbs = [call.environment["CNI_COMMAND"] for call in agent.calls]
    assert verbs == ["STATUS", "ADD", "STATUS", "DEL", "GC"]
    assert b"cni.dev" not in agent.calls[-1].stdin
    assert agent.attached == {}
