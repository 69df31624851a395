"""Real container runtimes with private state directories: podman, and containerd with its `ctr`.

The caller must be in private network and mount namespaces (`weft.lab.namespaces`). Containers share one root directory
that contains only busybox, and each serves its own name over TCP.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.support.cgroups import own_cgroup

from weft.kernel.netns import NamespaceDirectory
from weft.lab.hosts import NETWORK
from weft.lab.namespaces import mount
from weft.lab.servers.processes import Child
from weft.lab.waiting import DEADLINE, eventually, until

# The port where every container serves its name.
PORT = 8080

_OWN_PLACES = ("/run", "/var/lib", "/var/log", "/dev/shm", "/opt", "/etc/cni")
_APPLETS = ("cat", "echo", "hostname", "httpd", "ip", "nc", "printf", "sh", "sleep")
_PODMAN = ("podman", "--cgroup-manager=cgroupfs", "--events-backend=file", "--runtime=runc", "--log-level=warn")
# podman would raise these limits to its defaults, which needs CAP_SYS_RESOURCE.
_LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
_CONTAINERD_CONFIG = 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'


class Ran(NamedTuple):
    """The exit code and the output of a command."""

    exit_code: int
    output: str


def mount_private_directories() -> None:
    """Mount an empty tmpfs over every state directory of runtimes and plugins, in this mount namespace only."""
    for place in _OWN_PLACES:
        mount(None, Path(place), kind="tmpfs")
    NamespaceDirectory(Path("/run/netns")).prepare()


def make_root(path: Path, *, applets: Sequence[str] = _APPLETS) -> Path:
    """Create a root directory for containers: busybox with links for these applets."""
    busybox = shutil.which("busybox")
    assert busybox is not None, "scripts/install-system-packages e2e installs busybox"
    for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp"):
        (path / name).mkdir(parents=True)
    shutil.copy(busybox, path / "bin" / "busybox")
    for applet in applets:
        if applet != "busybox":
            (path / "bin" / applet).symlink_to("busybox")
    return path


async def run(*command: str, within: float = DEADLINE) -> Ran:
    """Run a command, which must end before the deadline."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(within):
            output, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        exit_code = await process.wait()
    return Ran(exit_code, output.decode(errors="replace"))


async def run_checked(*command: str, within: float = DEADLINE) -> str:
    """The output of a command, which must succeed."""
    ran = await run(*command, within=within)
    assert ran.exit_code == 0, f"{' '.join(command)}: {ran.output}"
    return ran.output


class Runtime(Protocol):
    """The operations that tests need of a runtime."""

    async def start(self, name: str, *flags: str) -> None:
        """Run a container on our network until it is removed; flags are passed to the runtime."""

    async def inside(self, name: str, *command: str) -> Ran:
        """Run a command in a container."""

    async def remove(self, name: str) -> None:
        """Stop a container and wait until the runtime has called DEL."""


async def address_in(runtime: Runtime, name: str) -> str:
    """The address of a container's eth0, which must be up."""
    shown = (await runtime.inside(name, "/bin/ip", "-o", "-4", "addr", "show", "dev", "eth0", "up")).output
    _, _, rest = shown.partition(" inet ")
    return rest.split("/")[0]


async def fetch_name(runtime: Runtime, name: str, other: str) -> str:
    """The name that the container at an address serves; retried until it answers."""
    ran = await eventually(
        lambda: runtime.inside(name, "/bin/nc", "-w", "5", other, str(PORT)), lambda ran: ran.exit_code == 0
    )
    return ran.output.strip()


class Podman:
    """podman with its CNI backend and runc; crun rejects the cgroups of some machines."""

    def __init__(self, root: Path, *, cgroup: str) -> None:
        self._root = root
        self._cgroup = cgroup

    async def start(self, name: str, *flags: str, network: str = NETWORK) -> None:
        started = await self.try_start(name, *flags, network=network)
        assert started.exit_code == 0, started.output

    async def try_start(self, name: str, *flags: str, network: str = NETWORK) -> Ran:
        """Like `start`, but it may fail."""
        own = ("--detach", "--name", name, "--network", network, "--cgroup-parent", f"/{self._cgroup}", *_LIMITS)
        return await run(*_PODMAN, "run", *own, *flags, "--rootfs", str(self._root), *_name_server_command(name))

    async def inside(self, name: str, *command: str) -> Ran:
        return await run(*_PODMAN, "exec", name, *command)

    async def remove(self, name: str) -> None:
        await run_checked(*_PODMAN, "rm", "--force", "--time", "0", name)


@asynccontextmanager
async def running_podman(root: Path) -> AsyncIterator[Podman]:
    """podman; its containers are removed at the end of the block."""
    async with own_cgroup(f"weft-{os.getpid()}") as cgroup:
        try:
            yield Podman(root, cgroup=cgroup)
        finally:
            await run_checked(*_PODMAN, "rm", "--force", "--time", "0", "--all")


class Ctr:
    """containerd's own client, which calls CNI plugins itself. It runs in the foreground while its container does."""

    def __init__(self, root: Path, *, cgroup: str) -> None:
        self._root = root
        self._cgroup = cgroup
        self._children: dict[str, Child] = {}
        self._calls = 0

    async def start(self, name: str, *flags: str) -> None:
        own = ("--rm", "--cni", "--rootfs", "--cgroup", f"/{self._cgroup}/{name}")
        self._children[name] = Child(["ctr", "run", *own, *flags, str(self._root), name, *_name_server_command(name)])

        async def is_running() -> bool:
            child = self._children[name]
            assert child.running, f"ctr run has ended with code {child.exit_code}"
            listed = await run_checked("ctr", "task", "ls")
            return [name, "RUNNING"] in [line.split()[::2] for line in listed.splitlines()]

        await eventually(is_running, bool)

    async def inside(self, name: str, *command: str) -> Ran:
        self._calls += 1
        return await run("ctr", "task", "exec", "--exec-id", f"call{self._calls}", name, *command)

    async def remove(self, name: str) -> None:
        ended = await self._end(name)
        assert ended.exit_code == 0, ended.output

    async def close(self) -> None:
        """Stop all containers, also if one does not exit by itself."""
        async with AsyncExitStack() as ending:
            for name in self._children:
                ending.push_async_callback(self._end, name)

    async def _end(self, name: str) -> Ran:
        with self._children.pop(name) as child:
            killed = await run("ctr", "task", "kill", "--signal", "SIGKILL", name)
            await until(lambda: not child.running)
            await run("ctr", "task", "delete", "--force", name)  # left by a `ctr run` whose ADD failed
            return killed


@asynccontextmanager
async def running_containerd(root: Path, *, home: Path) -> AsyncIterator[Ctr]:
    """containerd; its containers are removed at the end of the block."""
    config = home / "containerd.toml"
    config.write_text(_CONTAINERD_CONFIG)
    async with own_cgroup(f"weft-{os.getpid()}") as cgroup:
        with Child(["containerd", "--config", str(config)], log=home / "containerd.log") as daemon:

            async def is_ready() -> bool:
                assert daemon.running, f"containerd has ended with code {daemon.exit_code}"
                return (await run("ctr", "version")).exit_code == 0

            await eventually(is_ready, bool)
            ctr = Ctr(root, cgroup=cgroup)
            try:
                yield ctr
            finally:
                await ctr.close()


def _name_server_command(name: str) -> tuple[str, ...]:
    return "/bin/nc", "-ll", "-p", str(PORT), "-e", "/bin/echo", name
