"""A host of the lab with private PID, UTS and mount namespaces.

For programs such as containerd that start daemons of their own: powering the machine off kills all of them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.runtimes import run_checked

from weft.lab.hosts import Host
from weft.lab.namespaces import MS_BIND, enter, mount, unmount
from weft.lab.servers.processes import Child

# Directories that persist while the machine is off.
_DISK = ("/etc/cni", "/opt", "/var/lib", "/var/log")
_MS_SHARED = 0x100000
_NAMESPACES = {"mount": "mnt", "uts": "uts", "pid": "pid_for_children"}


class Machine(Host):
    """A host whose programs are started with `command`. It is powered on by `start`."""

    _power: Child | None = None

    async def start(self) -> None:
        """Power it on if it is off, and start the agent with the existing data directory."""
        if await self.switch_on():
            await run_checked(*self.command("ln", "-s", str(self.home), "/run/weft"))
            await run_checked(
                *self.command(sys.executable, "-m", "weft.cli", "install-cni", "--shim", str(self.program))
            )
        await super().start()

    def close(self) -> None:
        super().close()
        if self._power is not None:
            with self._power:
                self._power = None

    @property
    def root(self) -> Path:
        """Its root directory, as other processes see it."""
        assert self._power is not None
        return Path(f"/proc/{self._power.pid}/root")

    def command(self, *words: str) -> list[str]:
        """Wrap a command so that it runs on this machine and is killed with the wrapper."""
        assert self._power is not None
        place = f"/proc/{self._power.pid}/ns"
        flags = [f"--{option}={place}/{name}" for option, name in _NAMESPACES.items()]
        return ["nsenter", *flags, f"--net={self.netns}", "--", "setpriv", "--pdeathsig", "KILL", "--", *words]

    def daemon(self, *words: str, log: str, env: Mapping[str, str] | None = None) -> Child:
        """Start a program on this machine; it runs until it is killed or the machine is powered off."""
        return Child(self.command(*words), env=env, log=self.home / log)

    def _run(self, module: str, *flags: str, log: str) -> Child:
        inside = ("-m", "weft.lab.run_in_netns", str(self.netns), str(self.boot_id), module)
        return self.daemon(sys.executable, *inside, *flags, log=log)

    async def switch_on(self) -> bool:
        """Power it on without our programs; return whether it was off."""
        if self._power is not None:
            return False
        self._power = self._first_process()
        assert await self._power.next_line() == "on"
        return True

    def _first_process(self) -> Child:
        unshare_flags = ("--pid", "--fork", "--kill-child", "--mount", "--propagation=unchanged", "--uts")
        this = (sys.executable, "-m", "tests.support.machines", self.name, str(self.home), str(self.netns))
        return Child(["unshare", *unshare_flags, "--", *this], log=self.home / "machine.log")


def main(name: str, home: Path, namespace: Path) -> None:
    """The init process of a machine: mount its directories, report that it is ready, and run until power-off."""
    socket.sethostname(name)
    enter(namespace)
    mount(None, Path("/proc"), kind="proc")
    mount(home / "boot_id", Path("/proc/sys/kernel/random/boot_id"), flags=MS_BIND)
    for place in _DISK:
        disk = home / "disk" / place.strip("/").replace("/", "-")
        disk.mkdir(parents=True, exist_ok=True)
        mount(disk, Path(place), flags=MS_BIND)
    while mounts := _mounted_below("/run"):  # containerd would confuse a covered mount with the visible one
        unmount(mounts[-1])
    mount(None, Path("/run"), kind="tmpfs")
    for shared in (
        "/run",
        "/var/lib",
    ):  # shared propagation: pod netns and volumes must be visible to existing processes
        mount(None, Path(shared), flags=_MS_SHARED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become our children; ignoring SIGCHLD reaps them
    sys.stdout.write("on\n")
    sys.stdout.flush()
    os.execlp("sleep", "sleep", "infinity")


def _mounted_below(place: str) -> list[Path]:
    """The mount points at or below a path, in mount order."""
    points = (Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.is_relative_to(place)]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
