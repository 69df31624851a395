"""The lab: hosts as namespaces on an underlay, our real programs in them, pods attached as runtimes do it.

The caller must be in network and mount namespaces of its own (`weft.lab.namespaces`): the lab makes what it likes there.
All of it is gone with those namespaces, and every process with the one that started it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar

from weft.cni.capabilities import CAPABILITIES
from weft.cni.install import PROGRAM, WEFT_CONF, build_program, install
from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import LOOPBACK, Device, alter_link, create_bridge, create_veth, delete_link, read_link
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.hosts import Host
from weft.lab.namespaces import mount, unmount
from weft.lab.partition import Partition, Place
from weft.lab.servers.etcd import Etcd, running_etcd
from weft.lab.servers.masters import MasterProcess, Rest, client
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE

H = TypeVar("H", bound=Host)

_BRIDGE = "underlay"
# The second wire, of frames with VLAN tags, which a plain bridge passes on as they are, to everybody. Not all kernels
# have bridges that learn for each tag who is where, as switches do. One that learns without regard to tags loses
# frames of tenants that have the same MAC at different places.
_TRUNK = "trunk"
# What hosts have on it; their agents are told of the first.
UPLINKS = ("eth1", "eth2")
_UNDERLAY = IPv4Address("192.0.2.0")
_LENGTH = 24
# The lab's own place on the underlay, where hosts reach the store by TCP.
_OWN_NUMBER = 254
_STRICT = {"net/ipv4/conf/all/rp_filter": "1", "net/ipv4/conf/default/rp_filter": "1"}

_CONFIG: dict[str, object] = {
    "cniVersion": "1.1.0",
    "name": "weft",
    "plugins": [{"type": PROGRAM, "capabilities": dict.fromkeys(CAPABILITIES, True)}],
}


@functools.cache
def _program(shim: str) -> bytes:
    return build_program(shim, python="/usr/bin/python3")


class NetLab:
    """An open lab. Hosts are numbered in the order of their coming: the first is 192.0.2.1."""

    def __init__(
        self,
        directory: Path,
        *,
        shim: str,
        datapath: str,
        netmode: str,
        fwdmode: str,
        etcd: Etcd | None,
        stack: AsyncExitStack,
    ) -> None:
        self.directory = directory
        # Where the lab itself is on the underlay.
        self.address = str(_UNDERLAY + _OWN_NUMBER)
        # That of its hosts, unless one is given another.
        self.datapath = datapath
        # The encapsulation of networks, unless one is given another.
        self.netmode = netmode
        # How they are forwarded at first.
        self.fwdmode = fwdmode
        self.etcd = etcd
        self._program = _program(shim)
        self._stack = stack
        self._namespace = stack.enter_context(Namespace.current())
        self._netlink = stack.enter_context(NetlinkSocket(ROUTE, namespace=self._namespace))
        self._spaces = NamespaceDirectory(directory / "hosts")
        flags: tuple[str, ...] = ("--etcd-endpoints", ",".join(etcd.endpoints)) if etcd else ()
        flags += ("--store-socket", str(self.store_socket), "--leader-ttl", "2")
        flags += ("--netmode", netmode, "--fwdmode", fwdmode)
        self.master = MasterProcess(directory, *flags)
        self._cables = 0
        self._trunk_learns = False
        self._numbers: dict[str, int] = {}
        self.hosts: dict[str, Host] = {}

    @property
    def store_socket(self) -> Path:
        """Where netmaster serves the store to agents."""
        return self.directory / "store.sock"

    async def start(self) -> None:
        """The underlay and netmaster; the client `rest` speaks to it."""
        self._spaces.prepare()
        self._bridge, self._trunk = self._make_bridge(_BRIDGE), self._make_bridge(_TRUNK)
        own = LinkAddress(link=self._bridge, prefix=_on_underlay(_OWN_NUMBER))
        self._netlink.send_batch([put_address(own)])
        await self._stack.enter_async_context(self.master)
        self.rest: Rest = await self._stack.enter_async_context(client(self.master.url))

    def _make_bridge(self, name: str) -> int:
        self._netlink.send_batch([create_bridge(Device(name=name))])
        bridge = read_link(self._netlink, name)
        assert bridge is not None
        # Another lab may come to the same namespace.
        self._stack.callback(self._netlink.send_batch, [delete_link(bridge.index)])
        self._netlink.send_batch([alter_link(bridge.index, up=True)])
        return bridge.index

    async def host(self, name: str, *flags: str, datapath: str = "") -> Host:
        """A new host with its agent, ready for pods; `flags` are for netplugin.

        It has the lab's datapath unless another is given; for `ovs` it has an Open vSwitch.
        """
        return await self.add(Host, name, *flags, datapath=datapath)

    async def add(self, kind: type[H], name: str, *flags: str, datapath: str = "") -> H:
        """The same of any kind of host."""
        self._numbers[name] = number = len(self._numbers) + 1
        home = self.directory / name
        home.mkdir()
        install(
            bin_dir=home / "bin",
            conf_dir=home / "net.d",
            program=self._program,
            config=(WEFT_CONF, json.dumps(_CONFIG).encode()),
            force=False,
        )
        address = str(_UNDERLAY + number)
        door, store = self._make_door(home, number)
        await self._stack.enter_async_context(door)
        own: tuple[str, ...] = (
            *store,
            "--vtep-ip",
            address,
            "--ctrl-ip",
            address,
            "--datapath",
            datapath or self.datapath,
        )
        own += ("--netmode", self.netmode, "--vlan-uplinks", UPLINKS[0]) if self.netmode == "vlan" else ()
        host = kind(name, home, address=address, door=door, flags=(*own, *flags))
        if "ovs" in own:
            host.switch = Switch(home / "ovs")
        self._stack.callback(host.close)
        self.hosts[name] = host
        self.connect(host)
        await host.start()
        return host

    def connect(self, host: Host) -> None:
        """Give a host a machine: a fresh namespace on the underlay and, for VLAN tags, on the second wire."""
        self._cables += 1
        host.cable = f"u{self._cables}"
        self._stack.callback(self._drop_cables, host.cable)
        host.boot_id.write_text(f"{uuid.uuid4()}\n")
        name = f"{host.name}-{self._cables}"
        host.machine = self._spaces.path / name
        end, peer = Device(name=host.cable), Device(name="eth0")
        with self._spaces.create(name) as space, NetlinkSocket(ROUTE, namespace=space) as inside:
            space.write_sysctls(_STRICT)
            self._netlink.send_batch([create_veth(end, peer, peer_namespace=space.fd, master=self._bridge)])
            self._raise(host.cable, up=True)
            link = read_link(inside, "eth0")
            assert link is not None
            address = LinkAddress(link=link.index, prefix=_on_underlay(self._numbers[host.name]))
            inside.send_batch([alter_link(LOOPBACK, up=True), alter_link(link.index, up=True), put_address(address)])
            for uplink in UPLINKS if self.netmode == "vlan" else ():
                end, peer = Device(name=f"{host.cable}-{uplink}"), Device(name=uplink)
                self._netlink.send_batch([create_veth(end, peer, peer_namespace=space.fd, master=self._trunk)])
                set_learning(end.name, on=self._trunk_learns)
                self._raise(end.name, up=True)

    def teach_trunk(self) -> None:
        """From now on the second wire learns who is where: for tests in which no MAC is at two places."""
        self._trunk_learns = True
        for host in self.hosts.values():
            for cable in self._cables_of(host.cable)[1:]:
                set_learning(cable, on=True)

    async def reboot(self, host: Host) -> None:
        """All that the host's kernel knew is gone, pods included; what was on its disk is there."""
        # The kernel takes down a namespace when it gets round to it: until then the old machine has the same address.
        self._drop_cables(host.cable)
        host.lose_kernel_state()
        self._spaces.delete(host.machine.name)
        self.connect(host)
        await host.start()

    async def partition(self, host: Host) -> None:
        """Cut a host off: from the other hosts, and from the store."""
        self._raise_cable(host, up=False)
        await host.door.shut()

    def heal(self, host: Host) -> None:
        """The end of a partition."""
        self._raise_cable(host, up=True)
        host.door.open()

    async def tenant(self, name: str) -> None:
        (await self.rest.put("tenants", tenantName=name)).accepted()

    async def network(self, name: str, *, tenant: str = "default", subnet: str, **members: object) -> None:
        """A network, of the lab's mode unless `encap` is given; further members by their names in JSON."""
        network: Mapping[str, object] = {"tenantName": tenant, "networkName": name, "subnet": subnet}
        (await self.rest.put("networks", **network, **{"encap": self.netmode, **members})).accepted()

    async def group(self, name: str, *, network: str, tenant: str = "default", **members: object) -> None:
        (
            await self.rest.put("endpointGroups", tenantName=tenant, groupName=name, networkName=network, **members)
        ).accepted()

    def tell_logs(self, *, lines: int = 40) -> None:
        """Write the end of every log to stderr, for a person who looks at a failure."""
        for file in sorted(filter(Path.is_file, self.directory.rglob("*.log"))):
            tail = "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
            sys.stderr.write(f"--- {file.relative_to(self.directory)}\n{tail}\n")

    def _make_door(self, home: Path, number: int) -> tuple[Partition, tuple[str, str]]:
        """The host's way to the store, and the flag that tells its agent."""
        if self.etcd is None:
            place = home / "store.sock"
            return Partition(place, to=self.store_socket), ("--netmaster", f"unix:{place}")
        port = 20_000 + number
        target: Place = ("127.0.0.1", int(self.etcd.endpoints[0].rpartition(":")[2]))
        return Partition((self.address, port), to=target), ("--etcd-endpoints", f"http://{self.address}:{port}")

    def _cables_of(self, cable: str) -> list[str]:
        """A host's cable and, where it has uplinks, those of them."""
        return [cable, *(f"{cable}-{uplink}" for uplink in UPLINKS if self.netmode == "vlan")]

    def _drop_cables(self, cable: str) -> None:
        """Another lab may come to the same namespace before the kernel has taken a machine down."""
        links = (read_link(self._netlink, name) for name in self._cables_of(cable))
        self._netlink.send_batch([delete_link(link.index) for link in links if link is not None])

    def _raise_cable(self, host: Host, *, up: bool) -> None:
        for name in self._cables_of(host.cable):
            self._raise(name, up=up)

    def _raise(self, name: str, *, up: bool) -> None:
        link = read_link(self._netlink, name)
        assert link is not None
        self._netlink.send_batch([alter_link(link.index, up=up)])


