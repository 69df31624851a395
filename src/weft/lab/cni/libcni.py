"""A small typed libcni: calls CNI plugins as container runtimes do.

ADD calls the plugins of a list in order and passes each result to the next; DEL calls them in reverse. The final
result is cached for CHECK, DEL and GC. Errors of plugins are `CniError`s. Calls for different attachments may run
concurrently.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document
from weft.cni.request import AttachmentId, Verb
from weft.cni.result import Result, parse_result
from weft.cni.versions import NEWEST, SpecVersion
from weft.lab.cni.network_lists import NetworkList, PluginConfig
from weft.lab.cni.result_cache import Attachment, Cached, ResultCache
from weft.runtime.backoff import Backoff

# Seconds after which a plugin is killed.
DEADLINE = 90.0

# How long ETXTBSY is retried, while an installer replaces the plugin (C-119).
BUSY_SECONDS = 6.0

# The network that runtimes attach first, as `lo`; built into containerd and CRI-O, so it has no file.
LOOPBACK = NetworkList(
    name="cni-loopback",
    version=SpecVersion.V0_3_1,
    plugins=(PluginConfig(type="loopback", members={"type": "loopback"}),),
    source=b'{"cniVersion":"0.3.1","name":"cni-loopback","plugins":[{"type":"loopback"}]}',
)

Members = dict[str, object]

# For GC and STATUS, whose variables are set but empty.
_NO_ATTACHMENT = Attachment(container="", netns="", ifname="")


class Output(NamedTuple):
    """The exit code and the output of a plugin."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Execute(Protocol):
    """Runs a plugin until it ends. The lab's hosts add their own environment."""

    async def __call__(self, program: Path, *, environment: Mapping[str, str], stdin: bytes) -> Output: ...


