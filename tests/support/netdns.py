"""The real netdns process, and pods in tenant netns that query it with `dig`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from weft.domain.errors import Unavailable
from weft.kernel.netns import Namespace
from weft.lab.dig import dig, dig_in_full
from weft.lab.servers.processes import DEADLINE, Child
from weft.runtime.backoff import Backoff
from weft.runtime.dns_control import Message, Report, StatusQuery, send_once

GATEWAYS = ("10.1.0.1", "10.2.0.1", "fd00:1::1")
POD = "10.1.0.5"
POD_V6 = "fd00:1::5"


class Pod:
    """A pod netns, connected to a tenant netns as the datapath does it in routing mode."""

    def __init__(self, namespace: Namespace, *, tenant: Namespace, number: int = 5) -> None:
        self.namespace = namespace
        port, pod, pod_v6 = f"port{number}", f"10.1.0.{number}", f"fd00:1::{number}"
        for address in GATEWAYS:
            _ip(tenant, "address", "replace", address, "dev", "lo")
        _ip(tenant, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace.name)
        gateway_mac, own_mac = "02:00:00:00:00:01", f"02:00:00:00:00:0{number}"
        _ip(tenant, "link", "set", port, "address", gateway_mac, "up")
        _ip(tenant, "link", "set", "lo", "up")
        _ip(namespace, "link", "set", "eth0", "address", own_mac, "up")
        for address, gateway in ((pod, GATEWAYS[0]), (pod_v6, GATEWAYS[2])):
            _ip(namespace, "address", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
            _ip(namespace, "neighbour", "replace", gateway, "lladdr", gateway_mac, "dev", "eth0", "nud", "permanent")
            _ip(namespace, "route", "add", "default", "via", gateway, "dev", "eth0", "onlink")
            _ip(tenant, "neighbour", "replace", address, "lladdr", own_mac, "dev", port, "nud", "permanent")
            _ip(tenant, "route", "replace", address, "dev", port)

    async def dig(self, *question: str, server: str = GATEWAYS[0]) -> list[str]:
        return await dig(self.namespace, *question, server=server)

    async def dig_in_full(self, *question: str, server: str = GATEWAYS[0]) -> str:
        return await dig_in_full(self.namespace, *question, server=server)


def _ip(namespace: Namespace, *arguments: str) -> None:
    family = "-6" if any("::" in each for each in arguments) else "-4"
    command = ["ip", family, *arguments]
    namespace.run(lambda: subprocess.run(command, check=True, timeout=DEADLINE))


class Netdns:
    """The process, with the capabilities that its systemd unit gives it."""

    def __init__(self, home: Path) -> None:
        self.socket = home / "dns.sock"
        self.resolv_conf = home / "resolv.conf"
        self.log = home / "netdns.log"
        flags = {"run-dir": home, "socket": self.socket, "resolv-conf": self.resolv_conf, "log-level": "DEBUG"}
        self._command = (
            "unshare", "--mount", "--propagation", "slave",
            "setpriv", "--bounding-set", "-all,+sys_admin,+net_bind_service", "--no-new-privs",
            sys.executable, "-m", "weft.dns.main", *(f"--{name}={value}" for name, value in flags.items()),
        )  # fmt: skip
        self.process: Child | None = None

    async def start(self) -> None:
        """Return when it accepts control connections."""
        self.process = Child(self._command, log=self.log)
        backoff = Backoff(within=DEADLINE)
        while True:
            try:
                await send_once(self.socket, StatusQuery())
            except Unavailable:
                await backoff.pause()
            else:
                return

    async def send(self, message: Message) -> Report:
        return await send_once(self.socket, message)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process:
            self.process.__exit__(None, None, None)
            self.process = None
