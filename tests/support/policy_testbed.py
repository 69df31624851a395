"""A tenant's space with pods in it, and packets that are watched until they arrive or are told to be refused."""

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
from weft.domain.policy.policymap.policy_state import WORKLOAD, IpIdentity, PolicyEntry, PolicyPart, VerdictCounter
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
    """A workload: its namespace, its attachment, and its number in policy."""

    namespace: Namespace
    wiring: EndpointConfig
    number: int

    def address(self, family: int) -> Address:
        return next(each.address for each in self.wiring.addresses if each.address.family == family)

    def who(self) -> tuple[IpIdentity, ...]:
        return tuple(IpIdentity(TENANT, each.address, self.number) for each in self.wiring.addresses)

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
        self._space: TenantNetnsDriver | None = None
        self.told: list[Drop] = []
        self._open()
        self.datapath.apply(Difference(self._ground(), ()))
        self.datapath.drops()

    def _ground(self) -> tuple[StateItem, ...]:
        return (TenantNetns(TENANT), self.segment) if self.segment else (TenantNetns(TENANT),)

    def _open(self) -> None:
        self.datapath = LinuxDatapath(directory=self._tenants, vtep=_VTEP, vxlan_port=4789)
        self.datapath.__enter__()

    def close(self) -> None:
        self.datapath.__exit__(None, None, None)

    def restart(self) -> None:
        """A process with no memory takes over."""
        self.close()
        self._open()
        self.datapath.drops()

    @property
    def space(self) -> TenantNetnsDriver:
        """The tenant's space, by a way of its own."""
        if self._space is None:
            self._space = self._closing.enter_context(TenantNetnsDriver(NamespaceDirectory(self._tenants).open(TENANT)))
        return self._space

    def pod(self, number: int, *, ready: bool = True) -> Pod:
        """A plugged pod; without `ready` nobody has said who it is."""
        pod = self.coming_pod(number)
        self.datapath.plug(pod.wiring, Difference(pod.who() if ready else (), ()))
        return pod

    def coming_pod(self, number: int) -> Pod:
        """A pod that has a namespace and is to be plugged by the caller."""
        addresses = tuple(parse_address(text, field="pod") for text in (f"10.0.0.{number}", f"fd00::{number:x}"))
        lengths = _LENGTHS if self.segment else BITS
        name = f"pod{number}"
        namespace = self._closing.enter_context(self._pods.create(name))
        wiring = EndpointConfig(
            port=Port(TENANT, f"wp{number}", mac_of(addresses[0]), addresses, _SEGMENT if self.segment else 0),
            netns=str(self._pods.path / name),
            interface="eth0",
            addresses=tuple(InterfaceAddress(each, lengths[each.family]) for each in addresses),
            mtu=_MTU,
        )
        return Pod(namespace, wiring, WORKLOAD | number)

    def unplug(self, pod: Pod) -> None:
        """The pod leaves."""
        self.datapath.unplug(pod.wiring, Difference((), pod.who()))

    def put(self, *parts: PolicyPart) -> None:
        """Bring parts into force, with a count for every outcome in them."""
        self.datapath.apply(Difference((*tallies_of(parts), *parts), ()))

    def drop(self, *parts: PolicyPart) -> None:
        self.datapath.apply(Difference((), parts))

    def parts(self, pods: Iterable[Pod], policy: Sequence[PolicyPart] = ()) -> Set[StateItem]:
        """Everything that is wanted when these are there."""
        found: set[StateItem] = {*self._ground(), *tallies_of(policy), *policy}
        for pod in pods:
            found |= {pod.wiring.port, *pod.who()}
        return found

    def count(self, outcome: int | str) -> int:
        """How many packets met an outcome or a reason of our own."""
        (counters,) = self.datapath.counters()
        return counters.reasons[outcome] if isinstance(outcome, str) else counters.outcomes[outcome]

    def wait_for_drop(self, source: Address | None = None) -> Drop:
        """The next packet, of this source where one is given, that is told to be refused."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            self.told += self.datapath.drops()
            for position, drop in enumerate(self.told):
                if source in (None, drop.source):
                    return self.told.pop(position)
            select.select([], [], [], _LOOK_AGAIN_S)
        raise AssertionError("nothing was refused")

    def ask(self, source: Pod, target: Pod, protocol: int, port: int = 0, *, family: int = 4) -> int | str:
        """What becomes of a first packet: 0 when it arrives, else the outcome or the reason for which it does not."""
        with sending(source, target, protocol, port, family=family) as arrived:
            return self.fate(arrived, source.address(family))

    def fate(self, arrived: socket.socket, source: Address) -> int | str:
        """0 when the socket has something to read, else what a packet of the source was refused for."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if select.select([arrived], [], [], _LOOK_AGAIN_S)[0]:
                return 0
            self.told += self.datapath.drops()
            for position, drop in enumerate(self.told):
                if drop.source == source:
                    self.told.pop(position)
                    return drop.reason or drop.outcome
        raise AssertionError("it neither arrived nor was it refused")


@contextmanager
def open_ward(directory: Path, *, fwdmode: str = "routing") -> Iterator[PolicyTestbed]:
    """A ward in the calling thread's namespaces, with its pins in a directory of its own."""
    with ExitStack() as closing:
        ward = PolicyTestbed(directory, closing, fwdmode=fwdmode)
        closing.callback(ward.close)
        yield ward


def row(
    direction: Direction,
    local: Pod,
    remote: Pod | int | None,
    outcome: int,
    *,
    protocol: int | None = None,
    ports: tuple[int, int] | None = None,
) -> PolicyEntry:
    """A row about pods; the remote end may be any number, or everyone."""
    number = remote.number if isinstance(remote, Pod) else remote
    return PolicyEntry(TENANT, direction, local.number, number, outcome, protocol, ports)


def tallies_of(parts: Iterable[PolicyPart]) -> tuple[VerdictCounter, ...]:
    outcomes = {part.outcome for part in parts if isinstance(part, PolicyEntry)}
    return tuple(VerdictCounter(TENANT, outcome) for outcome in sorted(outcomes))


@contextmanager
def sending(source: Pod, target: Pod, protocol: int, port: int, *, family: int) -> Iterator[socket.socket]:
    """Send one packet; the socket of the target is readable when it arrives."""
    where = str(target.address(family))
    with ExitStack() as closing:
        if protocol == TCP:
            ear = closing.enter_context(target.open_socket(family, socket.SOCK_STREAM, port=port))
            ear.listen()
            caller = closing.enter_context(source.open_socket(family, socket.SOCK_STREAM))
            started = caller.connect_ex((where, port))
            assert started in (0, errno.EINPROGRESS)
        elif protocol == UDP:
            ear = closing.enter_context(target.open_socket(family, socket.SOCK_DGRAM, port=port))
            caller = closing.enter_context(source.open_socket(family, socket.SOCK_DGRAM))
            caller.sendto(b"?", (where, port))
        else:
            ear = closing.enter_context(target.open_socket(family, socket.SOCK_RAW, protocol))
            if protocol == ICMPV6:  # on a segment neighbours look for each other
                ear.setsockopt(socket.IPPROTO_ICMPV6, _ICMPV6_FILTER, _ECHOES_ONLY)
            caller = closing.enter_context(source.open_socket(family, socket.SOCK_RAW, protocol))
            caller.sendto(_content(protocol, port), (where, 0))
        yield ear


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
