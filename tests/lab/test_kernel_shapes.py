"""Shapes of ports, judged by `tc`, `nft` and packets that arrive: each port by itself, whatever was there before."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from weft.adapters.netns.kernel_state import REAPED_GROUP
from weft.adapters.netns.nft.base import TABLE
from weft.adapters.netns.qos.qos import QosDriver
from weft.domain.addresses import parse_address
from weft.domain.desired.state import QosProfile
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Device, alter_link, create_veth, delete_group, delete_link, read_links
from weft.kernel.netlink.route import LinkAddress, Prefix, put_address
from weft.kernel.nftables import Nftables, open_nftables
from weft.lab.servers.processes import DEADLINE

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BLUE = TenantName("blue")
PORTS = {"wp1": 100, "wp2": 101}
ADDRESSES = {4: ("10.0.0.1", "10.0.0.2"), 6: ("fd00::1", "fd00::2")}
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


@pytest.fixture
def indexes(here: TenantNetns, there: TenantNetns) -> dict[str, int]:
    """Two ports `here`, whose other ends are `there`: the first has addresses of both families."""
    for name, index in PORTS.items():
        here.send(
            create_veth(Device(name=name, index=index), Device(name=f"eth{index}"), peer_namespace=there.namespace.fd),
            alter_link(index, up=True),
        )
    indexes = {link.name: link.index for link in read_links(there.route)}
    for space, link, end in ((here, 100, 0), (there, indexes["eth100"], 1)):
        space.send(
            alter_link(link, up=True),
            *(
                put_address(LinkAddress(link=link, prefix=Prefix(parse_address(pair[end], field="end"), length)))
                for pair, length in zip(ADDRESSES.values(), (24, 64), strict=True)
            ),
        )
    return dict(PORTS)


@pytest.fixture
def nftables(here: TenantNetns) -> Iterator[Nftables]:
    with open_nftables(here.namespace) as opened:
        opened.run(f"add table inet {TABLE}")
        yield opened


@pytest.fixture
def shapes(here: TenantNetns, nftables: Nftables) -> QosDriver:
    return open_shapes(here, nftables)


def open_shapes(space: TenantNetns, nftables: Nftables) -> QosDriver:
    return QosDriver(netlink=space.route, netfilter=space.netfilter, nftables=nftables)


def shape(port: str = "wp1", *, megabits: int = 10, dscp: int = 0) -> QosProfile:
    return QosProfile(BLUE, port, megabits * 1_000_000, 64_000 if megabits else 0, dscp)


def rates(space: TenantNetns) -> dict[str, int]:
    """The limits of devices that are there to stay, in megabits."""
    return {
        queue["dev"]: queue["options"]["rate"] * 8 // 1_000_000
        for queue in space.ask("tc", "-j", "qdisc")
        if queue["kind"] == "tbf" and queue["dev"].startswith("wi")
    }


def counters(space: TenantNetns, device: str) -> tuple[int, int]:
    """Packets and bytes that have passed the limit of a device."""
    (queue,) = (each for each in space.ask("tc", "-s", "-j", "qdisc", "show", "dev", device) if each["kind"] == "tbf")
    return queue["packets"], queue["bytes"]


def redirections(space: TenantNetns, port: str) -> list[str]:
    filters = space.ask("tc", "-j", "filter", "show", "dev", port, "ingress")
    return [action["to_dev"] for each in filters for action in each.get("options", {}).get("actions", ())]


def marks(space: TenantNetns) -> dict[str, str]:
    """The chain that each port's packets are led to."""
    objects: Any = space.ask("nft", "-j", "list", "ruleset")["nftables"]
    elements = [element for each in objects for element in each.get("map", {}).get("elem", ())]
    return {port: verdict["jump"]["target"] for port, verdict in elements}


def devices(space: TenantNetns) -> set[str]:
    return {link.name for link in read_links(space.route) if link.group != REAPED_GROUP} - {"lo"}


