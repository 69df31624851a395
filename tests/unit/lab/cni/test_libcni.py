"""What a runtime does with plugins, seen from the plugins."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weft.cni.errors import CniError, Code
from weft.cni.request import AttachmentId
from weft.cni.result import Result
from weft.lab.cni.libcni import LOOPBACK, Libcni, Output, execute_here
from weft.lab.cni.network_lists import NetworkList, parse_list
from weft.lab.cni.result_cache import Attachment, ResultCache

POD = Attachment(container="c1", netns="/run/netns/a", args=(("IgnoreUnknown", "1"), ("K8S_POD_NAME", "p")))


class Called(NamedTuple):
    """One call as a plugin saw it."""

    kind: str
    environment: Mapping[str, str]
    config: dict[str, Any]

    @property
    def verb(self) -> str:
        return self.environment["CNI_COMMAND"]


def a_result(call: Called) -> Output:
    """ADD adds an interface named after the plugin to what came before; other verbs succeed in silence."""
    if call.verb != "ADD":
        return Output(0, b"", b"")
    before = call.config.get("prevResult", {}).get("interfaces", [])
    return Output(0, json.dumps({"interfaces": [*before, {"name": call.kind}]}).encode(), b"")


class Plugins:
    """Plugins in this process that record their calls and reply with given results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[Called] = []
        self.answer: Callable[[Called], Output] = a_result
        for kind in ("one", "two", "three", "loopback"):
            (folder / kind).touch(mode=0o755)

    async def __call__(self, program: Path, *, environment: Mapping[str, str], stdin: bytes) -> Output:
        call = Called(program.name, environment, json.loads(stdin))
        self.calls.append(call)
        return self.answer(call)

    def take(self) -> list[Called]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def plugins(tmp_path: Path) -> Plugins:
    (tmp_path / "bin").mkdir()
    return Plugins(tmp_path / "bin")


@pytest.fixture
def cache(tmp_path: Path) -> ResultCache:
    return ResultCache(tmp_path / "cache")


@pytest.fixture
def libcni(plugins: Plugins, cache: ResultCache, tmp_path: Path) -> Libcni:
    return Libcni(search_path=[tmp_path, plugins.folder], cache=cache, execute=plugins)


def network(version: str = "1.1.0", **members: object) -> NetworkList:
    full = {"cniVersion": version, "name": "blue", "plugins": [{"type": "one"}, {"type": "two"}, {"type": "three"}]}
    return parse_list(json.dumps(full | members).encode())


def failing(kind: str, error: CniError) -> Callable[[Called], Output]:
    def answer(call: Called) -> Output:
        return Output(1, error.encode(version="1.1.0"), b"") if call.kind == kind else a_result(call)

    return answer


def names(result: Result) -> list[str]:
    return [interface.name for interface in result.interfaces]


