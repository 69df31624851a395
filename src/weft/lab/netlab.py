"""The lab: hosts are network namespaces on an underlay bridge, run the real programs, and attach pods by CNI.

The caller must be in private network and mount namespaces (`weft.lab.namespaces`): the lab creates devices and mounts
without asking. They vanish with those namespaces, and every process ends with its parent.
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
from typing import Final, TypeVar

from weft.cni.capabilities import CAPABILITIES
from weft.cni.install import PROGRAM, WEFT_CONF, build_program, install
from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import (
    LOOPBACK_IFINDEX,
    Device,
    change_link,
    create_bridge,
    create_veth,
    delete_link,
    read_link,
)
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.lab.hosts import Host
from weft.lab.namespaces import mount, unmount
from weft.lab.partition import PartitionProxy, StreamAddress
from weft.lab.servers.etcd import Etcd, running_etcd
from weft.lab.servers.masters import MasterProcess, Rest, client
from weft.lab.servers.openvswitch import Switch
from weft.lab.waiting import DEADLINE

H = TypeVar("H", bound=Host)

_BRIDGE = "underlay"
# A second bridge, for 802.1Q frames, which it floods with their tags. Not all kernels have VLAN-aware bridges
# (CONFIG_BRIDGE_VLAN_FILTERING), and a bridge that learns MACs regardless of tags loses frames of tenants that use
# the same MAC on different hosts.
_TRUNK = "trunk"
# The hosts' devices on the trunk; agents get the first as --vlan-uplinks.
UPLINKS = ("eth1", "eth2")
_UNDERLAY = IPv4Address("192.0.2.0")
_PREFIX_LENGTH = 24
# The lab's own host number on the underlay, where hosts reach the store by TCP.
_LAB_NUMBER = 254
# Many distributions set strict reverse path filtering, so the lab does too.
_STRICT_RP_FILTER = {"net/ipv4/conf/all/rp_filter": "1", "net/ipv4/conf/default/rp_filter": "1"}

_CONFIG: dict[str, object] = {
    "cniVersion": "1.1.0",
    "name": "weft",
    "plugins": [{"type": PROGRAM, "capabilities": dict.fromkeys(CAPABILITIES, True)}],
}


# The parts of a lab's name, with their defaults.
_MODES: Final = {"datapath": "linux", "netmode": "vxlan", "fwdmode": "routing"}


def lab_modes(name: str, **defaults: str) -> dict[str, str]:
    """Keyword arguments of `open_lab` from a name such as `ovs-vlan-bridge`; parts left out have their defaults."""
    return _MODES | defaults | dict(zip(_MODES, name.split("-"), strict=False))


@functools.cache
def _program(shim: str) -> bytes:
    # Cached: compiling the C shim takes a second, and tests open many labs.
    return build_program(shim, python="/usr/bin/python3")


class NetLab:
    """An open lab. Hosts are numbered in the order of creation: the first is 192.0.2.1."""

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
        # The lab's own address on the underlay.
        self.address = str(_UNDERLAY + _LAB_NUMBER)
        # The default datapath of hosts.
        self.datapath = datapath
        # The default encapsulation of networks.
        self.netmode = netmode
        # The initial forwarding mode.
        self.fwdmode = fwdmode
        self.etcd = etcd
        self._program = _program(shim)
        self._stack = stack
        self._namespace = stack.enter_context(Namespace.current())
        self._netlink = stack.enter_context(NetlinkSocket(NETLINK_ROUTE, namespace=self._namespace))
        self._host_namespaces = NamespaceDirectory(directory / "hosts")
        flags: tuple[str, ...] = ("--etcd-endpoints", ",".join(etcd.endpoints)) if etcd else ()
        # A short lease, so that tests of leader changes take seconds.
        flags += ("--store-socket", str(self.store_socket), "--leader-ttl", "2")
        flags += ("--netmode", netmode, "--fwdmode", fwdmode)
        self.master = MasterProcess(directory, *flags)
        # Counts veths, not hosts: a rebooted host gets new device names, because the kernel removes the old ones late.
        self._veth_count = 0
        self._trunk_learns = False
        self._numbers: dict[str, int] = {}
        self.hosts: dict[str, Host] = {}

    @property
    def store_socket(self) -> Path:
        """Where netmaster serves the store to agents."""
        return self.directory / "store.sock"

    async def start(self) -> None:
        """Create the underlay, start netmaster, and open the REST client `rest`."""
        self._host_namespaces.prepare()
        self._bridge, self._trunk = self._make_bridge(_BRIDGE), self._make_bridge(_TRUNK)
        address = LinkAddress(link=self._bridge, prefix=_underlay_prefix(_LAB_NUMBER))
        self._netlink.send_batch([put_address(address)])
        await self._stack.enter_async_context(self.master)
        self.rest: Rest = await self._stack.enter_async_context(client(self.master.url))

    def _make_bridge(self, name: str) -> int:
        self._netlink.send_batch([create_bridge(Device(name=name))])
        bridge = read_link(self._netlink, name)
        assert bridge is not None
        # Tests open one lab after another in the same namespace.
        self._stack.callback(self._netlink.send_batch, [delete_link(bridge.index)])
        self._netlink.send_batch([change_link(bridge.index, up=True)])
        return bridge.index

    async def host(self, name: str, *flags: str, datapath: str = "") -> Host:
        """Create a host and wait until its agent is ready; `flags` are for netplugin.

        It has the lab's datapath by default. With `ovs` it runs its own Open vSwitch.
        """
        return await self.add(Host, name, *flags, datapath=datapath)

    async def add(self, kind: type[H], name: str, *flags: str, datapath: str = "") -> H:
        """The same for a subclass of `Host`."""
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
        proxy, store_flag = self._make_store_proxy(home, number)
        await self._stack.enter_async_context(proxy)
        own: tuple[str, ...] = (
            *store_flag,
            "--vtep-ip",
            address,
            "--ctrl-ip",
            address,
            "--datapath",
            datapath or self.datapath,
        )
        own += ("--netmode", self.netmode, "--vlan-uplinks", UPLINKS[0]) if self.netmode == "vlan" else ()
        host = kind(name, home, address=address, store_proxy=proxy, flags=(*own, *flags))
        if "ovs" in own:
            host.switch = Switch(home / "ovs")
        self._stack.callback(host.close)
        self.hosts[name] = host
        self.connect(host)
        await host.start()
        return host

    def connect(self, host: Host) -> None:
        """Give a host a new network namespace with a veth on the underlay and, in VLAN mode, uplinks on the trunk."""
        self._veth_count += 1
        host.underlay_veth = f"u{self._veth_count}"
        self._stack.callback(self._delete_veths, host.underlay_veth)
        # New at each boot, as the kernel's.
        host.boot_id.write_text(f"{uuid.uuid4()}\n")
        name = f"{host.name}-{self._veth_count}"
        host.netns = self._host_namespaces.path / name
        end, peer = Device(name=host.underlay_veth), Device(name="eth0")
        with self._host_namespaces.create(name) as netns, NetlinkSocket(NETLINK_ROUTE, namespace=netns) as inside:
            netns.write_sysctls(_STRICT_RP_FILTER)
            self._netlink.send_batch([create_veth(end, peer, peer_namespace=netns.fd, master=self._bridge)])
            self._set_link(host.underlay_veth, up=True)
            link = read_link(inside, "eth0")
            assert link is not None
            address = LinkAddress(link=link.index, prefix=_underlay_prefix(self._numbers[host.name]))
            inside.send_batch(
                [change_link(LOOPBACK_IFINDEX, up=True), change_link(link.index, up=True), put_address(address)]
            )
            for uplink in UPLINKS if self.netmode == "vlan" else ():
                end, peer = Device(name=f"{host.underlay_veth}-{uplink}"), Device(name=uplink)
                self._netlink.send_batch([create_veth(end, peer, peer_namespace=netns.fd, master=self._trunk)])
                set_learning(end.name, on=self._trunk_learns)
                self._set_link(end.name, up=True)

    def enable_trunk_learning(self) -> None:
        """Let the trunk learn MACs instead of flooding: for tests without duplicate MACs."""
        self._trunk_learns = True
        for host in self.hosts.values():
            for veth in self._veths(host.underlay_veth)[1:]:
                set_learning(veth, on=True)

    async def reboot(self, host: Host) -> None:
        """Reboot a host: it loses all kernel state, pods included, and keeps its disk."""
        # The kernel removes a network namespace asynchronously: until then the old one answers ARP for the address.
        self._delete_veths(host.underlay_veth)
        host.lose_kernel_state()
        self._host_namespaces.delete(host.netns.name)
        self.connect(host)
        await host.start()

    async def partition(self, host: Host) -> None:
        """Isolate a host from the other hosts and from the store."""
        self._set_veths(host, up=False)
        await host.store_proxy.block()

    def heal(self, host: Host) -> None:
        """End a partition."""
        self._set_veths(host, up=True)
        host.store_proxy.unblock()

    async def tenant(self, name: str) -> None:
        (await self.rest.put("tenants", tenantName=name)).accepted()

    async def network(self, name: str, *, tenant: str = "default", subnet: str, **members: object) -> None:
        """Create a network with the lab's encapsulation by default; `members` are REST members."""
        network: Mapping[str, object] = {"tenantName": tenant, "networkName": name, "subnet": subnet}
        (await self.rest.put("networks", **network, **{"encap": self.netmode, **members})).accepted()

    async def group(self, name: str, *, network: str, tenant: str = "default", **members: object) -> None:
        (
            await self.rest.put("endpointGroups", tenantName=tenant, groupName=name, networkName=network, **members)
        ).accepted()

    def print_logs(self, *, lines: int = 40) -> None:
        """Print the last lines of every log to stderr, to study a failure."""
        for file in sorted(filter(Path.is_file, self.directory.rglob("*.log"))):
            tail = "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
            sys.stderr.write(f"--- {file.relative_to(self.directory)}\n{tail}\n")

    def _make_store_proxy(self, home: Path, number: int) -> tuple[PartitionProxy, tuple[str, str]]:
        """The proxy to the store, and the agent's flag for it."""
        if self.etcd is None:
            path = home / "store.sock"
            return PartitionProxy(path, to=self.store_socket), ("--netmaster", f"unix:{path}")
        port = 20_000 + number
        target: StreamAddress = ("127.0.0.1", int(self.etcd.endpoints[0].rpartition(":")[2]))
        return PartitionProxy((self.address, port), to=target), ("--etcd-endpoints", f"http://{self.address}:{port}")

    def _veths(self, underlay_veth: str) -> list[str]:
        """The lab's ends of a host's veths: the underlay's first, then those of its VLAN uplinks."""
        return [underlay_veth, *(f"{underlay_veth}-{uplink}" for uplink in UPLINKS if self.netmode == "vlan")]

    def _delete_veths(self, underlay_veth: str) -> None:
        """Delete a host's veths now: the kernel removes namespaces, and veths in them, asynchronously."""
        links = (read_link(self._netlink, name) for name in self._veths(underlay_veth))
        self._netlink.send_batch([delete_link(link.index) for link in links if link is not None])

    def _set_veths(self, host: Host, *, up: bool) -> None:
        for name in self._veths(host.underlay_veth):
            self._set_link(name, up=up)

    def _set_link(self, name: str, *, up: bool) -> None:
        link = read_link(self._netlink, name)
        assert link is not None
        self._netlink.send_batch([change_link(link.index, up=up)])


