"""QoS of ports, checked with `tc`, `nft` and received packets, from any previous state."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from weft.adapters.netns.devices import REAPED_GROUP
from weft.adapters.netns.nft.entries import TABLE
from weft.adapters.netns.qos import QosDriver
from weft.domain.addresses import parse_address
from weft.domain.desired.state import QosProfile
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Device, change_link, create_veth, delete_group, delete_link, read_links
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
    """Two ports `here` with their peers `there`: the first has addresses of both families."""
    for name, index in PORTS.items():
        here.send(
            create_veth(Device(name=name, index=index), Device(name=f"eth{index}"), peer_namespace=there.namespace.fd),
            change_link(index, up=True),
        )
    indexes = {link.name: link.index for link in read_links(there.route)}
    for netns, link, end in ((here, 100, 0), (there, indexes["eth100"], 1)):
        netns.send(
            change_link(link, up=True),
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
def qos(here: TenantNetns, nftables: Nftables) -> QosDriver:
    return open_qos(here, nftables)


def open_qos(netns: TenantNetns, nftables: Nftables) -> QosDriver:
    return QosDriver(netlink=netns.route, netfilter=netns.netfilter, nftables=nftables)


def profile(port: str = "wp1", *, megabits: int = 10, dscp: int = 0) -> QosProfile:
    return QosProfile(BLUE, port, megabits * 1_000_000, 64_000 if megabits else 0, dscp)


def rates(netns: TenantNetns) -> dict[str, int]:
    """The limits of devices that are not being deleted, in megabits."""
    return {
        queue["dev"]: queue["options"]["rate"] * 8 // 1_000_000
        for queue in netns.ask("tc", "-j", "qdisc")
        if queue["kind"] == "tbf" and queue["dev"].startswith("wi")
    }


def counters(netns: TenantNetns, device: str) -> tuple[int, int]:
    """The packet and byte counters of a device's limit."""
    (queue,) = (each for each in netns.ask("tc", "-s", "-j", "qdisc", "show", "dev", device) if each["kind"] == "tbf")
    return queue["packets"], queue["bytes"]


def redirections(netns: TenantNetns, port: str) -> list[str]:
    filters = netns.ask("tc", "-j", "filter", "show", "dev", port, "ingress")
    return [action["to_dev"] for each in filters for action in each.get("options", {}).get("actions", ())]


def dscp_chains(netns: TenantNetns) -> dict[str, str]:
    """The DSCP chain of each port."""
    objects: Any = netns.ask("nft", "-j", "list", "ruleset")["nftables"]
    elements = [element for each in objects for element in each.get("map", {}).get("elem", ())]
    return {port: verdict["jump"]["target"] for port, verdict in elements}


def devices(netns: TenantNetns) -> set[str]:
    return {link.name for link in read_links(netns.route) if link.group != REAPED_GROUP} - {"lo"}


def traffic_class(here: TenantNetns, there: TenantNetns, family: int) -> int:
    """The traffic class (DSCP and ECN) of a packet from the first port, sent with ECT(0)."""
    kind, address = _FAMILIES[family], ADDRESSES[family][0]
    with (
        here.namespace.open_socket(kind, socket.SOCK_DGRAM) as listener,
        there.namespace.open_socket(kind, socket.SOCK_DGRAM) as sender,
    ):
        listener.settimeout(DEADLINE)
        listener.bind((address, 0))
        if family == 4:
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 1)
        else:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 1)
        sender.sendto(b"?", listener.getsockname())
        _, ((_, _, data), *_), _, _ = listener.recvmsg(64, 64)
    return data[0] if family == 4 else struct.unpack("=i", data)[0]


def test_a_netns_without_profiles_has_no_qos_objects(
    here: TenantNetns, qos: QosDriver, indexes: dict[str, int]
) -> None:
    """Q1."""
    qos.apply([], [profile()], indexes)
    qos.clear("wp2", indexes)
    assert qos.converge([], indexes) == []
    assert (devices(here), rates(here), indexes) == ({"wp1", "wp2"}, {}, PORTS)
    assert here.ask("nft", "-j", "list", "chains")["nftables"][1:] == []


def test_a_limit_is_set_changed_and_removed(here: TenantNetns, qos: QosDriver, indexes: dict[str, int]) -> None:
    """Q2 to Q5."""
    six, sixteen, eight, marked = (
        profile(megabits=6),
        profile(megabits=16),
        profile(megabits=8),
        profile(megabits=0, dscp=10),
    )
    qos.apply([six], [], indexes)
    assert (rates(here), redirections(here, "wp1")) == ({"wi1": 6}, ["wi1"])
    qos.apply([sixteen], [six], indexes)
    assert rates(here) == {"wi1": 16}
    qos.apply([], [six], indexes)
    assert rates(here) == {"wi1": 16}, "it has not had that one for a while"
    qos.apply([marked], [sixteen], indexes)
    assert (rates(here), redirections(here, "wp1"), devices(here)) == ({}, [], {"wp1", "wp2"})
    qos.apply([eight], [marked], indexes)
    assert (rates(here), redirections(here, "wp1")) == ({"wi1": 8}, ["wi1"]), "also before the reaper has run"
    qos.apply([], [eight], indexes)
    here.send(delete_group(REAPED_GROUP))
    assert ({link.name for link in read_links(here.route)}, rates(here)) == ({"lo", "wp1", "wp2"}, {})


