"""A host of the lab as a machine of its own: its processes, its name and its disk are seen by nobody else.

For what starts processes that go their own ways, such as containerd's. When the machine's power goes, all of them do.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.runtimes import must

from weft.lab.hosts import Host
from weft.lab.namespaces import MS_BIND, enter, mount, unmount
from weft.lab.servers.processes import Child

# Where a machine keeps things when it is off.
_DISK = ("/etc/cni", "/opt", "/var/lib", "/var/log")
_MS_SHARED = 0x100000
_NAMESPACES = {"mount": "mnt", "uts": "uts", "pid": "pid_for_children"}


class Machine(Host):
    """A host in whose place programs run by `command`; it is on while its agent is meant to be."""

    _power: Child | None = None

    async def start(self) -> None:
        """Switch it on, unless it is, and start the agent with whatever there is on the disk."""
        if await self.switch_on():
            await must(*self.command("ln", "-s", str(self.home), "/run/weft"))
            await must(*self.command(sys.executable, "-m", "weft.cli", "install-cni", "--shim", str(self.program)))
        await super().start()

    def close(self) -> None:
        super().close()
        if self._power is not None:
            with self._power:
                self._power = None

    @property
    def root(self) -> Path:
        """Its files as others see them."""
        assert self._power is not None
        return Path(f"/proc/{self._power.pid}/root")

    def command(self, *words: str) -> list[str]:
        """The command that runs a command on this machine. When it is killed, so is what it runs."""
        assert self._power is not None
        place = f"/proc/{self._power.pid}/ns"
        flags = [f"--{option}={place}/{name}" for option, name in _NAMESPACES.items()]
        return ["nsenter", *flags, f"--net={self.machine}", "--", "setpriv", "--pdeathsig", "KILL", "--", *words]

    def daemon(self, *words: str, log: str, env: Mapping[str, str] | None = None) -> Child:
        """A program that runs on this machine until it is killed or the machine is off."""
        return Child(self.command(*words), env=env, log=self.home / log)

    def _run(self, module: str, *flags: str, log: str) -> Child:
        inside = ("-m", "weft.lab.run_in_netns", str(self.machine), str(self.boot_id), module)
        return self.daemon(sys.executable, *inside, *flags, log=log)

    async def switch_on(self) -> bool:
        """Switch it on, with nothing of ours running; whether it was off."""
        if self._power is not None:
            return False
        self._power = self._first_process()
        assert await self._power.next_line() == "on"
        return True

    def _first_process(self) -> Child:
        apart = ("--pid", "--fork", "--kill-child", "--mount", "--propagation=unchanged", "--uts")
        this = (sys.executable, "-m", "tests.support.machines", self.name, str(self.home), str(self.machine))
        return Child(["unshare", *apart, "--", *this], log=self.home / "machine.log")


def main(name: str, home: Path, namespace: Path) -> None:
    """The first process of a machine: makes all that is its own, says so, and goes on until the machine is off."""
    socket.sethostname(name)
    enter(namespace)
    mount(None, Path("/proc"), kind="proc")
    mount(home / "boot_id", Path("/proc/sys/kernel/random/boot_id"), flags=MS_BIND)
    for place in _DISK:
        disk = home / "disk" / place.strip("/").replace("/", "-")
        disk.mkdir(parents=True, exist_ok=True)
        mount(disk, Path(place), flags=MS_BIND)
    while mounts := _mounted_below("/run"):  # containerd would take one that is covered for the one that is seen
        unmount(mounts[-1])
    mount(None, Path("/run"), kind="tmpfs")
    for shared in ("/run", "/var/lib"):  # pods' namespaces and volumes are seen by whoever was here before them
        mount(None, Path(shared), flags=_MS_SHARED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is left alone becomes our child, and is nobody's to ask for
    sys.stdout.write("on\n")
    sys.stdout.flush()
    os.execlp("sleep", "sleep", "infinity")


def _mounted_below(place: str) -> list[Path]:
    """What is mounted there and below, in the order of its coming."""
    points = (Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.is_relative_to(place)]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
