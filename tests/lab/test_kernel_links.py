"""Devices, judged by `ip -d` and `bridge`, and read back by ourselves."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import (
    LOOPBACK,
    RP_FILTER,
    SEND_REDIRECTS,
    Device,
    Link,
    PortFlags,
    Vxlan,
    alter_link,
    alter_port,
    alter_protocols,
    create_bridge,
    create_macvlan,
    create_veth,
    create_vxlan,
    delete_group,
    delete_link,
    read_link,
    read_links,
)
from weft.kernel.netlink.socket import NetlinkError

if TYPE_CHECKING:
    from tests.lab.conftest import MakeSpace, TenantNetns

V4, V6 = parse_address("127.0.0.1", field="local"), parse_address("::1", field="local")
HOST_END = Device(name="wp1", index=100, mac="ee:ee:ee:ee:ee:ee", mtu=1450)
POD_END = Device(name="eth0", index=200, mac="02:02:0a:00:00:02", mtu=1400)


def judged(space: TenantNetns, name: str) -> Any:
    (link,) = space.ask("ip", "-j", "-d", "link", "show", "dev", name)
    return link


def found(space: TenantNetns, name: str) -> Link:
    link = read_link(space.route, name)
    assert link is not None
    return link


def test_a_veth_pair_is_born_in_two_namespaces(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    for space, end in ((here, HOST_END), (there, POD_END)):
        link = judged(space, end.name)
        assert (link["ifindex"], link["address"], link["mtu"]) == (end.index, end.mac, end.mtu)
        assert link["linkinfo"]["info_kind"] == "veth"
        assert (link["num_tx_queues"], link["num_rx_queues"]) == (1, 1)
        assert "UP" not in link["flags"]
    assert judged(here, "wp1")["link_index"] == 200
    assert found(here, "wp1") == Link(
        index=100, name="wp1", kind="veth", mac=HOST_END.mac, mtu=1450, up=False, alias="", group=0, master=0, peer=200
    )


def test_a_macvlan_stands_on_a_device_of_another_namespace(
    here: TenantNetns, there: TenantNetns, make_space: MakeSpace
) -> None:
    """It has that one's MAC and all its frames while it is up, and goes with it."""
    here.send(create_veth(HOST_END, POD_END, peer_namespace=make_space("elsewhere").namespace.fd))
    here.send(create_macvlan(Device(name="eth0", mtu=1400), over=HOST_END.index, namespace=there.namespace.fd))
    link = judged(there, "eth0")
    assert (link["address"], link["mtu"], link["link_index"]) == (HOST_END.mac, 1400, HOST_END.index)
    assert (
        link["linkinfo"] == {"info_kind": "macvlan", "info_data": {"mode": "passthru", "flags": []}} | link["linkinfo"]
    )
    assert (found(there, "eth0").kind, found(there, "eth0").peer) == ("macvlan", HOST_END.index)
    heard = []
    for up in (False, True, False):
        there.send(alter_link(found(there, "eth0").index, up=up))
        heard.append(found(here, "wp1").listeners)
    assert heard == [0, 1, 0]
    with pytest.raises(NetlinkError) as refusal:
        here.send(create_macvlan(Device(name="eth1"), over=HOST_END.index, namespace=there.namespace.fd))
    assert refusal.value.errno == errno.EINVAL
    here.send(delete_link(HOST_END.index))
    assert read_link(there.route, "eth0") is None


def test_what_is_left_open_is_chosen_by_the_kernel(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(Device(name="wp1"), Device(name="eth0"), peer_namespace=there.namespace.fd))
    link = found(there, "eth0")
    assert link.index > LOOPBACK
    assert link.mac
    assert link.mtu == 1500


def test_an_end_can_be_born_on_a_bridge_and_in_a_group(here: TenantNetns, there: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd, master=50, group=7),
    )
    assert (judged(here, "wp1")["master"], judged(here, "wp1")["group"]) == ("br0", "7")
    assert (found(here, "wp1").master, found(here, "wp1").group) == (50, 7)
    assert judged(here, "br0")["linkinfo"]["info_data"]["mcast_snooping"] == 0


