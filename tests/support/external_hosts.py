"""External clients of a lab: a dual-stack underlay, and the lab's own namespace as a client outside the cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

from tests.support import inventory
from tests.support.responders import Response, query

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import TCP, NetnsAddress, Transport
from weft.lab.waiting import DEADLINE

FAMILIES = (4, 6)
NODE_PORT = 30080
EXTERNAL_CLIENT = {4: "192.0.2.254", 6: "2001:db8:ffff::254"}
RANGES = {4: "198.51.100.0/24", 6: "2001:db8:eeee::/64"}
EXTERNAL = {4: "198.51.100.7", 6: "2001:db8:eeee::7"}
VIPS = {4: "10.96.0.10", 6: "fd00:96::10"}


def add_ipv6_underlay(lab: NetLab) -> None:
    """Add IPv6 to the underlay, and route the external ranges to the first host."""
    _ip("addr", "add", f"{EXTERNAL_CLIENT[6]}/64", "dev", "underlay", "nodad")
    for host in lab.hosts.values():
        inventory.run(host.netns, f"ip addr add {host_address(host, 6)}/64 dev eth0 nodad")
    first = next(iter(lab.hosts.values()))
    for family, ranges in RANGES.items():
        _ip("route", "add", ranges, "via", host_address(first, family))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=DEADLINE)


def external_client(closing: ExitStack) -> dict[int, NetnsAddress]:
    """The addresses of a client outside the cluster, by family."""
    namespace = closing.enter_context(Namespace.current())
    return {family: NetnsAddress(namespace, ip_address(text)) for family, text in EXTERNAL_CLIENT.items()}


def host_address(host: Host, family: int) -> str:
    return host.address if family == 4 else f"2001:db8:ffff::{host.address.rpartition('.')[2]}"


def host_netns_address(host: Host, closing: ExitStack, family: int) -> NetnsAddress:
    """The host itself, as a client."""
    namespace = closing.enter_context(Namespace.open(host.netns))
    return NetnsAddress(namespace, ip_address(host_address(host, family)))


def overlay_host_address(host: Host, family: int) -> str:
    """The source address of a host in the overlay, as workloads on other nodes see it."""
    return host.address if family == 4 else str(ip_address(f"fd77:6566:7400::{host.address}"))


def pod_addresses(pods: Iterable[Pod], family: int) -> dict[str, NetnsAddress]:
    return {pod.name: pod.place(family) for pod in pods}


async def all_responses(
    source: NetnsAddress, address: object, port: int = 80, *, transport: Transport = TCP
) -> set[Response]:
    """The distinct responses to so many requests that missing a backend is very unlikely."""
    return {await query(source, address, port, transport=transport) for _ in range(24)}


def responder_names(responses: set[Response]) -> set[str]:
    return {response.responder for response in responses}


@contextmanager
def routed(target: str, hop: str) -> Iterator[None]:
    """Route an address from the external client to a host."""
    _ip("route", "add", target, "via", hop)
    try:
        yield
    finally:
        _ip("route", "del", target, "via", hop)
