"""A host of the lab with its agent, its netdns, its CNI runtime and its pods."""

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
from weft.lab.partition import PartitionProxy
from weft.lab.servers.openvswitch import Switch
from weft.lab.servers.processes import Child
from weft.lab.traffic import TCP, IPAddress, Transport
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff

# The CNI network of every host.
NETWORK = "weft"

_CONFIG = {"cniVersion": "1.1.0", "name": NETWORK, "type": PROGRAM}


class Host:
    """A host of the lab. Its directory `home` is its disk and survives a reboot."""

    def __init__(
        self, name: str, home: Path, *, address: str, store_proxy: PartitionProxy, flags: Sequence[str]
    ) -> None:
        self.name = name
        self.home = home
        self.address = address
        self.store_proxy = store_proxy
        # The underlay's end of the host's veth; `NetLab.connect` sets it and `netns` at each boot.
        self.underlay_veth = ""
        self.netns = Path()
        self.boot_id = home / "boot_id"
        self.socket = home / "cni.sock"
        self.tenants = NamespaceDirectory(home / "run" / "netns")
        self.network: NetworkList = read_network(home / "net.d", NETWORK)
        self.cni = Libcni(search_path=[home / "bin"], cache=ResultCache(home / "cache"), execute=self.execute)
        self.program = home / "bin" / PROGRAM
        # Further flags for the next start of its agent.
        self.flags = flags
        # Its Open vSwitch, with datapath ovs.
        self.switch: Switch | None = None
        self._pods = NamespaceDirectory(home / "pods")
        # Namespaces of pods that are held open, by pod.
        self._open: dict[str, Namespace] = {}
        self._agent: Child | None = None
        self._netdns: Child | None = None
        # Upstream resolvers for netdns; tests write the file.
        self.resolv_conf = home / "resolv.conf"
        for directory in (self.tenants, self._pods):
            directory.prepare()

    @property
    def agent(self) -> Child:
        """The agent's process, which must have been started."""
        assert self._agent is not None
        return self._agent

    @property
    def netdns(self) -> Child:
        """netdns's process, which must have been started."""
        assert self._netdns is not None
        return self._netdns

    async def start(self) -> None:
        """Start netdns, the switch and the agent with the state on disk; return when the agent is ready."""
        self.start_netdns()
        # Before netplugin, which would otherwise retry with a backoff until the switch is there.
        if self.switch is not None:
            self.switch.netns = self.netns
            self.switch.start()
        self.launch()
        await self.ready()

    def start_netdns(self) -> None:
        """Start netdns unless it runs; do not wait until it is ready."""
        if self._netdns is None:
            flags = (f"--run-dir={self.home / 'run'}", f"--resolv-conf={self.resolv_conf}")
            self._netdns = self._run("weft.dns.main", *flags, log="netdns.log")

    def kill_netdns(self) -> None:
        """Kill netdns with SIGKILL; idempotent."""
        if self._netdns is not None:
            with self._netdns:
                self._netdns = None

    def launch(self) -> None:
        """Start the agent, again if it runs."""
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
        """Run one of our programs on this host."""
        return Child.python(
            "weft.lab.run_in_netns", str(self.netns), str(self.boot_id), module, *flags, log=self.home / log
        )

    async def ready(self) -> None:
        """Return when CNI STATUS succeeds; `TimeoutError` after the deadline."""
        # STATUS also fails while the socket does not exist yet, with the shim's own error.
        backoff = Backoff(first=0.02, cap=0.2, within=DEADLINE)
        while True:
            try:
                await self.cni.status(self.network)
            except CniError as error:
                if not self.agent.running:
                    log = (self.home / "netplugin.log").read_text(errors="replace")[-2000:]
                    raise AssertionError(f"netplugin on {self.name} has ended:\n{log}") from error
                await backoff.pause()
            else:
                return

    def kill(self) -> None:
        """Kill the agent with SIGKILL; idempotent. Its datapath keeps forwarding."""
        if self._agent is not None:
            with self._agent:
                self._agent = None

    def close(self) -> None:
        """Kill agent, netdns and switch, and close the namespaces of pods."""
        self.kill()
        self.kill_netdns()
        if self.switch is not None:
            self.switch.close()
        # An open file descriptor would keep the namespace alive.
        for namespace in self._open.values():
            namespace.close()
        self._open.clear()

    def lose_kernel_state(self) -> None:
        """Drop what a reboot loses, except the host's own network namespace."""
        self.close()
        # On a real host /run is a tmpfs.
        (self.home / "run" / "zones").unlink(missing_ok=True)
        for directory in (self.tenants, self._pods):
            for name in directory.names():
                directory.delete(name)

    async def execute(self, program: Path, *, environment: Mapping[str, str], stdin: bytes) -> Output:
        """Run a plugin with this host's CNI socket."""
        own = {"WEFT_CNI_SOCKET": str(self.socket), "WEFT_CNI_LOG": str(self.home / "cni.log")}
        return await execute_here(program, environment={**environment, **own}, stdin=stdin)

    async def call(self, verb: str, config: Mapping[str, object] = _CONFIG, /, **variables: str) -> Output:
        """Run the plugin directly. `variables` are CNI_* in lower case without the prefix; others are unset."""
        named = {f"CNI_{name.upper()}": value for name, value in ({"command": verb} | variables).items()}
        return await self.execute(self.program, environment=named, stdin=json.dumps(config).encode())

    def make_netns(self, name: str) -> Path:
        """Create a network namespace for a pod, as a runtime does; idempotent."""
        if name not in self._open:
            self._open[name] = self._pods.create(name)
        return self._pods.path / name

    def remove_netns(self, name: str) -> None:
        """Delete a pod's namespace with all its devices; idempotent."""
        if namespace := self._open.pop(name, None):
            namespace.close()
        self._pods.delete(name)

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
        """The runtime's request for a pod's interface. Contiv's labels select tenant, network and group.

        `capabilities` become runtimeConfig.
        """
        labels = {"tenant": tenant, "network": network, "net-group": group}
        args = [(f"io.contiv.{key}", value) for key, value in labels.items() if value]
        # What every Kubernetes runtime passes; `weft drops` and `capture` name the pod by it.
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
        """Create and attach a pod; see `attachment` for the options. `CniError` if ADD fails."""
        attachment = self.attachment(name, **choices)
        return self.attached(attachment, await self.cni.add(self.network, attachment))

    def attached(self, attachment: Attachment, result: Result) -> Pod:
        """A pod from the result of its ADD."""
        return Pod(self, attachment, self._open[attachment.container], result)