def test_the_mark_goes_into_the_batch_that_makes_the_device(here: TenantNetns, there: TenantNetns) -> None:
    here.send(
        create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd),
        alter_link(100, alias="weft:blue", up=True),
        create_bridge(Device(name="br0")),
    )
    assert judged(here, "wp1")["ifalias"] == "weft:blue"
    assert [link.name for link in read_links(here.route, marked="weft:")] == ["wp1"]
    assert {link.name for link in read_links(here.route)} == {"lo", "wp1", "br0"}


@pytest.mark.parametrize(
    ("here_end", "pod_end"),
    [
        (Device(name="wp1"), Device(name="eth1")),
        (Device(name="wp2", index=100), Device(name="eth1", index=201)),
        (Device(name="wp2"), Device(name="eth0")),
        (Device(name="wp2", index=101), Device(name="eth1", index=200)),
    ],
)
def test_a_taken_name_or_index_is_told_by_errno(
    here: TenantNetns, there: TenantNetns, here_end: Device, pod_end: Device
) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    with pytest.raises(NetlinkError) as refused:
        here.send(create_veth(here_end, pod_end, peer_namespace=there.namespace.fd))
    assert refused.value.errno in {errno.EEXIST, errno.EBUSY}
    assert {link.name for link in read_links(there.route)} == {"lo", "eth0"}


def test_altering_changes_what_is_given_and_nothing_else(here: TenantNetns) -> None:
    here.send(create_bridge(Device(name="br0", index=50, mac="02:00:00:00:00:01")))
    here.send(alter_link(50, up=True))
    here.send(alter_link(50, mtu=1400, group=9))
    here.send(alter_link(50, alias="weft:x", mac="02:00:00:00:00:02"))
    link = found(here, "br0")
    assert (link.up, link.mtu, link.group, link.alias, link.mac) == (True, 1400, 9, "weft:x", "02:00:00:00:00:02")
    here.send(alter_link(50, up=False))
    here.send(alter_link(50, name="br1", alias=""))
    link = found(here, "br1")
    assert (link.up, link.mtu, link.alias) == (False, 1400, "")
    assert read_link(here.route, "br0") is None


def test_a_device_leaves_a_pod_under_another_name(here: TenantNetns, there: TenantNetns) -> None:
    """As DEL does it: out of the pod and away from its name in one message."""
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    there.send(alter_link(200, up=True))
    there.send(alter_link(200, up=False, name="wgone200", group=87, namespace=here.namespace.fd))
    assert [link.name for link in read_links(there.route)] == ["lo"]
    link = found(here, "wgone200")
    assert (link.up, link.group, link.mac) == (False, 87, POD_END.mac)


def test_no_address_of_its_own_for_a_device(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        create_bridge(Device(name="br1", index=51)),
        alter_protocols(50, link_local=False),
        alter_protocols(51, link_local=True),
        alter_link(50, up=True),
        alter_link(51, up=True),
    )
    assert judged(here, "br0")["inet6_addr_gen_mode"] == "none"
    assert judged(here, "br1")["inet6_addr_gen_mode"] == "eui64"
    assert here.ask("ip", "-j", "-6", "address", "show", "dev", "br0") == []
    assert here.ask("ip", "-j", "-6", "address", "show", "dev", "br1") != []


def test_ipv4_settings_of_a_device_without_a_sysctl(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        alter_protocols(50, link_local=False, v4={RP_FILTER: 2, SEND_REDIRECTS: 0}),
    )
    settings = Path("/proc/sys/net/ipv4/conf/br0")
    assert (settings / "rp_filter").read_text().strip() == "2"
    assert (settings / "send_redirects").read_text().strip() == "0"


