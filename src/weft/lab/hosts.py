"""A host of the lab: its agent, its netdns, its runtime and its pods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from weft.cni.errors import CniError
from weft.cni.install import PROGRAM
from weft.cni.result import Result
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab import traffic
from weft.lab.cni.libcni import Libcni, Output, execute_here
from weft.lab.cni.network_lists import NetworkList, read_network
from weft.lab.cni.result_cache import Attachment, ResultCache
from weft.lab.dig import dig, dig_in_full
from weft.lab.partition import Partition
from weft.lab.servers.openvswitch import Switch
from weft.lab.servers.processes import Child
from weft.lab.traffic import TCP, IPAddress, Transport
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

# The CNI network of every host.
NETWORK = "weft"

_CONFIG = {"cniVersion": "1.1.0", "name": NETWORK, "type": PROGRAM}


class Host:
    """A machine of the lab. Its directory is its disk."""

    def __init__(self, name: str, home: Path, *, address: str, door: Partition, flags: Sequence[str]) -> None:
        self.name = name
        self.home = home
        self.address = address
        self.door = door
        self.cable = ""
        # Its network namespace.
        self.machine = Path()
        self.boot_id = home / "boot_id"
        self.socket = home / "cni.sock"
        self.tenants = NamespaceDirectory(home / "run" / "netns")
        self.network: NetworkList = read_network(home / "net.d", NETWORK)
        self.cni = Libcni(search_path=[home / "bin"], cache=ResultCache(home / "cache"), execute=self.execute)
        self.program = home / "bin" / PROGRAM
        # What its agent is told when it is next launched, beside its place.
        self.flags = flags
        # Its Open vSwitch, where it has one.
        self.switch: Switch | None = None
        self._netns = NamespaceDirectory(home / "pods")
        self._open: dict[str, Namespace] = {}
        self._agent: Child | None = None
        self._names: Child | None = None
        # Its resolvers; none until somebody writes it.
        self.resolv_conf = home / "resolv.conf"
        for directory in (self.tenants, self._netns):
            directory.prepare()

    @property
    def agent(self) -> Child:
        """The agent's process, which must have been started."""
        assert self._agent is not None
        return self._agent

    @property
    def names(self) -> Child:
        """netdns's process, which must have been started."""
        assert self._names is not None
        return self._names

    async def start(self) -> None:
        """Start the agent with whatever there is, and return when it is ready for pods."""
        self.launch_names()
        if self.switch is not None:
            self.switch.netns = self.machine
            self.switch.start()
        self.launch()
        await self.ready()

    def launch_names(self) -> None:
        """Start netdns, unless it runs. Nobody waits for it."""
        if self._names is None:
            flags = (f"--run-dir={self.home / 'run'}", f"--resolv-conf={self.resolv_conf}")
            self._names = self._run("weft.dns.main", *flags, log="netdns.log")

    def kill_names(self) -> None:
        """End netdns as kill -9 does; ended already is fine."""
        if self._names is not None:
            with self._names:
                self._names = None

    def launch(self) -> None:
        """Start the agent."""
        self.kill()
        own = {
            "host": self.name,
            "run-dir": self.home / "run",
            "data-dir": self.home / "data",
            "cni-socket": self.socket,
        }
        if self.switch is not None:
            own["ovs-dir"] = self.switch.directory
        flags = [f"--{name}={value}" for name, value in own.items()]
        self._agent = self._run("weft.agent.main", *flags, *self.flags, log="netplugin.log")

    def _run(self, module: str, *flags: str, log: str) -> Child:
        """One of our programs, as on this machine."""
        machine = (str(self.machine), str(self.boot_id))
        return Child.python("weft.lab.run_in_netns", *machine, module, *flags, log=self.home / log)

    async def ready(self) -> None:
        """Return when the agent says that it could serve ADD; `TimeoutError` with its reason when that takes long."""
        backoff = Backoff(first=0.02, cap=0.2, within=DEADLINE)
        while True:
            try:
                await self.cni.status(self.network)
            except CniError as error:
                if not self.agent.running:
                    raise AssertionError(f"netplugin on {self.name} has ended") from error
                await backoff.pause()
            else:
                return

    def kill(self) -> None:
        """End the agent as kill -9 does; ended already is fine. What it made goes on."""
        if self._agent is not None:
            with self._agent:
                self._agent = None

    def close(self) -> None:
        """Agent, netdns and switch are gone and no pod is held open."""
        self.kill()
        self.kill_names()
        if self.switch is not None:
            self.switch.close()
        for namespace in self._open.values():
            namespace.close()
        self._open.clear()

    def lose_kernel_state(self) -> None:
        """What a machine loses when its power does, besides its own namespace."""
        self.close()
        (self.home / "run" / "names").unlink(missing_ok=True)
        for directory in (self.tenants, self._netns):
            for name in directory.names():
                directory.delete(name)

    async def execute(self, program: Path, *, environment: Mapping[str, str], stdin: bytes) -> Output:
        """Run a plugin as this host's runtime does."""
        own = {"WEFT_CNI_SOCKET": str(self.socket), "WEFT_CNI_LOG": str(self.home / "cni.log")}
        return await execute_here(program, environment={**environment, **own}, stdin=stdin)

    async def call(self, verb: str, config: Mapping[str, object] = _CONFIG, /, **variables: str) -> Output:
        """Run the plugin by hand. Variables are named without `CNI_`, in small letters; the rest is left out."""
        named = {f"CNI_{name.upper()}": value for name, value in ({"command": verb} | variables).items()}
        return await self.execute(self.program, environment=named, stdin=json.dumps(config).encode())

    def make_netns(self, name: str) -> Path:
        """An empty network namespace for a pod, as a runtime makes it; one that stands is taken."""
        if name not in self._open:
            self._open[name] = self._netns.create(name)
        return self._netns.path / name

    def remove_netns(self, name: str) -> None:
        """A pod's namespace is gone, whatever was in it; gone already is fine."""
        if namespace := self._open.pop(name, None):
            namespace.close()
        self._netns.delete(name)

    def attachment(
        self,
        name: str,
        *,
        tenant: str = "",
        network: str = "",
        group: str = "",
        address: str = "",
        netns: str = "",
        ifname: str = "eth0",
        **capabilities: object,
    ) -> Attachment:
        """How the runtime calls a pod's interface, and what it says about it. Labels choose where it belongs.

        Further capabilities go by their names in JSON.
        """
        labels = {"tenant": tenant, "network": network, "net-group": group}
        args = [(f"io.contiv.{key}", value) for key, value in labels.items() if value]
        args += [("K8S_POD_NAMESPACE", "lab"), ("K8S_POD_NAME", name)]
        path = netns or str(self.make_netns(name))
        return Attachment(
            container=name,
            netns=path,
            ifname=ifname,
            args=tuple(args),
            capabilities={**capabilities, **({"ips": [address]} if address else {})},
        )

    async def pod(self, name: str, **choices: Any) -> Pod:
        """A new pod, attached; see `attachment` for what can be chosen. `CniError` when that is refused."""
        attachment = self.attachment(name, **choices)
        return self.attached(attachment, await self.cni.add(self.network, attachment))

    def attached(self, attachment: Attachment, result: Result) -> Pod:
        """A pod whose ADD was answered."""
        return Pod(self, attachment, self._open[attachment.container], result)


