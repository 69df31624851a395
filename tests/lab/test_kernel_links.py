"""Devices, compared with `ip -d` and `bridge`, and read back."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import parse_address
from weft.kernel.netlink.link import (
    LOOPBACK_IFINDEX,
    Device,
    Link,
    PortFlags,
    Vxlan,
    change_address_settings,
    change_bridge_port,
    change_link,
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
from weft.kernel.uapi.rtnetlink import IPV4_DEVCONF_RP_FILTER, IPV4_DEVCONF_SEND_REDIRECTS

if TYPE_CHECKING:
    from tests.lab.conftest import MakeNetns, TenantNetns

V4, V6 = parse_address("127.0.0.1", field="local"), parse_address("::1", field="local")
HOST_END = Device(name="wp1", index=100, mac="ee:ee:ee:ee:ee:ee", mtu=1450)
POD_END = Device(name="eth0", index=200, mac="02:02:0a:00:00:02", mtu=1400)


def shown_by_ip(netns: TenantNetns, name: str) -> Any:
    (link,) = netns.ask("ip", "-j", "-d", "link", "show", "dev", name)
    return link


def read_existing(netns: TenantNetns, name: str) -> Link:
    link = read_link(netns.route, name)
    assert link is not None
    return link


def test_a_veth_pair_is_created_across_namespaces(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    for netns, end in ((here, HOST_END), (there, POD_END)):
        link = shown_by_ip(netns, end.name)
        assert (link["ifindex"], link["address"], link["mtu"]) == (end.index, end.mac, end.mtu)
        assert link["linkinfo"]["info_kind"] == "veth"
        assert (link["num_tx_queues"], link["num_rx_queues"]) == (1, 1)
        assert "UP" not in link["flags"]
    assert shown_by_ip(here, "wp1")["link_index"] == 200
    assert read_existing(here, "wp1") == Link(
        index=100, name="wp1", kind="veth", mac=HOST_END.mac, mtu=1450, up=False, alias="", group=0, master=0, peer=200
    )


def test_a_macvlan_has_its_parent_in_another_namespace(
    here: TenantNetns, there: TenantNetns, make_netns: MakeNetns
) -> None:
    """In passthru mode it has the parent's MAC and frames while it is up, and is deleted with it."""
    here.send(create_veth(HOST_END, POD_END, peer_namespace=make_netns("elsewhere").namespace.fd))
    here.send(create_macvlan(Device(name="eth0", mtu=1400), over=HOST_END.index, namespace=there.namespace.fd))
    link = shown_by_ip(there, "eth0")
    assert (link["address"], link["mtu"], link["link_index"]) == (HOST_END.mac, 1400, HOST_END.index)
    assert (
        link["linkinfo"] == {"info_kind": "macvlan", "info_data": {"mode": "passthru", "flags": []}} | link["linkinfo"]
    )
    assert (read_existing(there, "eth0").kind, read_existing(there, "eth0").peer) == ("macvlan", HOST_END.index)
    promiscuous_counts = []
    for up in (False, True, False):
        there.send(change_link(read_existing(there, "eth0").index, up=up))
        promiscuous_counts.append(read_existing(here, "wp1").promiscuous_users)
    assert promiscuous_counts == [0, 1, 0]
    with pytest.raises(NetlinkError) as refusal:
        here.send(create_macvlan(Device(name="eth1"), over=HOST_END.index, namespace=there.namespace.fd))
    assert refusal.value.errno == errno.EINVAL
    here.send(delete_link(HOST_END.index))
    assert read_link(there.route, "eth0") is None


def test_the_kernel_chooses_unset_attributes(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(Device(name="wp1"), Device(name="eth0"), peer_namespace=there.namespace.fd))
    link = read_existing(there, "eth0")
    assert link.index > LOOPBACK_IFINDEX
    assert link.mac
    assert link.mtu == 1500


def test_a_veth_is_created_with_master_and_group(here: TenantNetns, there: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd, master=50, group=7),
    )
    assert (shown_by_ip(here, "wp1")["master"], shown_by_ip(here, "wp1")["group"]) == ("br0", "7")
    assert (read_existing(here, "wp1").master, read_existing(here, "wp1").group) == (50, 7)
    assert shown_by_ip(here, "br0")["linkinfo"]["info_data"]["mcast_snooping"] == 0


def test_the_alias_is_set_in_the_batch_that_creates_the_device(here: TenantNetns, there: TenantNetns) -> None:
    here.send(
        create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd),
        change_link(100, alias="weft:blue", up=True),
        create_bridge(Device(name="br0")),
    )
    assert shown_by_ip(here, "wp1")["ifalias"] == "weft:blue"
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
def test_a_used_name_or_ifindex_is_reported_by_errno(
    here: TenantNetns, there: TenantNetns, here_end: Device, pod_end: Device
) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    with pytest.raises(NetlinkError) as refused:
        here.send(create_veth(here_end, pod_end, peer_namespace=there.namespace.fd))
    assert refused.value.errno in {errno.EEXIST, errno.EBUSY}
    assert {link.name for link in read_links(there.route)} == {"lo", "eth0"}


