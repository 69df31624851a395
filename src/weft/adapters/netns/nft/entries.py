"""Members of the sets and maps of a space's tables, as one kind of thing: put, dropped and read back all alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.adapters.netns.host.nat_tenant import HOME_TABLE, HOMES
from weft.adapters.netns.nft.base import TABLE, VOICE_SETS
from weft.adapters.netns.nft.bridge_filter import BRIDGE_TABLE, STATION_SETS
from weft.kernel.netlink.codec import Request, to_address, to_mac, to_number, to_text
from weft.kernel.netlink.nft_set import (
    BRIDGE,
    INET,
    NETDEV,
    Element,
    SetName,
    drop_elements,
    put_elements,
    read_elements,
)
from weft.kernel.netlink.socket import NetlinkSocket


class Entry(NamedTuple):
    """An element, and the set or map it is in."""

    name: str
    element: Element

    @property
    def place(self) -> tuple[str, bytes]:
        """What no two entries have in common."""
        return self.name, self.element.key

    def __str__(self) -> str:
        if self.name in (*VOICE_SETS, *STATION_SETS[:3]):
            name, mac, address = self.element.key[:16], self.element.key[16:22], self.element.key[24:]
            return f"{to_text(name)} with {to_mac(mac)} and {to_address(address)} in {self.name}"
        value = f" as {to_number(self.element.value):#x}" if self.element.value else ""
        return f"{self.element.key.hex()}{value} in {self.name}"


def set_named(name: str) -> SetName:
    """A set or map of one of the tables. No two have the same name."""
    if name in HOMES:
        return SetName(NETDEV, HOME_TABLE, name)
    return SetName(BRIDGE, BRIDGE_TABLE, name) if name in STATION_SETS else SetName(INET, TABLE, name)


def put_entries(entries: Iterable[Entry]) -> list[Request]:
    found = _by_name(entries)
    return [request for name, elements in found.items() for request in put_elements(set_named(name), elements)]


def drop_entries(entries: Iterable[Entry]) -> list[Request]:
    found = _by_name(entries)
    return [request for name, elements in found.items() for request in drop_elements(set_named(name), elements)]


def read_entries(netlink: NetlinkSocket, names: Iterable[str]) -> Iterator[Entry]:
    """Everything that these sets and maps hold; `Refused` with `ENOENT` when one is not there."""
    for name in names:
        for element in read_elements(netlink, set_named(name)):
            yield Entry(name, element)


def _by_name(entries: Iterable[Entry]) -> dict[str, list[Element]]:
    found: defaultdict[str, list[Element]] = defaultdict(list)
    for entry in entries:
        found[entry.name].append(entry.element)
    return found
