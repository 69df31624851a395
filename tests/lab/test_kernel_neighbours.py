"""Neighbours, proxied addresses and FDB entries, compared with `ip neigh` and `bridge fdb`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weft.domain.addresses import Address, parse_address
from weft.kernel.netlink.link import Device, Vxlan, change_link, create_bridge, create_vxlan
from weft.kernel.netlink.neigh import (
    FdbEntry,
    Neighbour,
    Proxy,
    drop_fdb_entry,
    drop_neighbour,
    drop_proxy,
    put_fdb_entry,
    put_neighbour,
    put_proxy,
    read_fdb,
    read_neighbours,
    read_proxies,
)

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

BRIDGE, TUNNEL = 50, 51
MAC, OTHER_MAC = "02:02:0a:01:00:02", "02:02:0a:01:00:03"
GROUP_MAC = "03:77:c0:00:02:02"


def at(text: str) -> Address:
    return parse_address(text, field="address")


NEIGHBOURS = [
    Neighbour(link=BRIDGE, address=at("10.1.0.2"), mac=MAC),
    Neighbour(link=BRIDGE, address=at("fd01::2"), mac=MAC),
    Neighbour(link=TUNNEL, address=at("10.1.0.2"), mac=OTHER_MAC),
]
PROXIES = [Proxy(link=BRIDGE, address=at("10.1.0.9")), Proxy(link=BRIDGE, address=at("fd01::9"))]
FORWARDINGS = [
    FdbEntry(link=TUNNEL, mac=MAC, remote=at("192.0.2.2")),
    FdbEntry(link=TUNNEL, mac=OTHER_MAC, remote=at("192.0.2.3")),
    FdbEntry(link=TUNNEL, mac=MAC),
]


@pytest.fixture(autouse=True)
def devices(here: TenantNetns) -> None:
    here.send(
        create_bridge(Device(name="br0", index=BRIDGE)),
        create_vxlan(Device(name="wx1", index=TUNNEL), Vxlan(vni=77, port=4789, local=at("127.0.0.1"))),
        change_link(BRIDGE, up=True),
        change_link(TUNNEL, up=True, master=BRIDGE),
    )


def test_neighbours_are_permanent(here: TenantNetns) -> None:
    here.send(*map(put_neighbour, NEIGHBOURS * 2))
    shown_by_ip = {
        (entry["dev"], entry["dst"], entry["lladdr"])
        for entry in here.ask("ip", "-j", "neigh", "show", "nud", "permanent")
    }
    assert shown_by_ip == {("br0", "10.1.0.2", MAC), ("br0", "fd01::2", MAC), ("wx1", "10.1.0.2", OTHER_MAC)}
    assert set(read_neighbours(here.route)) == set(NEIGHBOURS)
    here.send(*map(drop_neighbour, NEIGHBOURS * 2))
    assert read_neighbours(here.route) == []


def test_the_mac_of_a_neighbour_changes(here: TenantNetns) -> None:
    moved = Neighbour(link=BRIDGE, address=at("10.1.0.2"), mac=OTHER_MAC)
    here.send(put_neighbour(NEIGHBOURS[0]), put_neighbour(moved))
    assert read_neighbours(here.route) == [moved]


def test_learned_neighbours_are_not_read(here: TenantNetns) -> None:
    here.ask("ip", "neigh", "add", "10.1.0.3", "lladdr", MAC, "dev", "br0", "nud", "reachable")
    assert read_neighbours(here.route) == []


def test_proxied_addresses(here: TenantNetns) -> None:
    here.send(*map(put_proxy, PROXIES * 2))
    shown_by_ip = {(entry["dev"], entry["dst"]) for entry in here.ask("ip", "-j", "neigh", "show", "proxy")}
    assert shown_by_ip == {("br0", "10.1.0.9"), ("br0", "fd01::9")}
    assert set(read_proxies(here.route)) == set(PROXIES)
    assert read_neighbours(here.route) == []
    here.send(*map(drop_proxy, PROXIES * 2))
    assert read_proxies(here.route) == []


def test_fdb_entries_of_a_tunnel_and_of_a_bridge(here: TenantNetns) -> None:
    here.send(*map(put_fdb_entry, FORWARDINGS * 2))
    entries = here.ask("bridge", "-j", "fdb", "show", "dev", "wx1")
    remote = {entry["mac"]: entry["dst"] for entry in entries if "dst" in entry}
    assert remote == {MAC: "192.0.2.2", OTHER_MAC: "192.0.2.3"}
    assert [entry["state"] for entry in entries if entry["mac"] == MAC and "master" in entry] == ["static"]
    assert set(read_fdb(here.route)) == set(FORWARDINGS)
    here.send(*map(drop_fdb_entry, FORWARDINGS * 2))
    assert read_fdb(here.route) == []


def test_an_fdb_entry_moves_to_another_vtep(here: TenantNetns) -> None:
    moved = FdbEntry(link=TUNNEL, mac=MAC, remote=at("192.0.2.9"))
    here.send(put_fdb_entry(FORWARDINGS[0]), put_fdb_entry(moved))
    assert read_fdb(here.route) == [moved]


def test_a_multicast_mac_has_several_vteps(here: TenantNetns) -> None:
    two = [FdbEntry(link=TUNNEL, mac=GROUP_MAC, remote=at(remote)) for remote in ("192.0.2.2", "192.0.2.9")]
    here.send(*map(put_fdb_entry, two * 2))
    assert set(read_fdb(here.route)) == set(two)
    here.send(drop_fdb_entry(two[0]))
    assert read_fdb(here.route) == two[1:]


def test_dropping_entries_of_a_deleted_device(here: TenantNetns) -> None:
    here.send(
        drop_neighbour(Neighbour(link=4711, address=at("10.1.0.2"), mac=MAC)),
        drop_proxy(Proxy(link=4711, address=at("fd01::9"))),
        drop_fdb_entry(FdbEntry(link=4711, mac=MAC, remote=at("192.0.2.2"))),
    )