def traffic_class(here: TenantNetns, there: TenantNetns, family: int) -> int:
    """The byte with DSCP and ECN of a packet from the first port; it was sent as capable of ECN."""
    kind, address = _FAMILIES[family], ADDRESSES[family][0]
    with (
        here.namespace.open_socket(kind, socket.SOCK_DGRAM) as ear,
        there.namespace.open_socket(kind, socket.SOCK_DGRAM) as mouth,
    ):
        ear.settimeout(DEADLINE)
        ear.bind((address, 0))
        if family == 4:
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 1)
        else:
            ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
            mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 1)
        mouth.sendto(b"?", ear.getsockname())
        _, ((_, _, data), *_), _, _ = ear.recvmsg(64, 64)
    return data[0] if family == 4 else struct.unpack("=i", data)[0]


def test_a_space_without_shapes_has_nothing_of_them(
    here: TenantNetns, shapes: QosDriver, indexes: dict[str, int]
) -> None:
    """Q1."""
    shapes.apply([], [shape()], indexes)
    shapes.clear("wp2", indexes)
    assert shapes.converge([], indexes) == []
    assert (devices(here), rates(here), indexes) == ({"wp1", "wp2"}, {}, PORTS)
    assert here.ask("nft", "-j", "list", "chains")["nftables"][1:] == []


def test_a_limit_comes_changes_and_goes(here: TenantNetns, shapes: QosDriver, indexes: dict[str, int]) -> None:
    """Q2 to Q5."""
    six, sixteen, eight, marked = (shape(megabits=6), shape(megabits=16), shape(megabits=8), shape(megabits=0, dscp=10))
    shapes.apply([six], [], indexes)
    assert (rates(here), redirections(here, "wp1")) == ({"wi1": 6}, ["wi1"])
    shapes.apply([sixteen], [six], indexes)
    assert rates(here) == {"wi1": 16}
    shapes.apply([], [six], indexes)
    assert rates(here) == {"wi1": 16}, "it has not had that one for a while"
    shapes.apply([marked], [sixteen], indexes)
    assert (rates(here), redirections(here, "wp1"), devices(here)) == ({}, [], {"wp1", "wp2"})
    shapes.apply([eight], [marked], indexes)
    assert (rates(here), redirections(here, "wp1")) == ({"wi1": 8}, ["wi1"]), "also before the reaper has come"
    shapes.apply([], [eight], indexes)
    here.send(delete_group(REAPED_GROUP))
    assert ({link.name for link in read_links(here.route)}, rates(here)) == ({"lo", "wp1", "wp2"}, {})


def test_other_ports_are_not_touched(
    here: TenantNetns, there: TenantNetns, shapes: QosDriver, indexes: dict[str, int]
) -> None:
    """What has passed a limit since it was put is still counted: it was neither changed nor put anew."""
    before = shape("wp2", megabits=7, dscp=10)
    shapes.apply([shape(megabits=6, dscp=10), before], [], indexes)
    assert traffic_class(here, there, 4) == 10 << 2 | 1
    counted = counters(here, "wi1")
    assert counted > (0, 0)
    shapes.apply([shape("wp2", megabits=17, dscp=12)], [before], indexes)
    assert shapes.converge([shape(megabits=6, dscp=10), shape("wp2", megabits=17, dscp=12)], indexes) == []
    assert rates(here) == {"wi1": 6, "wi2": 17}
    assert marks(here) == {"wp1": "dscp10", "wp2": "dscp12"}
    assert counters(here, "wi1") >= counted


@pytest.mark.parametrize("megabits", [0, 10])
@pytest.mark.parametrize("family", [4, 6])
def test_packets_bear_the_mark_of_their_port(
    here: TenantNetns, there: TenantNetns, shapes: QosDriver, indexes: dict[str, int], family: int, megabits: int
) -> None:
    """Q11. What the packets say about congestion stays as it is."""
    for dscp in (46, 1, 63, 0, 46):
        shapes.apply([shape(megabits=megabits, dscp=dscp)], [], indexes)
        assert traffic_class(here, there, family) == dscp << 2 | 1
    shapes.clear("wp1", indexes)
    assert (traffic_class(here, there, family), marks(here)) == (1, {})