def test_altering_changes_only_the_given_attributes(here: TenantNetns) -> None:
    here.send(create_bridge(Device(name="br0", index=50, mac="02:00:00:00:00:01")))
    here.send(change_link(50, up=True))
    here.send(change_link(50, mtu=1400, group=9))
    here.send(change_link(50, alias="weft:x", mac="02:00:00:00:00:02"))
    link = read_existing(here, "br0")
    assert (link.up, link.mtu, link.group, link.alias, link.mac) == (True, 1400, 9, "weft:x", "02:00:00:00:00:02")
    here.send(change_link(50, up=False))
    here.send(change_link(50, name="br1", alias=""))
    link = read_existing(here, "br1")
    assert (link.up, link.mtu, link.alias) == (False, 1400, "")
    assert read_link(here.route, "br0") is None


def test_a_device_is_moved_out_of_a_pod_and_renamed(here: TenantNetns, there: TenantNetns) -> None:
    """As in DEL: moved and renamed in one netlink message."""
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    there.send(change_link(200, up=True))
    there.send(change_link(200, up=False, name="wgone200", group=87, namespace=here.namespace.fd))
    assert [link.name for link in read_links(there.route)] == ["lo"]
    link = read_existing(here, "wgone200")
    assert (link.up, link.group, link.mac) == (False, 87, POD_END.mac)


def test_a_device_without_ipv6_address_generation(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        create_bridge(Device(name="br1", index=51)),
        change_address_settings(50, link_local=False),
        change_address_settings(51, link_local=True),
        change_link(50, up=True),
        change_link(51, up=True),
    )
    assert shown_by_ip(here, "br0")["inet6_addr_gen_mode"] == "none"
    assert shown_by_ip(here, "br1")["inet6_addr_gen_mode"] == "eui64"
    assert here.ask("ip", "-j", "-6", "address", "show", "dev", "br0") == []
    assert here.ask("ip", "-j", "-6", "address", "show", "dev", "br1") != []


def test_ipv4_devconf_is_set_by_netlink(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=50)),
        change_address_settings(50, link_local=False, v4={IPV4_DEVCONF_RP_FILTER: 2, IPV4_DEVCONF_SEND_REDIRECTS: 0}),
    )
    settings = Path("/proc/sys/net/ipv4/conf/br0")
    assert (settings / "rp_filter").read_text().strip() == "2"
    assert (settings / "send_redirects").read_text().strip() == "0"


@pytest.mark.parametrize("tunnel", [Vxlan(vni=77, port=4789, local=V4), Vxlan(vni=78, port=4790, local=V6)])
def test_a_vxlan_device_sends_from_its_link_netns(here: TenantNetns, there: TenantNetns, tunnel: Vxlan) -> None:
    device = Device(name="wx1", index=300, mac="02:00:00:00:00:01", mtu=1450)
    here.send(create_vxlan(device, tunnel, namespace=there.namespace.fd))
    there.send(change_link(300, up=True))
    link = shown_by_ip(there, "wx1")
    data = link["linkinfo"]["info_data"]
    assert (data["id"], data["port"], data["learning"]) == (tunnel.vni, tunnel.port, False)
    assert data["local" if tunnel.local.family == 4 else "local6"] == str(tunnel.local)
    assert "link_netnsid" in link
    assert read_existing(there, "wx1").vxlan == tunnel
    sockets = Path("/proc/thread-self/net", "udp" if tunnel.local.family == 4 else "udp6").read_text()
    assert f":{tunnel.port:04X} " in sockets, "the tunnel's socket is in the underlay namespace"


def test_a_vxlan_device_with_learning(here: TenantNetns) -> None:
    here.send(create_vxlan(Device(name="wx1"), Vxlan(vni=77, port=4789, local=V4, learning=True)))
    assert shown_by_ip(here, "wx1")["linkinfo"]["info_data"]["learning"] is True
    link = read_existing(here, "wx1")
    assert link.vxlan is not None
    assert link.vxlan.learning


def test_bridge_port_flags(here: TenantNetns) -> None:
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
        change_link(51, master=50),
        change_bridge_port(51, quiet),
    )
    (port,) = here.ask("bridge", "-j", "-d", "link", "show", "dev", "wx1")
    assert not any(port[name] for name in ("learning", "flood", "mcast_flood", "bcast_flood"))
    assert all(port[name] for name in ("neigh_suppress", "isolated", "hairpin"))
    assert read_existing(here, "wx1").port == quiet
    here.send(change_bridge_port(51, PortFlags()))
    assert read_existing(here, "wx1").port == PortFlags()
    here.send(change_link(51, master=0))
    assert (read_existing(here, "wx1").master, read_existing(here, "wx1").port) == (0, None)


def test_deleting_a_device_is_idempotent(here: TenantNetns, there: TenantNetns) -> None:
    here.send(create_veth(HOST_END, POD_END, peer_namespace=there.namespace.fd))
    here.send(delete_link(100))
    here.send(delete_link(100))
    assert [link.name for link in (*read_links(here.route), *read_links(there.route))] == ["lo", "lo"]


def test_a_link_group_is_deleted_and_other_links_are_kept(here: TenantNetns, make_netns: MakeNetns) -> None:
    pods = make_netns("pods")
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


def test_unknown_link_kinds_are_read(here: TenantNetns) -> None:
    here.ask("ip", "link", "add", "tunnel0", "type", "vxlan", "external")
    here.ask("ip", "link", "add", "mac0", "link", "tunnel0", "type", "macvlan")
    kinds = {link.name: (link.kind, link.peer, link.vxlan) for link in read_links(here.route)}
    below = read_existing(here, "tunnel0").index
    assert kinds == {"lo": ("", 0, None), "tunnel0": ("vxlan", 0, None), "mac0": ("macvlan", below, None)}
