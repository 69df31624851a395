"""Devices as messages, checked with pyroute2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.link import (
    Device,
    Link,
    PortFlags,
    Vxlan,
    change_address_settings,
    change_bridge_port,
    change_link,
    create_bridge,
    create_veth,
    create_vxlan,
    delete_group,
    delete_link,
    parse_link,
)
from weft.kernel.uapi.rtnetlink import IPV4_DEVCONF_RP_FILTER

if TYPE_CHECKING:
    from tests.unit.kernel.conftest import Decoder

HOST_END = Device(name="wp1", index=100, mac="ee:ee:ee:ee:ee:ee", mtu=1450)
POD_END = Device(name="eth0", index=200, mac="02:02:0a:00:00:02", mtu=1400)
ONE_QUEUE = {"IFLA_NUM_TX_QUEUES": 1, "IFLA_NUM_RX_QUEUES": 1}


def test_a_veth_pair_in_one_message(decode: Decoder) -> None:
    fields, attributes = decode(create_veth(HOST_END, POD_END, peer_namespace=9, master=50, group=7))
    assert fields["index"] == 100
    assert attributes == {
        "IFLA_IFNAME": "wp1",
        "IFLA_ADDRESS": "ee:ee:ee:ee:ee:ee",
        "IFLA_MTU": 1450,
        **ONE_QUEUE,
        "IFLA_MASTER": 50,
        "IFLA_GROUP": 7,
        "IFLA_LINKINFO": {
            "IFLA_INFO_KIND": "veth",
            "IFLA_INFO_DATA": {
                "VETH_INFO_PEER": {
                    "IFLA_IFNAME": "eth0",
                    "IFLA_ADDRESS": "02:02:0a:00:00:02",
                    "IFLA_MTU": 1400,
                    **ONE_QUEUE,
                    "IFLA_NET_NS_FD": 9,
                }
            },
        },
    }


def test_what_is_left_open_is_not_in_the_message(decode: Decoder) -> None:
    fields, attributes = decode(create_bridge(Device(name="br0")))
    assert fields["index"] == 0
    assert attributes == {
        "IFLA_IFNAME": "br0",
        **ONE_QUEUE,
        "IFLA_LINKINFO": {"IFLA_INFO_KIND": "bridge", "IFLA_INFO_DATA": {"IFLA_BR_MCAST_SNOOPING": 0}},
    }


@pytest.mark.parametrize(("local", "member"), [("10.0.0.1", "IFLA_VXLAN_LOCAL"), ("fd00::1", "IFLA_VXLAN_LOCAL6")])
def test_a_tunnel(decode: Decoder, local: str, member: str) -> None:
    tunnel = Vxlan(vni=77, port=4789, local=parse_address(local, field="local"))
    _, attributes = decode(create_vxlan(Device(name="wx1"), tunnel, namespace=9))
    assert attributes["IFLA_NET_NS_FD"] == 9
    assert attributes["IFLA_LINKINFO"]["IFLA_INFO_DATA"] == {
        "IFLA_VXLAN_ID": 77,
        member: local,
        "IFLA_VXLAN_PORT": 4789,
        "IFLA_VXLAN_LEARNING": 0,
        "IFLA_VXLAN_TOS": 1,
    }
    assert parse_link(create_vxlan(Device(name="wx1"), tunnel).payload).vxlan == tunnel


@pytest.mark.parametrize(("up", "flags", "change"), [(None, 0, 0), (True, 1, 1), (False, 0, 1)])
def test_up_down_and_neither(decode: Decoder, up: bool | None, flags: int, change: int) -> None:
    fields, attributes = decode(change_link(5, up=up))
    assert (fields["index"], fields["flags"], fields["change"], attributes) == (5, flags, change, {})


def test_altering_says_only_what_is_given(decode: Decoder) -> None:
    _, attributes = decode(change_link(5, name="eth1", alias="weft:x", mac="02:00:00:00:00:01", master=0, namespace=0))
    assert attributes == {
        "IFLA_IFNAME": "eth1",
        "IFLA_ADDRESS": "02:00:00:00:00:01",
        "IFLA_IFALIAS": "weft:x",
        "IFLA_MASTER": 0,
        "IFLA_NET_NS_FD": 0,
    }


def test_protocols_of_a_device(decode: Decoder) -> None:
    _, attributes = decode(change_address_settings(5, link_local=False, v4={IPV4_DEVCONF_RP_FILTER: 1}))
    protocols = attributes["IFLA_AF_SPEC"]
    assert protocols["AF_INET6"]["IFLA_INET6_ADDR_GEN_MODE"] == 1
    assert "AF_INET" in protocols


def test_ports_there_and_back(decode: Decoder) -> None:
    flags = PortFlags(learning=False, isolated=True, hairpin=True)
    request = change_bridge_port(5, flags)
    _, attributes = decode(request)
    assert attributes["IFLA_LINKINFO"]["IFLA_INFO_SLAVE_KIND"] == "bridge"
    assert parse_link(request.payload).port == flags


def test_a_group_is_deleted_by_its_number(decode: Decoder) -> None:
    fields, attributes = decode(delete_group(87))
    assert (fields["index"], attributes) == (0, {"IFLA_GROUP": 87})
    fields, attributes = decode(delete_link(5))
    assert (fields["index"], attributes) == (5, {})


def test_a_link_read_from_what_made_it() -> None:
    assert parse_link(create_veth(HOST_END, POD_END, peer_namespace=9, group=7).payload) == Link(
        index=100, name="wp1", kind="veth", mac=HOST_END.mac, mtu=1450, up=False, alias="", group=7, master=0, peer=0
    )


@given(st.binary(max_size=160) | st.binary(max_size=120).map(lambda data: bytes(16) + data))
def test_any_bytes_are_a_link_or_a_fault(payload: bytes) -> None:
    try:
        parse_link(payload)
    except DatapathFault:
        return