class TestAdd:
    async def test_plugins_are_called_in_order_with_the_previous_result(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-110, C-120: none for the first; a result without version is of the list's."""
        assert names(await libcni.add(network(), POD)) == ["one", "two", "three"]
        assert [call.kind for call in plugins.calls] == ["one", "two", "three"]
        assert [call.config.get("prevResult") for call in plugins.calls] == [
            None,
            {"cniVersion": "1.1.0", "interfaces": [{"name": "one"}]},
            {"cniVersion": "1.1.0", "interfaces": [{"name": "one"}, {"name": "two"}]},
        ]

    async def test_the_environment_is_that_of_the_specification(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-001, C-005."""
        await libcni.add(network(), POD)
        environment = dict(plugins.calls[0].environment)
        path = environment.pop("CNI_PATH").split(":")
        assert path[-1] == str(plugins.folder)
        assert environment == {
            "CNI_COMMAND": "ADD",
            "CNI_CONTAINERID": "c1",
            "CNI_NETNS": "/run/netns/a",
            "CNI_IFNAME": "eth0",
            "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=p",
        }

    async def test_the_first_error_aborts_it(self, libcni: Libcni, plugins: Plugins, cache: ResultCache) -> None:
        """C-110."""
        plugins.answer = failing("two", CniError(Code.TRY_LATER, "not yet"))
        with pytest.raises(CniError, match="not yet") as failed:
            await libcni.add(network(), POD)
        assert failed.value.code == Code.TRY_LATER
        assert [call.kind for call in plugins.calls] == ["one", "two"]
        assert cache.read("blue", POD) is None

    async def test_the_request_has_the_members_of_plugin_and_runtime(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-022, C-023, C-112: `capabilities` and members that only a runtime may set do not get through."""
        written = {"type": "one", "colour": "blue", "capabilities": {"mac": True}}
        reserved = {"prevResult": {}, "runtimeConfig": {"ips": []}, "cni.dev/attachments": []}
        await libcni.add(network(plugins=[written | reserved]), POD)
        assert plugins.calls[0].config == {"type": "one", "colour": "blue", "name": "blue", "cniVersion": "1.1.0"}

    async def test_a_plugin_gets_the_capabilities_it_declares(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-113."""
        capabilities = {"mac": True, "ips": True, "dns": False}
        pod = Attachment(
            container="c1", netns="/run/netns/a", capabilities={"mac": "02:00:00:00:00:01", "dns": {}, "bandwidth": {}}
        )
        await libcni.add(network(plugins=[{"type": "one", "capabilities": capabilities}, {"type": "two"}]), pod)
        assert plugins.calls[0].config["runtimeConfig"] == {"mac": "02:00:00:00:00:01"}
        assert "runtimeConfig" not in plugins.calls[1].config

    async def test_a_null_result_is_tolerated(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-120."""
        plugins.answer = lambda call: Output(0, b"null", b"")
        assert await libcni.add(network(plugins=[{"type": "one"}]), POD) == Result()

    @pytest.mark.parametrize("stdout", [b"", b"{", b"[]", b"{}{}"])
    async def test_a_result_that_cannot_be_read_is_an_error(
        self, libcni: Libcni, plugins: Plugins, stdout: bytes
    ) -> None:
        """C-003."""
        plugins.answer = lambda call: Output(0, stdout, b"")
        with pytest.raises(CniError) as failed:
            await libcni.add(network(), POD)
        assert failed.value.code == Code.NOT_DECODED

    async def test_stderr_is_the_message_when_stdout_is_empty(self, libcni: Libcni, plugins: Plugins) -> None:
        """cni 4."""
        plugins.answer = lambda call: Output(3, b"", b"it broke\n")
        with pytest.raises(CniError, match="plugin one failed; it broke"):
            await libcni.add(network(), POD)

    async def test_a_missing_plugin_is_an_error(self, libcni: Libcni) -> None:
        with pytest.raises(CniError, match="no plugin four"):
            await libcni.add(network(plugins=[{"type": "four"}]), POD)

    async def test_lo_comes_before_eth0(self, libcni: Libcni, plugins: Plugins) -> None:
        """As CRI runtimes do; detaching goes backwards."""
        single = network(plugins=[{"type": "one"}])
        networks = [LOOPBACK, single, network(name="red", plugins=[{"type": "two"}])]
        await libcni.add_pod(networks, POD)
        called = [(call.kind, call.environment["CNI_IFNAME"]) for call in plugins.take()]
        assert called == [("loopback", "lo"), ("one", "eth0"), ("two", "eth1")]
        await libcni.delete_pod(networks, POD)
        assert [(call.kind, call.environment["CNI_IFNAME"]) for call in plugins.take()] == called[::-1]


class TestDelete:
    async def test_the_last_plugin_is_first_and_all_get_the_final_result(
        self, libcni: Libcni, plugins: Plugins, cache: ResultCache
    ) -> None:
        """C-111, C-116."""
        await libcni.add(network(), POD)
        plugins.take()
        await libcni.delete(network(), POD)
        assert [(call.verb, call.kind) for call in plugins.calls] == [("DEL", "three"), ("DEL", "two"), ("DEL", "one")]
        for call in plugins.calls:
            assert [each["name"] for each in call.config["prevResult"]["interfaces"]] == ["one", "two", "three"]
        assert cache.read("blue", POD) is None

    async def test_old_versions_get_no_result(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-111: it came with 0.4.0."""
        await libcni.add(network("0.3.1"), POD)
        plugins.take()
        await libcni.delete(network("0.3.1"), POD)
        assert not any("prevResult" in call.config for call in plugins.calls)

    async def test_it_works_without_a_readable_cache(self, libcni: Libcni, plugins: Plugins, tmp_path: Path) -> None:
        """C-116, C-064."""
        await libcni.delete(network(), POD)
        await libcni.add(network(), POD)
        (tmp_path / "cache" / "results" / "blue-c1-eth0").write_text("{")
        plugins.take()
        await libcni.delete(network(), POD)
        assert [call.kind for call in plugins.calls] == ["three", "two", "one"]
        assert not any("prevResult" in call.config for call in plugins.calls)

    async def test_a_failed_one_stays_cached(self, libcni: Libcni, plugins: Plugins, cache: ResultCache) -> None:
        await libcni.add(network(), POD)
        plugins.answer = failing("two", CniError(Code.TRY_LATER, "not yet"))
        with pytest.raises(CniError):
            await libcni.delete(network(), POD)
        assert cache.read("blue", POD) is not None


class TestCheck:
    async def test_plugins_are_called_in_order_with_the_final_result(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-111."""
        await libcni.add(network(), POD)
        plugins.take()
        await libcni.check(network(), POD)
        assert [(call.verb, call.kind) for call in plugins.calls] == [
            ("CHECK", "one"),
            ("CHECK", "two"),
            ("CHECK", "three"),
        ]
        assert all(len(call.config["prevResult"]["interfaces"]) == 3 for call in plugins.calls)

    async def test_it_can_be_disabled(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-111."""
        await libcni.check(network(disableCheck=True), POD)
        assert plugins.calls == []

    async def test_old_versions_do_not_have_it(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-080."""
        with pytest.raises(CniError) as failed:
            await libcni.check(network("0.3.1"), POD)
        assert failed.value.code == Code.INCOMPATIBLE_VERSION
        assert plugins.calls == []

    async def test_it_needs_the_cache(self, libcni: Libcni, plugins: Plugins, tmp_path: Path) -> None:
        """C-116."""
        with pytest.raises(CniError):
            await libcni.check(network(), POD)
        await libcni.add(network(), POD)
        (tmp_path / "cache" / "results" / "blue-c1-eth0").write_text("{")
        with pytest.raises(CniError):
            await libcni.check(network(), POD)
        assert {call.verb for call in plugins.calls} == {"ADD"}


class TestGc:
    async def attach(self, libcni: Libcni, plugins: Plugins, *containers: str, to: NetworkList) -> None:
        for container in containers:
            await libcni.add(to, Attachment(container=container, netns="/run/netns/a"))
        plugins.take()

    async def test_cached_attachments_that_are_not_valid_are_detached_first(
        self, libcni: Libcni, plugins: Plugins
    ) -> None:
        """C-117, C-095: then each plugin gets the list, under both spellings."""
        single = network(plugins=[{"type": "one"}])
        await self.attach(libcni, plugins, "c1", "c2", "c3", to=single)
        await self.attach(libcni, plugins, "c9", to=network(name="red", plugins=[{"type": "one"}]))
        await libcni.gc(single, [AttachmentId("c2", "eth0"), AttachmentId("c3", "eth1")])
        assert [(call.verb, call.environment["CNI_CONTAINERID"]) for call in plugins.calls] == [
            ("DEL", "c1"),
            ("DEL", "c3"),
            ("GC", ""),
        ]
        listed = [{"containerID": "c2", "ifname": "eth0"}, {"containerID": "c3", "ifname": "eth1"}]
        config = plugins.calls[-1].config
        assert config["cni.dev/valid-attachments"] == config["cni.dev/attachments"] == listed

    async def test_without_a_list_all_is_detached_and_plugins_get_none(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-097: as cnitool does."""
        single = network(plugins=[{"type": "one"}])
        await self.attach(libcni, plugins, "c1", to=single)
        await libcni.gc(single, None)
        assert [call.verb for call in plugins.calls] == ["DEL", "GC"]
        assert not any(name.startswith("cni.dev/") for name in plugins.calls[-1].config)

    async def test_an_empty_list_is_sent(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-097."""
        await libcni.gc(network(), [])
        assert [call.config["cni.dev/valid-attachments"] for call in plugins.calls] == [[], [], []]

    async def test_it_can_be_disabled(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-117."""
        await self.attach(libcni, plugins, "c1", to=network())
        await libcni.gc(network(disableGC=True), [])
        assert plugins.calls == []

    async def test_old_versions_are_only_detached(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-099."""
        await self.attach(libcni, plugins, "c1", to=network("1.0.0"))
        await libcni.gc(network("1.0.0"), [])
        assert {call.verb for call in plugins.calls} == {"DEL"}

    async def test_all_errors_are_reported(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-098: it goes on after each."""
        plugins.answer = failing("two", CniError(Code.FAILED, "stuck"))
        with pytest.raises(ExceptionGroup) as failed:
            await libcni.gc(network(), [])
        assert [str(error) for error in failed.value.exceptions] == ["stuck"]
        assert [call.kind for call in plugins.calls] == ["one", "two", "three"]


class TestStatusAndVersion:
    async def test_the_first_error_is_the_status(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-118; nothing is said about a container."""
        plugins.answer = failing("two", CniError(Code.UNAVAILABLE_AND_LIMITED, "no store"))
        with pytest.raises(CniError) as failed:
            await libcni.status(network())
        assert failed.value.code == Code.UNAVAILABLE_AND_LIMITED
        assert [call.kind for call in plugins.calls] == ["one", "two"]
        for name in ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS"):
            assert plugins.calls[0].environment[name] == ""

    async def test_old_versions_have_no_status(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-092."""
        await libcni.status(network("1.0.0"))
        assert plugins.calls == []

    async def test_versions_are_queried_with_dummies(self, libcni: Libcni, plugins: Plugins) -> None:
        """C-008: as podman does."""
        plugins.answer = lambda call: Output(0, b'{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0"]}', b"")
        assert await libcni.versions("one") == ("0.4.0", "1.0.0")
        assert plugins.calls[0].environment["CNI_NETNS"] == "dummy"
        assert plugins.calls[0].config == {"cniVersion": "1.1.0"}


class TestExecution:
    def program(self, folder: Path, text: str) -> Path:
        path = folder / "plugin"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    async def test_environment_stdin_and_all_outputs_pass(self, tmp_path: Path) -> None:
        """C-001."""
        program = self.program(tmp_path, 'cat; printf "%s" "$CNI_COMMAND" >&2; exit 3')
        output = await execute_here(program, environment={"CNI_COMMAND": "ADD"}, stdin=b"{}")
        assert output == Output(3, b"{}", b"ADD")

    async def test_a_plugin_need_not_read_its_input(self, tmp_path: Path) -> None:
        program = self.program(tmp_path, "exec true")
        assert (await execute_here(program, environment={}, stdin=b"x" * 1_000_000)).exit_code == 0

    async def test_a_busy_file_is_retried(self, tmp_path: Path) -> None:
        """C-119."""
        program = tmp_path / "plugin"
        shutil.copy("/bin/true", program)
        writer = os.open(program, os.O_WRONLY)
        asyncio.get_running_loop().call_later(0.3, os.close, writer)
        assert (await execute_here(program, environment={}, stdin=b"")).exit_code == 0
