"""Bridge mode: anti-spoofing entries, FDB and neighbours, port flags, and local workloads over outdated remote ones."""

from __future__ import annotations

from weft.adapters.netns.bridges import port_flags
from weft.adapters.netns.devices import link_local
from weft.adapters.netns.kernel_state import kernel_state_of
from weft.adapters.netns.nft.anti_spoofing import spoofguard_entries
from weft.adapters.netns.nft.entries import BRIDGE_SETS, set_named
from weft.adapters.netns.tenant_netns import LocalFdb
from weft.domain.addresses import parse_address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Port, VxlanPeer
from weft.domain.ids import TenantName
from weft.kernel.netlink.neigh import DEFAULT_FDB_MAC, FdbEntry, Neighbour
from weft.kernel.netlink.route import Prefix, Route
from weft.kernel.uapi.nf_tables import NFPROTO_BRIDGE, NFPROTO_INET

BLUE = TenantName("blue")
V4, V6 = (parse_address(text, field="test") for text in ("10.1.0.5", "2001:db8::5"))
VTEP = parse_address("192.0.2.2", field="vtep")
MAC = "02:02:0a:01:00:05"
PORT = Port(BLUE, "wp1", MAC, (V4, V6), 7)
REMOTE = RemoteMac(BLUE, 7, str(VTEP), MAC, (V4, V6))
INDEXES = {"wb7": 3, "wx7": 4, "wp1": 5}


def test_the_link_local_address_of_a_mac() -> None:
    assert str(link_local(MAC)) == "fe80::2:aff:fe01:5"


def test_a_bridged_port_has_its_entries_in_the_bridge_table() -> None:
    """In v6 also for its link-local address, which neighbour discovery uses."""
    names = sorted(entry.name for entry in spoofguard_entries(PORT))
    assert names == [
        "hairpin_self4",
        "hairpin_self6",
        "l2_spoofguard4",
        "l2_spoofguard6",
        "l2_spoofguard6",
        "local_ips4",
        "local_ips6",
        "nd_owners",
        "nd_owners",
        "ns_target_mac",
    ]
    assert {set_named(name).family for name in BRIDGE_SETS} == {NFPROTO_BRIDGE}
    assert set_named("hairpin_self4").family == NFPROTO_INET


def test_a_bridged_workload_is_reached_by_its_bridge() -> None:
    state = kernel_state_of([PORT], INDEXES)
    assert state.routes == {Route(to=Prefix(V4, 32), link=3), Route(to=Prefix(V6, 128), link=3)}
    assert state.neighbours == {Neighbour(link=3, address=each, mac=MAC) for each in (V4, V6)}
    assert state.fdb_entries == {FdbEntry(link=5, mac=MAC)}


def test_without_the_bridge_there_are_no_routes_and_neighbours() -> None:
    """The network may be deleted before the workload."""
    state = kernel_state_of([PORT, REMOTE], {"wx7": 4, "wp1": 5})
    assert not state.routes and not state.neighbours


def test_a_remote_mac_is_behind_the_tunnel() -> None:
    state = kernel_state_of([REMOTE], INDEXES)
    assert state.fdb_entries == {FdbEntry(link=4, mac=MAC, remote=VTEP), FdbEntry(link=4, mac=MAC)}
    assert state.neighbours == {Neighbour(link=3, address=each, mac=MAC) for each in (V4, V6)}


def test_a_gateway_is_an_address_of_its_bridge() -> None:
    (found,) = kernel_state_of([Gateway(BLUE, V4, 7)], INDEXES).addresses
    assert found.link == 3
    assert kernel_state_of([Gateway(BLUE, V4, 8)], INDEXES).addresses == frozenset()


def test_only_flood_mode_floods_to_peers() -> None:
    proxy, flood = (
        kernel_state_of([VxlanPeer(BLUE, 7, str(VTEP), floods)], INDEXES).fdb_entries for floods in (False, True)
    )
    assert flood - proxy == {FdbEntry(link=4, mac=DEFAULT_FDB_MAC, remote=VTEP)}
    assert not port_flags("wp1", floods=False).broadcast_flood and port_flags("wp1", floods=False).proxy_arp
    assert port_flags("wx7", floods=True).broadcast_flood and not port_flags("wx7", floods=True).neighbour_suppression


def test_an_outdated_remote_mac_does_not_affect_a_local_workload() -> None:
    own = LocalFdb([PORT], INDEXES)
    remaining = own.without_local(kernel_state_of([REMOTE], INDEXES))
    assert remaining.fdb_entries == {FdbEntry(link=4, mac=MAC, remote=VTEP)}
    assert not remaining.neighbours and not remaining.routes
    own.discard(PORT, INDEXES)
    assert own.without_local(kernel_state_of([REMOTE], INDEXES)) == kernel_state_of([REMOTE], INDEXES)