def test_a_port_that_is_gone_leaves_nothing(here: TenantNetns, shapes: QosDriver, indexes: dict[str, int]) -> None:
    shapes.apply([shape(dscp=46)], [], indexes)
    here.send(delete_link(indexes.pop("wp1")))
    shapes.clear("wp1", indexes)
    assert (devices(here), marks(here), indexes) == ({"wp2"}, {}, {"wp2": 101})


def test_a_port_that_is_not_there_gets_nothing(here: TenantNetns, shapes: QosDriver, indexes: dict[str, int]) -> None:
    shapes.apply([shape("wp9", dscp=46)], [], indexes)
    assert shapes.converge([shape("wp9", dscp=46)], indexes) == []
    assert (devices(here), rates(here)) == ({"wp1", "wp2"}, {})


def test_one_with_no_memory_finds_all_and_keeps_what_is_right(
    here: TenantNetns, nftables: Nftables, shapes: QosDriver, indexes: dict[str, int]
) -> None:
    """Q8."""
    shapes.apply([shape(dscp=46), shape("wp2", megabits=0, dscp=10)], [], indexes)
    another = open_shapes(here, nftables)
    assert another.converge([shape(dscp=46), shape("wp2", megabits=0, dscp=10)], indexes) == []
    repaired = open_shapes(here, nftables).converge([shape(megabits=20)], indexes)
    assert len(repaired) == 2
    assert (rates(here), marks(here)) == ({"wi1": 20}, {})


@pytest.mark.parametrize(
    "damage",
    [
        "tc qdisc del dev wi1 root",
        "tc qdisc change dev wi1 root handle 57: tbf rate 99mbit burst 64000 limit 200000",
        "tc qdisc replace dev wi1 root handle 9: tbf rate 99mbit burst 64000 limit 200000",
        "tc qdisc del dev wp1 ingress",
        "tc filter del dev wp1 ingress",
        "ip link del wi1",
        f"nft delete element inet {TABLE} dscp {{ wp1 }}",
        f"nft flush map inet {TABLE} dscp",
        f"nft flush chain inet {TABLE} dscp46",
        f"nft flush chain inet {TABLE} marking",
        f"nft delete table inet {TABLE} ; add table inet {TABLE}",
    ],
)
def test_damage_is_mended(
    here: TenantNetns, there: TenantNetns, shapes: QosDriver, indexes: dict[str, int], damage: str
) -> None:
    wanted = [shape(dscp=46), shape("wp2", megabits=20)]
    shapes.apply(wanted, [], indexes)
    here.ask(*damage.split())
    indexes = {link.name: link.index for link in read_links(here.route)}
    shapes.converge(wanted, indexes)
    assert (rates(here), marks(here)) == ({"wi1": 10, "wi2": 20}, {"wp1": "dscp46"})
    assert redirections(here, "wp1") == ["wi1"]
    assert traffic_class(here, there, 4) == 46 << 2 | 1
    assert shapes.converge(wanted, indexes) == []


@pytest.mark.parametrize(
    "damage",
    ["nft flush map inet weft dscp", "nft delete table inet weft ; add table inet weft", "ip link del wi2"],
)
def test_a_port_is_taken_off_or_changed_whatever_others_did(
    here: TenantNetns, there: TenantNetns, shapes: QosDriver, indexes: dict[str, int], damage: str
) -> None:
    shapes.apply([shape(dscp=46), shape("wp2", dscp=46)], [], indexes)
    here.ask(*damage.split())
    shapes.clear("wp2", indexes)
    shapes.apply([shape(dscp=10)], [shape(dscp=46)], indexes)
    assert traffic_class(here, there, 4) == 10 << 2 | 1


def test_a_cut_off_port_without_a_limit_is_freed(
    here: TenantNetns, there: TenantNetns, shapes: QosDriver, indexes: dict[str, int]
) -> None:
    """Somebody has deleted the device into which it is diverted, and nobody wants a limit any more."""
    shapes.apply([shape()], [], indexes)
    here.ask("ip", "link", "del", "wi1")
    indexes = {link.name: link.index for link in read_links(here.route)}
    assert len(shapes.converge([], indexes)) == 1
    assert traffic_class(here, there, 4) == 1