def test_other_ports_are_not_touched(
    here: TenantNetns, there: TenantNetns, qos: QosDriver, indexes: dict[str, int]
) -> None:
    """The qdisc counters stay: it was neither changed nor replaced."""
    before = profile("wp2", megabits=7, dscp=10)
    qos.apply([profile(megabits=6, dscp=10), before], [], indexes)
    assert traffic_class(here, there, 4) == 10 << 2 | 1
    counted = counters(here, "wi1")
    assert counted > (0, 0)
    qos.apply([profile("wp2", megabits=17, dscp=12)], [before], indexes)
    assert qos.converge([profile(megabits=6, dscp=10), profile("wp2", megabits=17, dscp=12)], indexes) == []
    assert rates(here) == {"wi1": 6, "wi2": 17}
    assert dscp_chains(here) == {"wp1": "dscp10", "wp2": "dscp12"}
    assert counters(here, "wi1") >= counted


@pytest.mark.parametrize("megabits", [0, 10])
@pytest.mark.parametrize("family", [4, 6])
def test_packets_have_the_dscp_of_their_port(
    here: TenantNetns, there: TenantNetns, qos: QosDriver, indexes: dict[str, int], family: int, megabits: int
) -> None:
    """Q11. The ECN bits are unchanged."""
    for dscp in (46, 1, 63, 0, 46):
        qos.apply([profile(megabits=megabits, dscp=dscp)], [], indexes)
        assert traffic_class(here, there, family) == dscp << 2 | 1
    qos.clear("wp1", indexes)
    assert (traffic_class(here, there, family), dscp_chains(here)) == (1, {})


def test_a_removed_port_leaves_no_qos(here: TenantNetns, qos: QosDriver, indexes: dict[str, int]) -> None:
    qos.apply([profile(dscp=46)], [], indexes)
    here.send(delete_link(indexes.pop("wp1")))
    qos.clear("wp1", indexes)
    assert (devices(here), dscp_chains(here), indexes) == ({"wp2"}, {}, {"wp2": 101})


def test_a_missing_port_gets_no_qos(here: TenantNetns, qos: QosDriver, indexes: dict[str, int]) -> None:
    qos.apply([profile("wp9", dscp=46)], [], indexes)
    assert qos.converge([profile("wp9", dscp=46)], indexes) == []
    assert (devices(here), rates(here)) == ({"wp1", "wp2"}, {})


def test_a_restart_reads_back_qos_and_keeps_what_is_right(
    here: TenantNetns, nftables: Nftables, qos: QosDriver, indexes: dict[str, int]
) -> None:
    """Q8."""
    qos.apply([profile(dscp=46), profile("wp2", megabits=0, dscp=10)], [], indexes)
    another = open_qos(here, nftables)
    assert another.converge([profile(dscp=46), profile("wp2", megabits=0, dscp=10)], indexes) == []
    repaired = open_qos(here, nftables).converge([profile(megabits=20)], indexes)
    assert len(repaired) == 2
    assert (rates(here), dscp_chains(here)) == ({"wi1": 20}, {})


@pytest.mark.parametrize(
    "damage",
    [
        "tc qdisc del dev wi1 root",
        "tc qdisc change dev wi1 root handle 57: tbf rate 99mbit burst 64000 limit 200000",
        "tc qdisc replace dev wi1 root handle 9: tbf rate 99mbit burst 64000 limit 200000",
        "tc qdisc del dev wp1 ingress",
        "tc filter del dev wp1 ingress",
        "ip link del wi1",
        f"nft delete element inet {TABLE} port_dscp {{ wp1 }}",
        f"nft flush map inet {TABLE} port_dscp",
        f"nft flush chain inet {TABLE} dscp46",
        f"nft flush chain inet {TABLE} dscp_mark",
        f"nft delete table inet {TABLE} ; add table inet {TABLE}",
    ],
)
def test_drift_is_repaired(
    here: TenantNetns, there: TenantNetns, qos: QosDriver, indexes: dict[str, int], damage: str
) -> None:
    wanted = [profile(dscp=46), profile("wp2", megabits=20)]
    qos.apply(wanted, [], indexes)
    here.ask(*damage.split())
    indexes = {link.name: link.index for link in read_links(here.route)}
    qos.converge(wanted, indexes)
    assert (rates(here), dscp_chains(here)) == ({"wi1": 10, "wi2": 20}, {"wp1": "dscp46"})
    assert redirections(here, "wp1") == ["wi1"]
    assert traffic_class(here, there, 4) == 46 << 2 | 1
    assert qos.converge(wanted, indexes) == []


@pytest.mark.parametrize(
    "damage",
    ["nft flush map inet weft port_dscp", "nft delete table inet weft ; add table inet weft", "ip link del wi2"],
)
def test_a_port_is_removed_or_changed_despite_drift(
    here: TenantNetns, there: TenantNetns, qos: QosDriver, indexes: dict[str, int], damage: str
) -> None:
    qos.apply([profile(dscp=46), profile("wp2", dscp=46)], [], indexes)
    here.ask(*damage.split())
    qos.clear("wp2", indexes)
    qos.apply([profile(dscp=10)], [profile(dscp=46)], indexes)
    assert traffic_class(here, there, 4) == 10 << 2 | 1


def test_a_stale_redirect_is_removed(
    here: TenantNetns, there: TenantNetns, qos: QosDriver, indexes: dict[str, int]
) -> None:
    """Another process has deleted the ifb device, and the limit is removed from the desired state."""
    qos.apply([profile()], [], indexes)
    here.ask("ip", "link", "del", "wi1")
    indexes = {link.name: link.index for link in read_links(here.route)}
    assert len(qos.converge([], indexes)) == 1
    assert traffic_class(here, there, 4) == 1