async def execute_here(program: Path, *, environment: Mapping[str, str], stdin: bytes) -> Output:
    """Run a plugin, killed at the deadline; retried while its file is being written (C-119)."""
    backoff = Backoff(cap=1.0, within=BUSY_SECONDS)
    while True:
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                env={**os.environ, **environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
            await backoff.pause()
            continue
        try:
            async with asyncio.timeout(DEADLINE):
                stdout, stderr = await process.communicate(stdin)
        finally:
            # After the deadline, or if this task is cancelled; a process that has ended is not there to kill.
            with suppress(ProcessLookupError):
                process.kill()
            exit_code = await process.wait()
        return Output(exit_code, stdout, stderr)


class Libcni:
    """The runtime's side of CNI."""

    def __init__(self, *, search_path: Sequence[Path], cache: ResultCache, execute: Execute = execute_here) -> None:
        self._search_path = search_path
        self._cache = cache
        self._execute = execute

    async def add(self, network: NetworkList, attachment: Attachment) -> Result:
        """Attach. The first error aborts it, and the caller cleans up with `delete` (C-110)."""
        result: Members | None = None
        for plugin in network.plugins:
            output = await self._call(Verb.ADD, network, plugin, attachment=attachment, prev_result=result)
            result = _result_members(output, network.version)
        assert result is not None
        self._cache.write(Cached(network=network.name, attachment=attachment, source=network.source, result=result))
        return parse_result(result, version=network.version)

    async def check(self, network: NetworkList, attachment: Attachment) -> None:
        """Call CHECK of all plugins in order; needs the cached result of ADD (C-111)."""
        if network.version < SpecVersion.V0_4_0:
            raise CniError(Code.INCOMPATIBLE_VERSION, f"version {network.version} does not allow CHECK")
        # The list disables CHECK for plugins that fail it; libcni reports success then.
        if network.disable_check:
            return
        cached = self._cache.read(network.name, attachment)
        if cached is None:
            raise CniError(Code.UNKNOWN_CONTAINER, f"{attachment.container} was never attached to {network.name}")
        for plugin in network.plugins:
            await self._call(Verb.CHECK, network, plugin, attachment=attachment, prev_result=dict(cached.result))

    async def delete(self, network: NetworkList, attachment: Attachment) -> None:
        """Detach, the last plugin first. An unreadable cache entry does not prevent it (C-111, C-116)."""
        prev_result = None
        # Before 0.4.0 the specification passes no prevResult to DEL.
        if network.version >= SpecVersion.V0_4_0:
            with suppress(CniError):
                cached = self._cache.read(network.name, attachment)
                prev_result = None if cached is None else dict(cached.result)
        for plugin in reversed(network.plugins):
            await self._call(Verb.DEL, network, plugin, attachment=attachment, prev_result=prev_result)
        self._cache.remove(network.name, attachment)

    async def gc(self, network: NetworkList, valid: Iterable[AttachmentId] | None) -> None:
        """Detach cached attachments that are not valid, then call GC of each plugin (C-117); errors come as one group.

        Without a list, no attachment is valid, and the plugins get no list.
        """
        if network.disable_gc:
            return
        keep = None if valid is None else sorted(valid)
        errors: list[Exception] = []
        for cached in list(self._cache.all(network.name)):
            if AttachmentId(cached.attachment.container, cached.attachment.ifname) not in (keep or ()):
                try:
                    await self.delete(network, cached.attachment)
                except CniError as error:
                    errors.append(error)
        if network.version >= SpecVersion.V1_1_0:
            listed = [{"containerID": item.container, "ifname": item.ifname} for item in keep or ()]
            # The specification and libcni disagree on the name, so libcni sends both.
            lists = {} if keep is None else {"cni.dev/valid-attachments": listed, "cni.dev/attachments": listed}
            for plugin in network.plugins:
                try:
                    await self._call(Verb.GC, network, plugin, more=lists)
                except CniError as error:
                    errors.append(error)
        if errors:
            raise ExceptionGroup(f"garbage of {network.name} remains", errors)

    async def status(self, network: NetworkList) -> None:
        """Call STATUS of each plugin; the first error is raised (C-118)."""
        # Plugins before 1.1.0 do not know STATUS and count as ready.
        if network.version >= SpecVersion.V1_1_0:
            for plugin in network.plugins:
                await self._call(Verb.STATUS, network, plugin)

    async def versions(self, kind: str) -> tuple[str, ...]:
        """The versions that a plugin supports, queried as podman does."""
        unused = dict.fromkeys(("CNI_NETNS", "CNI_IFNAME", "CNI_PATH"), "dummy")
        output = await self._run(
            kind, {"CNI_COMMAND": Verb.VERSION, **unused}, json.dumps({"cniVersion": NEWEST}).encode()
        )
        return Document.of(_decode(output.stdout), where="VERSION").texts("supportedVersions")

    async def add_pod(self, networks: Sequence[NetworkList], pod: Attachment) -> list[Result]:
        """Attach a pod to several networks, in order: `LOOPBACK` as lo, the others as eth0, eth1 and so on."""
        return [
            await self.add(network, interface)
            for network, interface in zip(networks, _interfaces(networks, pod), strict=True)
        ]

    async def delete_pod(self, networks: Sequence[NetworkList], pod: Attachment) -> None:
        """Detach a pod from the same networks, the last one first."""
        for network, interface in reversed(list(zip(networks, _interfaces(networks, pod), strict=True))):
            await self.delete(network, interface)

    async def _call(
        self,
        verb: Verb,
        network: NetworkList,
        plugin: PluginConfig,
        *,
        attachment: Attachment = _NO_ATTACHMENT,
        prev_result: Members | None = None,
        more: Mapping[str, object] | None = None,
    ) -> bytes:
        """Call one plugin with its own configuration and the runtime's additions (C-112, C-113)."""
        config: Members = {name: value for name, value in plugin.members.items() if not _is_reserved(name)}
        config |= {"name": network.name, "cniVersion": network.version}
        # A plugin gets only the capabilities that it declares.
        if runtime := {name: value for name, value in attachment.capabilities.items() if name in plugin.capabilities}:
            config["runtimeConfig"] = runtime
        if prev_result is not None:
            config["prevResult"] = prev_result
        environment = {
            "CNI_COMMAND": verb,
            "CNI_CONTAINERID": attachment.container,
            "CNI_NETNS": attachment.netns,
            "CNI_IFNAME": attachment.ifname,
            "CNI_ARGS": ";".join(f"{key}={value}" for key, value in attachment.args),
            "CNI_PATH": ":".join(map(str, self._search_path)),
        }
        output = await self._run(plugin.type, environment, json.dumps(config | dict(more or {})).encode())
        return output.stdout

    async def _run(self, kind: str, environment: Mapping[str, str], stdin: bytes) -> Output:
        output = await self._execute(self._find(kind), environment=environment, stdin=stdin)
        if output.exit_code == 0:
            return output
        details = output.stderr.decode(errors="replace").strip() or f"exit code {output.exit_code}"
        # A plugin that crashes prints no error object.
        raise CniError.decode(output.stdout) or CniError(Code.FAILED, f"plugin {kind} failed", details=details)

    def _find(self, kind: str) -> Path:
        for folder in self._search_path:
            if os.access(program := folder / kind, os.X_OK):
                return program
        raise CniError(Code.BAD_CONFIG, f"there is no plugin {kind} in {', '.join(map(str, self._search_path))}")


def _is_reserved(name: str) -> bool:
    """Whether only the runtime reads or sets a member (C-022)."""
    return name in {"capabilities", "runtimeConfig", "prevResult"} or name.startswith("cni.dev/")


def _interfaces(networks: Sequence[NetworkList], pod: Attachment) -> list[Attachment]:
    names = iter(f"eth{index}" for index in range(len(networks)))
    return [
        Attachment(
            container=pod.container,
            netns=pod.netns,
            ifname="lo" if network is LOOPBACK else next(names),
            args=pod.args,
            capabilities=pod.capabilities,
        )
        for network in networks
    ]


def _result_members(stdout: bytes, version: SpecVersion) -> Members:
    """The result as JSON; the list's version is the default, and `null` is valid (C-120)."""
    value = _decode(stdout)
    if value is not None and not isinstance(value, dict):
        raise CniError(Code.NOT_DECODED, "the plugin's result is not an object")
    members: Members = {"cniVersion": version.value}
    return members | (value or {})


def _decode(stdout: bytes) -> object:
    try:
        value: object = json.loads(stdout)
    except ValueError as error:
        raise CniError(Code.NOT_DECODED, "the plugin printed no JSON", details=str(error)) from error
    return value
