"""A node under test: netmaster and netplugin in the current network namespace, until terminated.

`python -m bench.node HOME PROGRAM PODS RULES` attaches PODS pods with PROGRAM, checks that the first packet of each
arrives, and then creates the file `ready` in HOME. If RULES is not 0, the pods belong to a group with this number of
rules.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

from weft.cni.install import PROGRAM
from weft.domain.desired.placement import GROUP_LABEL
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.cni.libcni import Output, execute_here
from weft.lab.servers.masters import MasterProcess, client
from weft.lab.servers.processes import Child
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

GROUP = "guarded"
# CNI arguments that put a pod into the group.
CNI_ARGS = f"IgnoreUnknown=1;{GROUP_LABEL}={GROUP}"
CONFIG = {"cniVersion": "1.1.0", "name": "weft", "type": PROGRAM}
AT_ONCE = 8
PORT = 4242
ARRIVES_WITHIN_S = 5.0


class Node:
    """The runtime's side of a node: calls the CNI program itself."""

    def __init__(self, home: Path, program: Path, *, with_rules: bool) -> None:
        self._home = home
        self._args = {"args": CNI_ARGS} if with_rules else {}
        self._program = program
        self._namespaces = NamespaceDirectory(home / "pods")
        self._namespaces.prepare()
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def start_agent(self) -> Child:
        own = {
            "host": "measured",
            "vtep-ip": "127.0.0.1",
            "ctrl-ip": "127.0.0.1",
            "run-dir": self._home / "run",
            "data-dir": self._home / "data",
            "cni-socket": self._home / "cni.sock",
            "netmaster": f"unix:{self._home}/store.sock",
        }
        flags = [f"--{name}={value}" for name, value in own.items()]
        return Child.python("weft.agent.main", *flags, log=self._home / "netplugin.log")

    async def call(self, verb: str, **variables: str) -> Output:
        """Call the program once."""
        named = {"command": verb, "path": str(self._program.parent), **variables}
        environment = {f"CNI_{name.upper()}": value for name, value in named.items()}
        own = {"WEFT_CNI_SOCKET": str(self._home / "cni.sock"), "WEFT_CNI_LOG": str(self._home / "cni.log")}
        async with self._at_once:
            return await execute_here(
                self._program, environment={**environment, **own}, stdin=json.dumps(CONFIG).encode()
            )

    async def wait_until_ready(self) -> None:
        backoff = Backoff(first=0.02, cap=0.1, within=DEADLINE)
        while (await self.call("STATUS")).exit_code:
            await backoff.pause()

    async def attach(self, name: str) -> tuple[Namespace, str]:
        """Attach a new pod; return its namespace and address."""
        namespace = self._namespaces.create(name)
        netns = str(self._namespaces.path / name)
        done = await self.call("ADD", containerid=name, netns=netns, ifname="eth0", **self._args)
        if done.exit_code:
            raise SystemExit(f"bench.node: ADD of {name}: {done.stdout.decode()}{done.stderr.decode()}")
        address: str = json.loads(done.stdout)["ips"][0]["address"]
        return namespace, address.partition("/")[0]

    async def attach_all(self, count: int) -> None:
        """Attach pods, each of which sends one packet to the first pod at once; none may be lost."""
        first, address = await self.attach("pod-0")
        others = {f"pod-{number}" for number in range(1, count)}
        with first, first.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
            listener.setblocking(False)
            listener.bind((address, PORT))
            receiving = asyncio.ensure_future(_receive(listener, others))
            await asyncio.gather(*(self._attach_and_send(name, address) for name in sorted(others)))
            await asyncio.wait([receiving], timeout=ARRIVES_WITHIN_S)
            if not receiving.done():
                raise SystemExit(f"bench.node: the first packets of {sorted(others)} were lost")

    async def _attach_and_send(self, name: str, to: str) -> None:
        namespace, _ = await self.attach(name)
        with namespace, namespace.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(name.encode(), (to, PORT))


async def _receive(listener: socket.socket, names: set[str]) -> None:
    """Remove each received name from the set, until it is empty."""
    while names:
        names.discard((await asyncio.get_running_loop().sock_recv(listener, 64)).decode())


async def _write_rules(url: str, count: int) -> None:
    """A group that denies ingress, except on `PORT` and as many following ports as there are rules."""
    owner = {"tenantName": DEFAULT_TENANT, "policyName": GROUP}
    async with client(url) as rest:
        (await rest.put("policys", **owner)).accepted()
        group = {"tenantName": DEFAULT_TENANT, "groupName": GROUP, "networkName": DEFAULT_NETWORK}
        (await rest.put("endpointGroups", **group, policies=[GROUP])).accepted()
        for number in range(count):
            opens = {"protocol": "udp", "port": PORT + number - 1, "priority": 2, "action": "allow"}
            rule = opens if number else {"priority": 1, "action": "deny"}
            (await rest.put("rules", **owner, ruleId=str(number), direction="in", **rule)).accepted()


async def serve(home: Path, program: Path, *, pods: int, rules: int) -> None:
    node = Node(home, program, with_rules=bool(rules))
    async with MasterProcess(home, "--store-socket", f"{home}/store.sock") as master:
        if rules:
            await _write_rules(master.url, rules)
        with node.start_agent():
            await node.wait_until_ready()
            await node.attach_all(pods)
            (home / "ready").touch()
            await asyncio.Event().wait()


if __name__ == "__main__":
    _, home_text, program_text, pods_text, rules_text = sys.argv
    asyncio.run(serve(Path(home_text), Path(program_text), pods=int(pods_text), rules=int(rules_text)))
