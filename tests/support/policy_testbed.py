"""A tenant netns with pods, and probe packets that are followed until they arrive or a drop is reported."""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from weft.adapters.linux.datapath import LinuxDatapath
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import BITS, Address, mac_of, parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Port, StateItem, TenantNetns
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import ICMP, ICMPV6, SCTP, TCP, UDP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import WORKLOAD, IpIdentity, PolicyEntry, PolicyItem, VerdictCounter
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import Drop, EndpointConfig, InterfaceAddress

TENANT = TenantName("blue")
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_LOOK_AGAIN_S = 0.01
_MTU = 1450
_SEGMENT = 7
_LENGTHS = {4: 24, 6: 112}
_ICMPV6_FILTER = 1
# A bit for each type that is kept away.
_ECHOES_ONLY = ((1 << 256) - 1 - (1 << 128)).to_bytes(32, "little")
_VTEP = parse_address("127.0.0.1", field="vtep")


class Pod(NamedTuple):
    """A workload: its namespace, its endpoint configuration and its identity number."""

    namespace: Namespace
    config: EndpointConfig
    number: int

    def address(self, family: int) -> Address:
        return next(each.address for each in self.config.addresses if each.address.family == family)

    def ip_identities(self) -> tuple[IpIdentity, ...]:
        return tuple(IpIdentity(TENANT, each.address, self.number) for each in self.config.addresses)

    def open_socket(self, family: int, kind: int, protocol: int = 0, *, port: int = 0) -> socket.socket:
        """A socket of the pod's address that never blocks."""
        opened = self.namespace.open_socket(_FAMILIES[family], kind, protocol)
        opened.setblocking(False)
        opened.bind((str(self.address(family)), port))
        return opened


class PolicyTestbed:
    """One tenant on one node. Pods have numbers from 1 on, their addresses end in them, and so do their identities."""

    def __init__(self, directory: Path, closing: ExitStack, *, fwdmode: str) -> None:
        self.segment = Segment(TENANT, _SEGMENT, floods=False) if fwdmode == "bridge" else None
        self._tenants = directory / "tenants"
        self._pods = NamespaceDirectory(directory / "pods")
        self._pods.prepare()
        self._closing = closing
        self._netns: TenantNetnsDriver | None = None
        self.drops_seen: list[Drop] = []
        self._open()
        self.datapath.apply(Difference(self._base_items(), ()))
        self.datapath.drops()

    def _base_items(self) -> tuple[StateItem, ...]:
        return (TenantNetns(TENANT), self.segment) if self.segment else (TenantNetns(TENANT),)

    def _open(self) -> None:
        self.datapath = LinuxDatapath(directory=self._tenants, vtep=_VTEP, vxlan_port=4789)
        self.datapath.__enter__()

    def close(self) -> None:
        self.datapath.__exit__(None, None, None)

    def restart(self) -> None:
        """Replace the datapath by a new one, as a restart does."""
        self.close()
        self._open()
        self.datapath.drops()

    @property
    def netns(self) -> TenantNetnsDriver:
        """A driver of the tenant netns beside that of the datapath."""
        if self._netns is None:
            self._netns = self._closing.enter_context(TenantNetnsDriver(NamespaceDirectory(self._tenants).open(TENANT)))
        return self._netns

    def pod(self, number: int, *, ready: bool = True) -> Pod:
        """A plugged pod; without `ready` its identity is not known."""
        pod = self.unplugged_pod(number)
        self.datapath.plug(pod.config, Difference(pod.ip_identities() if ready else (), ()))
        return pod

    def unplugged_pod(self, number: int) -> Pod:
        """A pod that has a namespace and is to be plugged by the caller."""
        addresses = tuple(parse_address(text, field="pod") for text in (f"10.0.0.{number}", f"fd00::{number:x}"))
        lengths = _LENGTHS if self.segment else BITS
        name = f"pod{number}"
        namespace = self._closing.enter_context(self._pods.create(name))
        config = EndpointConfig(
            port=Port(TENANT, f"wp{number}", mac_of(addresses[0]), addresses, _SEGMENT if self.segment else 0),
            netns=str(self._pods.path / name),
            interface="eth0",
            addresses=tuple(InterfaceAddress(each, lengths[each.family]) for each in addresses),
            mtu=_MTU,
        )
        return Pod(namespace, config, WORKLOAD | number)

    def unplug(self, pod: Pod) -> None:
        """Remove the pod."""
        self.datapath.unplug(pod.config, Difference((), pod.ip_identities()))

    def put(self, *items: PolicyItem) -> None:
        """Apply state items, with a counter for each verdict in them."""
        self.datapath.apply(Difference((*counters_of(items), *items), ()))

    def drop(self, *items: PolicyItem) -> None:
        self.datapath.apply(Difference((), items))

    def items(self, pods: Iterable[Pod], policy: Sequence[PolicyItem] = ()) -> Set[StateItem]:
        """Return the desired state for these pods and this policy."""
        found: set[StateItem] = {*self._base_items(), *counters_of(policy), *policy}
        for pod in pods:
            found |= {pod.config.port, *pod.ip_identities()}
        return found

    def count(self, verdict_id: int | str) -> int:
        """Return the packets counted for a verdict or a drop reason."""
        (counters,) = (each for each in self.datapath.counters() if each.tenant)
        return counters.reasons[verdict_id] if isinstance(verdict_id, str) else counters.verdicts[verdict_id]

    def wait_for_drop(self, source: Address | None = None) -> Drop:
        """Return the next reported drop, of this source if one is given."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            self.drops_seen += self.datapath.drops()
            for position, drop in enumerate(self.drops_seen):
                if source in (None, drop.source):
                    return self.drops_seen.pop(position)
            select.select([], [], [], _LOOK_AGAIN_S)
        raise AssertionError("nothing was dropped")

    def probe(self, source: Pod, target: Pod, protocol: int, port: int = 0, *, family: int = 4) -> int | str:
        """Send a first packet; return 0 if it arrives, else the verdict id or the drop reason."""
        with sending(source, target, protocol, port, family=family) as arrived:
            return self.packet_result(arrived, source.address(family))

    def packet_result(self, arrived: socket.socket, source: Address) -> int | str:
        """Return 0 when the socket is readable, else the verdict id or drop reason of a packet of the source."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if select.select([arrived], [], [], _LOOK_AGAIN_S)[0]:
                return 0
            self.drops_seen += self.datapath.drops()
            for position, drop in enumerate(self.drops_seen):
                if drop.source == source:
                    self.drops_seen.pop(position)
                    return drop.reason or drop.verdict_id
        raise AssertionError("it neither arrived nor was it dropped")


