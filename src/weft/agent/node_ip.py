"""Detects the node IP when none is configured (contiv 1.5)."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from collections.abc import Iterator, Mapping

from weft.domain.addresses import Address

# linux/sockios.h
_SIOCGIFADDR = 0x8915
# Interfaces of containers and bridges, whose addresses other nodes cannot reach.
_IGNORED_PREFIXES = ("docker", "veth", "vport", "lo")
_RESOLVE_TIMEOUT_S = 3.0
_LOOPBACK = Address(4, 0x7F000001)


def default_address() -> Address:
    """The node IP of this machine."""
    return choose_address(dict(_interfaces()), _resolve_within(_RESOLVE_TIMEOUT_S))


def choose_address(interfaces: Mapping[str, Address], resolved: tuple[Address, ...]) -> Address:
    """The address of the host name if an interface has it; else that of the first physical interface; else loopback.

    `interfaces` are in the kernel's order.
    """
    local = set(interfaces.values())
    of_host_name = (address for address in resolved if address in local and not _is_loopback(address))
    physical = (address for name, address in interfaces.items() if not name.startswith(_IGNORED_PREFIXES))
    return next(of_host_name, None) or next(physical, None) or _LOOPBACK


def _is_loopback(address: Address) -> bool:
    return address.number >> 24 == 127


def _interfaces() -> Iterator[tuple[str, Address]]:
    """The first v4 address of every interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
            except OSError:
                continue  # it has no IPv4 address, or was just deleted
            # struct ifreq: 16 bytes of name, then sockaddr_in with family, port and address.
            yield name, _v4(answer[20:24])


def _resolve_within(seconds: float) -> tuple[Address, ...]:
    """The addresses of our host name; none if resolving takes longer."""
    found: list[Address] = []

    def resolve() -> None:
        try:
            _, _, texts = socket.gethostbyname_ex(socket.gethostname())
        except OSError:
            return  # it does not resolve
        found.extend(_v4(socket.inet_aton(text)) for text in texts)

    # gethostbyname has no timeout of its own. A daemon thread that is stuck in it does not keep the process alive.
    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(found)


def _v4(data: bytes) -> Address:
    return Address(4, int.from_bytes(data, "big"))
