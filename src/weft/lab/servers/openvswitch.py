"""A real Open vSwitch for a host of the lab: a database and a switch of its own, in the host's network namespace.

It forwards in its own process (`datapath_type=netdev`), so the kernel needs no module for it. Both daemons are gone
with the one who started them, whatever ends it; the database outlives them, as on a disk.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from weft.lab.servers.processes import Child
from weft.lab.waiting import DEADLINE

_SCHEMA = Path("/usr/share/openvswitch/vswitch.ovsschema")


class Switch:
    """The daemons, and what the switch's own tools say about them. `netns` is where they run; nowhere else if empty."""

    def __init__(self, directory: Path, *, netns: Path | None = None) -> None:
        self.directory = directory
        self.netns = netns
        self.database = f"unix:{directory / 'db.sock'}"
        self._server: Child | None = None
        self._daemon: Child | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.environment = {name: str(directory) for name in ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR")}
        if not (directory / "conf.db").exists():
            self.run("ovsdb-tool", "create", str(directory / "conf.db"), str(_SCHEMA))

    def start(self) -> None:
        """Both run and know each other when this returns; what runs already goes on."""
        self.start_database()
        self.start_daemon()

    def start_database(self) -> None:
        if self._server is None:
            (self.directory / "db.sock").unlink(missing_ok=True)
            self._server = self._spawn(
                "ovsdb-server",
                str(self.directory / "conf.db"),
                f"--remote=punix:{self.directory / 'db.sock'}",
                f"--unixctl={self.directory / 'ovsdb.ctl'}",
            )
            self.configure("init", wait=False)
            # Without it the checksums that workloads leave to their devices are never made.
            self.configure("set", "Open_vSwitch", ".", "other_config:userspace-tso-enable=true", wait=False)

    def start_daemon(self, *, wait: bool = True) -> None:
        if self._daemon is None:
            control = f"--unixctl={self.directory / 'vswitchd.ctl'}"
            self._daemon = self._spawn("ovs-vswitchd", self.database, "--disable-system", control)
            if wait:
                self.configure("set", "Open_vSwitch", ".", f"external_ids:lab={uuid.uuid4()}")

    def kill_database(self) -> None:
        """End ovsdb-server as kill -9 does; ended already is fine."""
        if self._server is not None:
            with self._server:
                self._server = None

    def kill_daemon(self) -> None:
        """The same with ovs-vswitchd: its flows and its connections are forgotten."""
        if self._daemon is not None:
            with self._daemon:
                self._daemon = None

    def held_still(self) -> AbstractContextManager[None]:
        """While the block runs ovs-vswitchd does nothing."""
        assert self._daemon is not None
        return self._daemon.held_still()

    def close(self) -> None:
        self.kill_daemon()
        self.kill_database()

    def configure(self, *arguments: str, wait: bool = True) -> str:
        """What `ovs-vsctl` says; by its end the switch has done it, if it is to be waited for."""
        flags = () if wait else ("--no-wait",)
        return self.run(
            "ovs-vsctl", f"--db={self.database}", "--retry", f"--timeout={DEADLINE:.0f}", *flags, *arguments
        )

    def flows(self, verb: str, bridge: str, *arguments: str) -> str:
        """What `ovs-ofctl` says about a bridge."""
        return self.run("ovs-ofctl", "-O", "OpenFlow14", verb, self.management(bridge), *arguments)

    def dump_flows(self, bridge: str) -> list[str]:
        """The flows of a bridge in `ovs-ofctl`'s words, without counts, sorted."""
        text = self.run("ovs-ofctl", "-O", "OpenFlow14", "--no-stats", "dump-flows", self.management(bridge))
        return sorted(line.strip() for line in text.splitlines() if "actions=" in line)

    def management(self, bridge: str) -> str:
        return f"unix:{self.directory / bridge}.mgmt"

    def command(self, *arguments: str) -> str:
        """What `ovs-appctl` says of a running ovs-vswitchd."""
        return self.run("ovs-appctl", "-t", str(self.directory / "vswitchd.ctl"), *arguments)

    def run(self, *command: str) -> str:
        """The output of one of the switch's tools, which must succeed."""
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=DEADLINE * 2,
            check=False,
            text=True,
            env={**os.environ, **self.environment},
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def _spawn(self, *command: str) -> Child:
        inside = ["nsenter", f"--net={self.netns}", "--"] if self.netns else []
        log = self.directory / f"{command[0]}.log"
        return Child([*inside, *command, "-vconsole:warn"], env=self.environment, log=log)


@contextmanager
def running_switch(directory: Path, *, netns: Path | None = None) -> Iterator[Switch]:
    """A switch that answers, without bridges; its daemons are gone at the end of the block."""
    switch = Switch(directory, netns=netns)
    try:
        switch.start()
        yield switch
    finally:
        switch.close()