@contextmanager
def open_testbed(directory: Path, *, fwdmode: str = "routing") -> Iterator[PolicyTestbed]:
    """Open a testbed in the calling thread's namespaces, with its mounts in a directory of its own."""
    with ExitStack() as closing:
        testbed = PolicyTestbed(directory, closing, fwdmode=fwdmode)
        closing.callback(testbed.close)
        yield testbed


def policy_entry(
    direction: Direction,
    local: Pod,
    remote: Pod | int | None,
    verdict_id: int,
    *,
    protocol: int | None = None,
    ports: tuple[int, int] | None = None,
) -> PolicyEntry:
    """Return a policy entry for pods; the remote end may be any identity, or None for all."""
    number = remote.number if isinstance(remote, Pod) else remote
    return PolicyEntry(TENANT, direction, local.number, number, verdict_id, protocol, ports)


def counters_of(items: Iterable[PolicyItem]) -> tuple[VerdictCounter, ...]:
    verdicts = {item.verdict_id for item in items if isinstance(item, PolicyEntry)}
    return tuple(VerdictCounter(TENANT, verdict_id) for verdict_id in sorted(verdicts))


@contextmanager
def sending(source: Pod, target: Pod, protocol: int, port: int, *, family: int) -> Iterator[socket.socket]:
    """Send one packet; the socket of the target is readable when it arrives."""
    where = str(target.address(family))
    with ExitStack() as closing:
        if protocol == TCP:
            listener = closing.enter_context(target.open_socket(family, socket.SOCK_STREAM, port=port))
            listener.listen()
            client_socket = closing.enter_context(source.open_socket(family, socket.SOCK_STREAM))
            started = client_socket.connect_ex((where, port))
            assert started in (0, errno.EINPROGRESS)
        elif protocol == UDP:
            listener = closing.enter_context(target.open_socket(family, socket.SOCK_DGRAM, port=port))
            client_socket = closing.enter_context(source.open_socket(family, socket.SOCK_DGRAM))
            client_socket.sendto(b"?", (where, port))
        else:
            listener = closing.enter_context(target.open_socket(family, socket.SOCK_RAW, protocol))
            if protocol == ICMPV6:  # on a bridge there is neighbour discovery too
                listener.setsockopt(socket.IPPROTO_ICMPV6, _ICMPV6_FILTER, _ECHOES_ONLY)
            client_socket = closing.enter_context(source.open_socket(family, socket.SOCK_RAW, protocol))
            client_socket.sendto(_content(protocol, port), (where, 0))
        yield listener


def _content(protocol: int, port: int) -> bytes:
    if protocol == ICMP:
        return struct.pack(">BBHHH", 8, 0, 0xF7FD, 1, 1)
    if protocol == ICMPV6:
        return struct.pack(">BBHHH", 128, 0, 0, 1, 1)  # the kernel puts the checksum in
    if protocol == SCTP:
        return sctp_packet(40000, port)
    return b"?" * 8


def sctp_packet(source_port: int, target_port: int) -> bytes:
    """The first packet of an association."""
    chunk = struct.pack(">BBHIIHHI", 1, 0, 20, 7, 65536, 1, 1, 1)
    header = struct.pack(">HHI", source_port, target_port, 0)
    return header + crc32c(header + bytes(4) + chunk).to_bytes(4, "little") + chunk


def crc32c(data: bytes) -> int:
    """The checksum of SCTP, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
