"""The address of this machine when nobody names one (contiv 1.5)."""

from __future__ import annotations

import fcntl
import socket
import struct
import threading
from collections.abc import Iterator, Mapping

from weft.domain.addresses import Address

_SIOCGIFADDR = 0x8915
_FOREIGN_LEADS = ("docker", "veth", "vport", "lo")
_RESOLVE_WITHIN_S = 3.0
_LOOPBACK = Address(4, 0x7F000001)


def default_address() -> Address:
    """What `choose_address` makes of this machine."""
    return choose_address(dict(_interfaces()), _resolve_within(_RESOLVE_WITHIN_S))


def choose_address(interfaces: Mapping[str, Address], resolved: tuple[Address, ...]) -> Address:
    """What the host name stands for, if an interface has it; else the first interface of the machine's own.

    Loopback where there is none. `interfaces` are in the kernel's order.
    """
    local = set(interfaces.values())
    named = (address for address in resolved if address in local and not _is_loopback(address))
    own = (address for name, address in interfaces.items() if not name.startswith(_FOREIGN_LEADS))
    return next(named, None) or next(own, None) or _LOOPBACK


def _is_loopback(address: Address) -> bool:
    return address.number >> 24 == 127


def _interfaces() -> Iterator[tuple[str, Address]]:
    """The first v4 address of every interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
            except OSError:
                continue  # it has none, or is gone already
            yield name, _v4(answer[20:24])


def _resolve_within(seconds: float) -> tuple[Address, ...]:
    """What our host name resolves to; nothing when that takes too long, for the resolver itself knows no deadline."""
    found: list[Address] = []

    def resolve() -> None:
        try:
            _, _, texts = socket.gethostbyname_ex(socket.gethostname())
        except OSError:
            return  # it stands for nothing
        found.extend(_v4(socket.inet_aton(text)) for text in texts)

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(seconds)
    return tuple(found)


def _v4(data: bytes) -> Address:
    return Address(4, int.from_bytes(data, "big"))