class Pod:
    """An attached pod: its network namespace and the result of ADD."""

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
        """Its address of a family, from the result of ADD."""
        return next(item.address.ip for item in self.result.addresses if item.address.version == family)

    def place(self, family: int = 4) -> traffic.NetnsAddress:
        """Its namespace and address, as source or destination of packets."""
        return traffic.NetnsAddress(self.namespace, self.address(family))

    async def reaches(self, other: Pod, *, port: int = 80, transport: Transport = TCP, family: int = 4) -> bool:
        """Whether the first packet to the other pod arrives; see `traffic.reaches`."""
        return await traffic.reaches(self.place(family), other.place(family), port=port, transport=transport)

    async def eventually_reaches(
        self, other: Pod, *, port: int = 80, transport: Transport = TCP, family: int = 4
    ) -> bool:
        """The same with retries; see `traffic.eventually_reaches`."""
        return await traffic.eventually_reaches(self.place(family), other.place(family), port=port, transport=transport)

    async def never_reaches(self, other: Pod, *, port: int = 80, transport: Transport = TCP, family: int = 4) -> bool:
        """Whether no packet to the other pod arrives; see `traffic.never_reaches`."""
        return await traffic.never_reaches(self.place(family), other.place(family), port=port, transport=transport)

    async def dig(self, *question: str, family: int = 4) -> list[str]:
        """Query the first name server of a family in the result of ADD; see `dig +short`."""
        return await dig(self.namespace, *question, server=self._name_server(family))

    async def dig_in_full(self, *question: str, family: int = 4) -> str:
        """The same, with the full output of `dig`."""
        return await dig_in_full(self.namespace, *question, server=self._name_server(family))

    def _name_server(self, family: int) -> str:
        return next(server for server in self.result.dns.nameservers if ip_address(server).version == family)

    async def check(self) -> None:
        """Call CHECK; `CniError` if the interface differs."""
        await self.host.cni.check(self.host.network, self.attachment)

    async def detach(self) -> None:
        """Call DEL; the namespace stays."""
        await self.host.cni.delete(self.host.network, self.attachment)

    async def remove(self) -> None:
        """Call DEL, then delete the namespace, as when a pod ends."""
        await self.detach()
        self.host.remove_netns(self.name)
