"""The nftables table of a tenant's space: what may come out of a port (pure text; `nft` is its judge in tests).

A packet from a port passes only with the MAC and an address of that port: two sets hold who may say what, and a port
that is in neither says nothing. Routers do not live in pods, so what only routers say is dropped first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from weft.domain.nodeview import Port

TABLE = "weft"
PORT_PREFIX = "wp"

BASE = f"""\
add table inet {TABLE}
add set inet {TABLE} ports4 {{ type ifname . ether_addr . ipv4_addr; }}
add set inet {TABLE} ports6 {{ type ifname . ether_addr . ipv6_addr; }}
add chain inet {TABLE} ingress {{ type filter hook prerouting priority -310; policy accept; }}
add chain inet {TABLE} from_port
flush chain inet {TABLE} ingress
flush chain inet {TABLE} from_port
add rule inet {TABLE} ingress iifname "{PORT_PREFIX}*" jump from_port
add rule inet {TABLE} from_port icmpv6 type {{ nd-router-advert, nd-redirect }} drop
add rule inet {TABLE} from_port iifname . ether saddr . ip saddr @ports4 accept
add rule inet {TABLE} from_port iifname . ether saddr . ip6 saddr @ports6 accept
add rule inet {TABLE} from_port drop
"""


LIST_SETS = f"list table inet {TABLE}"


class Element(NamedTuple):
    """One member of a set: who may say what."""

    set_name: str
    interface: str
    mac: str
    address: str

    def __str__(self) -> str:
        return f'"{self.interface}" . {self.mac} . {self.address}'


def elements_of(port: Port) -> list[Element]:
    """What lets a port speak."""
    return [Element(f"ports{address.family}", port.interface, port.mac, str(address)) for address in port.addresses]


def read_elements(objects: Iterable[Mapping[str, Any]]) -> Iterator[Element]:
    """The elements in what nft lists."""
    for each in objects:
        listed = each.get("set", {})
        for element in listed.get("elem", ()) if listed.get("name", "").startswith("ports") else ():
            yield Element(listed["name"], *element["concat"])


def add_elements(elements: Iterable[Element]) -> str:
    """The commands that put the elements in."""
    return "".join(f"add element inet {TABLE} {each.set_name} {{ {each} }}\n" for each in elements)


def delete_elements(elements: Iterable[Element]) -> str:
    """The commands that take the elements out; they fail where one is absent."""
    return "".join(f"delete element inet {TABLE} {each.set_name} {{ {each} }}\n" for each in elements)
