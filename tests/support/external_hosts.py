"""A lab seen from outside: an underlay of both families, the lab itself as one who asks, and hosts as others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from tests.support import inventory
from tests.support.responders import Answer, ask

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import TCP, Place, Transport
from weft.lab.waiting import DEADLINE

FAMILIES = (4, 6)
NODE_PORT = 30080
OUTSIDE = {4: "192.0.2.254", 6: "2001:db8:ffff::254"}
RANGES = {4: "198.51.100.0/24", 6: "2001:db8:eeee::/64"}
EXTERNAL = {4: "198.51.100.7", 6: "2001:db8:eeee::7"}
VIPS = {4: "10.96.0.10", 6: "fd00:96::10"}


def give_v6(lab: NetLab) -> None:
    """The underlay has IPv6 too, and external addresses lead to the first host."""
    _ip("addr", "add", f"{OUTSIDE[6]}/64", "dev", "underlay", "nodad")
    for host in lab.hosts.values():
        inventory.run(host.machine, f"ip addr add {host_address(host, 6)}/64 dev eth0 nodad")
    first = next(iter(lab.hosts.values()))
    for family, ranges in RANGES.items():
        _ip("route", "add", ranges, "via", host_address(first, family))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=DEADLINE)


def the_world(closing: ExitStack) -> dict[int, Place]:
    """The outside, by family."""
    namespace = closing.enter_context(Namespace.current())
    return {family: Place(namespace, ip_address(text)) for family, text in OUTSIDE.items()}


def host_address(host: Host, family: int) -> str:
    return host.address if family == 4 else f"2001:db8:ffff::{host.address.rpartition('.')[2]}"


def host_place(host: Host, closing: ExitStack, family: int) -> Place:
    """The host itself, as one who asks."""
    namespace = closing.enter_context(Namespace.open(host.machine))
    return Place(namespace, ip_address(host_address(host, family)))


def as_known_inside(host: Host, family: int) -> str:
    """As whom workloads of other nodes know a host."""
    return host.address if family == 4 else str(ip_address(f"fd77:6566:7400::{host.address}"))


def places(pods: Iterable[Pod], family: int) -> dict[str, Place]:
    return {pod.name: pod.place(family) for pod in pods}


async def who_answers(source: Place, address: object, port: int = 80, *, transport: Transport = TCP) -> set[Answer]:
    """Everybody who does, when asked so often that nobody is left out but by a miracle."""
    return {await ask(source, address, port, transport=transport) for _ in range(24)}


def names(answers: set[Answer]) -> set[str]:
    return {answer.who for answer in answers}


@contextmanager
def routed(target: str, hop: str) -> Iterator[None]:
    """The outside sends packets for an address to a host."""
    _ip("route", "add", target, "via", hop)
    try:
        yield
    finally:
        _ip("route", "del", target, "via", hop)