@pytest.mark.parametrize("tunnel", [Vxlan(vni=77, port=4789, local=V4), Vxlan(vni=78, port=4790, local=V6)])
def test_a_tunnel_lives_in_one_namespace_and_sends_in_another(
    here: TenantNetns, there: TenantNetns, tunnel: Vxlan
) -> None:
    device = Device(name="wx1", index=300, mac="02:00:00:00:00:01", mtu=1450)
    here.send(create_vxlan(device, tunnel, namespace=there.namespace.fd))
    there.send(alter_link(300, up=True))
    link = judged(there, "wx1")
    data = link["linkinfo"]["info_data"]
    assert (data["id"], data["port"], data["learning"]) == (tunnel.vni, tunnel.port, False)
    assert data["local" if tunnel.local.family == 4 else "local6"] == str(tunnel.local)
    assert "link_netnsid" in link
    assert found(there, "wx1").vxlan == tunnel
    sockets = Path("/proc/thread-self/net", "udp" if tunnel.local.family == 4 else "udp6").read_text()
    assert f":{tunnel.port:04X} " in sockets, "the tunnel's socket is where the wire is"


def test_a_tunnel_can_learn_and_stay(here: TenantNetns) -> None:
    here.send(create_vxlan(Device(name="wx1"), Vxlan(vni=77, port=4789, local=V4, learning=True)))
    assert judged(here, "wx1")["linkinfo"]["info_data"]["learning"] is True
    link = found(here, "wx1")
    assert link.vxlan is not None
    assert link.vxlan.learning


def test_ports_of_a_bridge_do_as_they_are_told(here: TenantNetns) -> None:
    quiet = PortFlags(
        learning=False,
        flood=False,
        multicast_flood=False,
        broadcast_flood=False,
        neighbour_suppression=True,
        isolated=True,
        hairpin=True,
    )
    here.send(
        create_bridge(Device(name="br0", index=50)),
        create_vxlan(Device(name="wx1", index=51), Vxlan(vni=77, port=4789, local=V4)),
        alter_link(51, master=50),
        alter_port(51, quiet),
    )
    (port,) = here.ask("bridge", "-j", "-d", "link", "show", "dev", "wx1")
    assert not any(port[name] for name in ("learning", "flood", "mcast_flood", "bcast_flood"))
    assert all(port[name] for name in ("neigh_suppress", "isolated", "hairpin"))
    assert found(here, "wx1").port == quiet
    here.send(alter_port(51, PortFlags()))
    assert found(here, "wx1").port == PortFlags()
    here.send(alter_link(51, master=0))
    assert (found(here, "wx1").master, found(here, "wx1").port) == (0, None)


def test_a_deleted_device_is_gone_and_deleting_again_is_fine(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    here.send(delete_link(100))
    here.send(delete_link(100))
    assert [link.name for link in (*read_links(here.route), *read_links(there.route))] == ["lo", "lo"]


def test_a_group_is_deleted_at_once_and_others_stay(here: TenantNetns, make_space: MakeSpace) -> None:
    pods = make_space("pods")
    here.send(
        *(
            create_veth(
                Device(name=f"wp{number}"),
                Device(name=f"eth{number}"),
                peer_namespace=pods.namespace.fd,
                group=87 if number % 2 else 0,
            )
            for number in range(20)
        )
    )
    here.send(delete_group(87))
    here.send(delete_group(87))
    assert {link.name for link in read_links(pods.route)} == {"lo", *(f"eth{number}" for number in range(0, 20, 2))}


def test_foreign_kinds_of_devices_are_read_too(here: TenantNetns) -> None:
    here.ask("ip", "link", "add", "tunnel0", "type", "vxlan", "external")
    here.ask("ip", "link", "add", "mac0", "link", "tunnel0", "type", "macvlan")
    kinds = {link.name: (link.kind, link.peer, link.vxlan) for link in read_links(here.route)}
    below = found(here, "tunnel0").index
    assert kinds == {"lo": ("", 0, None), "tunnel0": ("vxlan", 0, None), "mac0": ("macvlan", below, None)}
