"""`weft up`: all programs on one machine, and how it ends."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.lab.servers.processes import Child, free_port
from weft.lab.waiting import until

MODULES = {"netmaster": "weft.master.main", "netplugin": "weft.agent.main", "netdns": "weft.dns.main"}


class Up:
    """A `weft up` with everything below one directory."""

    def __init__(self, child: Child, *, master: int, agent: int) -> None:
        self.child = child
        self._ports = (master, agent)

    def is_ready(self) -> bool:
        return all(_is_ready(port) for port in self._ports)

    def children(self) -> dict[str, int]:
        """The programs it runs, by name."""
        found = {}
        for pid in Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found.update({name: int(pid) for name, module in MODULES.items() if module in command})
        return found


@contextmanager
def weft_up(directory: Path, *flags: str) -> Iterator[Up]:
    master, agent = free_port(), free_port()
    own = {
        "--data-dir": directory / "data",
        "--run-dir": directory / "run",
        "--cni-socket": directory / "cni.sock",
        "--external-address": f"127.0.0.1:{master}",
        "--rest-address": f"127.0.0.1:{agent}",
        "--vtep-ip": "127.0.0.1",
        "--ctrl-ip": "127.0.0.1",
        "--host": "here",
    }
    arguments = [f"{name}={value}" for name, value in own.items()]
    with Child.python("weft.cli", "up", *arguments, *flags, log=directory / "log") as child:
        yield Up(child, master=master, agent=agent)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_all_programs_run_and_stop_together(isolated: None, tmp_path: Path) -> None:
    with weft_up(tmp_path) as up:
        await until(up.is_ready)
        programs = up.children()
        assert programs.keys() == MODULES.keys()
        await until(lambda: "netdns in sync" in (tmp_path / "log").read_text())
        os.kill(up.child.pid, signal.SIGTERM)
        await until(lambda: not up.child.running)
        assert up.child.exit_code == 0
        assert all(map(_is_gone, programs.values()))


async def test_when_one_dies_the_others_stop_and_its_exit_code_is_returned(isolated: None, tmp_path: Path) -> None:
    with weft_up(tmp_path) as up:
        await until(up.is_ready)
        programs = up.children()
        os.kill(programs["netmaster"], signal.SIGKILL)
        await until(lambda: not up.child.running)
        assert up.child.exit_code == 128 + signal.SIGKILL
        assert _is_gone(programs["netplugin"])
        assert _is_gone(programs["netdns"])
    assert "netmaster has ended with -9" in (tmp_path / "log").read_text()


async def test_an_invalid_setting_of_one_stops_all(isolated: None, tmp_path: Path) -> None:
    with weft_up(tmp_path, "--rest-address=192.0.2.1:9090") as up:
        await until(lambda: not up.child.running)
        assert up.child.exit_code == 22
    assert "is not on loopback" in (tmp_path / "log").read_text()


async def test_no_program_survives_sigkill_of_weft_up(isolated: None, tmp_path: Path) -> None:
    with weft_up(tmp_path) as up:
        await until(up.is_ready)
        programs = up.children()
        up.child.kill()
        await until(lambda: all(map(_is_gone, programs.values())))