def set_learning(device: str, *, on: bool) -> None:
    """Set MAC learning of a bridge port in the lab's own namespace."""
    command = ["ip", "link", "set", device, "type", "bridge_slave", "learning", "on" if on else "off"]
    subprocess.run(command, check=True, timeout=DEADLINE)


def _underlay_prefix(number: int) -> Prefix:
    return Prefix(parse_address(str(_UNDERLAY + number), field="underlay"), _PREFIX_LENGTH)


@asynccontextmanager
async def open_lab(
    *,
    store: str = "embedded",
    shim: str = "auto",
    datapath: str = "linux",
    netmode: str = "vxlan",
    fwdmode: str = "routing",
) -> AsyncIterator[NetLab]:
    """Open a lab without hosts.

    `store` is embedded or etcd; `shim` is auto, c or python; `datapath` is linux or ovs; `netmode` is vxlan or, with
    ovs, vlan; `fwdmode` is routing or bridge.
    """
    async with AsyncExitStack() as stack:
        # A short path, because sun_path of unix sockets has 108 bytes; a tmpfs, so that it vanishes with the namespace.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True)))
        mount(None, directory, kind="tmpfs")
        stack.callback(unmount, directory)
        etcd = await stack.enter_async_context(running_etcd(directory / "etcd")) if store == "etcd" else None
        lab = NetLab(directory, shim=shim, datapath=datapath, netmode=netmode, fwdmode=fwdmode, etcd=etcd, stack=stack)
        await lab.start()
        yield lab