class Pod:
    """An attached pod: a namespace with an interface, and what ADD answered."""

    def __init__(self, host: Host, attachment: Attachment, namespace: Namespace, result: Result) -> None:
        self.host = host
        self.attachment = attachment
        self.namespace = namespace
        self.result = result

    @property
    def name(self) -> str:
        return self.attachment.container

    @property
    def netns(self) -> Path:
        return Path(self.attachment.netns)

    def address(self, family: int = 4) -> IPAddress:
        """Its address of a family, as ADD told."""
        return next(each.address.ip for each in self.result.addresses if each.address.version == family)

    def place(self, family: int = 4) -> traffic.Place:
        """Where its packets come from and go to."""
        return traffic.Place(self.namespace, self.address(family))

    async def reaches(self, other: Pod, *, port: int = 80, transport: Transport = TCP, family: int = 4) -> bool:
        """Whether the other pod, and no one else, hears and answers this one."""
        return await traffic.reaches(self.place(family), other.place(family), port=port, transport=transport)

    async def never_reaches(self, other: Pod, *, port: int = 80, transport: Transport = TCP, family: int = 4) -> bool:
        """Whether nothing from this pod comes to the other one."""
        return await traffic.never_reaches(self.place(family), other.place(family), port=port, transport=transport)

    async def dig(self, *question: str, family: int = 4) -> list[str]:
        """What the first name server of a family that ADD told answers; see `dig +short`."""
        return await dig(self.namespace, *question, server=self._name_server(family))

    async def dig_in_full(self, *question: str, family: int = 4) -> str:
        """All that `dig` says of the answer."""
        return await dig_in_full(self.namespace, *question, server=self._name_server(family))

    def _name_server(self, family: int) -> str:
        return next(each for each in self.result.dns.nameservers if ip_address(each).version == family)

    async def check(self) -> None:
        """CHECK; `CniError` with what differs."""
        await self.host.cni.check(self.host.network, self.attachment)

    async def detach(self) -> None:
        """DEL; the namespace stays."""
        await self.host.cni.delete(self.host.network, self.attachment)

    async def remove(self) -> None:
        """DEL, then the namespace goes, as when a pod ends."""
        await self.detach()
        self.host.remove_netns(self.name)