def set_learning(device: str, *, on: bool) -> None:
    """Whether the bridge of a device in the lab's own namespace learns from what comes by it."""
    command = ["ip", "link", "set", device, "type", "bridge_slave", "learning", "on" if on else "off"]
    subprocess.run(command, check=True, timeout=DEADLINE)


def _on_underlay(number: int) -> Prefix:
    return Prefix(parse_address(str(_UNDERLAY + number), field="underlay"), _LENGTH)


@asynccontextmanager
async def open_lab(
    *,
    store: str = "embedded",
    shim: str = "auto",
    datapath: str = "linux",
    netmode: str = "vxlan",
    fwdmode: str = "routing",
) -> AsyncIterator[NetLab]:
    """A lab without hosts yet.

    `store` is embedded or etcd, `shim` auto, c or python, `datapath` linux or ovs, `netmode` vxlan or, where that is
    ovs, vlan, `fwdmode` routing or bridge.
    """
    async with AsyncExitStack() as stack:
        # Short, because the names of unix sockets are; in memory, because it is to be gone with the namespace.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True)))
        mount(None, directory, kind="tmpfs")
        stack.callback(unmount, directory)
        etcd = await stack.enter_async_context(running_etcd(directory / "etcd")) if store == "etcd" else None
        lab = NetLab(directory, shim=shim, datapath=datapath, netmode=netmode, fwdmode=fwdmode, etcd=etcd, stack=stack)
        await lab.start()
        yield lab
