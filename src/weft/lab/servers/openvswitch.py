"""Open vSwitch for a host of the lab: ovsdb-server and ovs-vswitchd in the host's network namespace.

It uses the userspace datapath (`datapath_type=netdev`), which needs no kernel module. Both daemons end with their
parent process; the database file outlives them.
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
    """The daemons and the command line tools of one switch. Without `netns` they run in the caller's namespace."""

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
        """Start both daemons and wait until they are connected; idempotent."""
        self.start_database()
        self.start_daemon()

    def start_database(self) -> None:
        if self._server is None:
            # A killed server leaves its socket behind, and clients would connect to nothing.
            (self.directory / "db.sock").unlink(missing_ok=True)
            self._server = self._spawn(
                "ovsdb-server",
                str(self.directory / "conf.db"),
                f"--remote=punix:{self.directory / 'db.sock'}",
                f"--unixctl={self.directory / 'ovsdb.ctl'}",
            )
            self.configure("init", wait=False)
            # Pods leave TCP checksums to their veth (offload); only with userspace TSO does the switch compute them.
            self.configure("set", "Open_vSwitch", ".", "other_config:userspace-tso-enable=true", wait=False)

    def start_daemon(self, *, wait: bool = True) -> None:
        if self._daemon is None:
            control = f"--unixctl={self.directory / 'vswitchd.ctl'}"
            # --disable-system: only the userspace datapath; the kernel one would need its module.
            self._daemon = self._spawn("ovs-vswitchd", self.database, "--disable-system", control)
            if wait:
                # Any change with --wait returns only after ovs-vswitchd has processed the database.
                self.configure("set", "Open_vSwitch", ".", f"external_ids:lab={uuid.uuid4()}")

    def kill_database(self) -> None:
        """Kill ovsdb-server with SIGKILL; idempotent."""
        if self._server is not None:
            with self._server:
                self._server = None

    def kill_daemon(self) -> None:
        """Kill ovs-vswitchd; flows and conntrack entries are lost with the process."""
        if self._daemon is not None:
            with self._daemon:
                self._daemon = None

    def paused(self) -> AbstractContextManager[None]:
        """Pause ovs-vswitchd inside the block."""
        assert self._daemon is not None
        return self._daemon.paused()

    def close(self) -> None:
        # The daemon first: without its database it would log errors.
        self.kill_daemon()
        self.kill_database()

    def configure(self, *arguments: str, wait: bool = True) -> str:
        """Run `ovs-vsctl`; with `wait`, until ovs-vswitchd has applied the change."""
        flags = () if wait else ("--no-wait",)
        return self.run(
            "ovs-vsctl", f"--db={self.database}", "--retry", f"--timeout={DEADLINE:.0f}", *flags, *arguments
        )

    def flows(self, verb: str, bridge: str, *arguments: str) -> str:
        """Run `ovs-ofctl` on a bridge."""
        return self.run("ovs-ofctl", "-O", "OpenFlow14", verb, self.management(bridge), *arguments)

    def dump_flows(self, bridge: str) -> list[str]:
        """The flows of a bridge as `ovs-ofctl` prints them, without counters, sorted."""
        text = self.run("ovs-ofctl", "-O", "OpenFlow14", "--no-stats", "dump-flows", self.management(bridge))
        return sorted(line.strip() for line in text.splitlines() if "actions=" in line)

    def management(self, bridge: str) -> str:
        return f"unix:{self.directory / bridge}.mgmt"

    def command(self, *arguments: str) -> str:
        """Run `ovs-appctl` on ovs-vswitchd."""
        return self.run("ovs-appctl", "-t", str(self.directory / "vswitchd.ctl"), *arguments)

    def run(self, *command: str) -> str:
        """The output of a tool, which must succeed."""
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
    """Run a switch without bridges inside the block."""
    switch = Switch(directory, netns=netns)
    try:
        switch.start()
        yield switch
    finally:
        switch.close()
