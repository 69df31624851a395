"""Segments in the kernel's terms: who may say what, who is where, and that news about others leave ours alone."""

from __future__ import annotations

from weft.adapters.netns.bridge.bridges import flags_of
from weft.adapters.netns.bridge.local_fdb import LocalFdb
from weft.adapters.netns.kernel_state import facts_of
from weft.adapters.netns.nft.anti_spoofing import link_local, spoofguard_entries
from weft.adapters.netns.nft.bridge_filter import STATION_SETS
from weft.adapters.netns.nft.entries import set_named
from weft.domain.addresses import parse_address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Port, VxlanPeer
from weft.domain.ids import TenantName
from weft.kernel.netlink.neigh import EVERYONE, Forwarding, Neighbour
from weft.kernel.netlink.nft_set import BRIDGE, INET
from weft.kernel.netlink.route import Prefix, Route

BLUE = TenantName("blue")
V4, V6 = (parse_address(text, field="test") for text in ("10.1.0.5", "2001:db8::5"))
VTEP = parse_address("192.0.2.2", field="vtep")
MAC = "02:02:0a:01:00:05"
PORT = Port(BLUE, "wp1", MAC, (V4, V6), 7)
STATION = RemoteMac(BLUE, 7, str(VTEP), MAC, (V4, V6))
INDEXES = {"wb7": 3, "wx7": 4, "wp1": 5}


def test_a_link_local_address_goes_with_a_mac() -> None:
    assert str(link_local(MAC)) == "fe80::2:aff:fe01:5"


def test_a_port_on_a_segment_speaks_by_the_sets_of_the_bridge() -> None:
    """In v6 it may be looked for, and answer, by the address of its link too."""
    names = sorted(entry.name for entry in spoofguard_entries(PORT))
    assert names == [
        "owners6",
        "owners6",
        "ports_self4",
        "ports_self6",
        "solicited6",
        "stations4",
        "stations6",
        "stations6",
    ]
    assert {set_named(name).family for name in STATION_SETS} == {BRIDGE}
    assert set_named("ports_self4").family == INET


def test_who_is_on_a_segment_is_reached_by_its_bridge() -> None:
    facts = facts_of([PORT], INDEXES)
    assert facts.routes == {Route(to=Prefix(V4, 32), link=3), Route(to=Prefix(V6, 128), link=3)}
    assert facts.neighbours == {Neighbour(link=3, address=each, mac=MAC) for each in (V4, V6)}
    assert facts.forwardings == {Forwarding(link=5, mac=MAC)}


def test_without_its_bridge_nobody_is_reached() -> None:
    """Its network has gone before it."""
    facts = facts_of([PORT, STATION], {"wx7": 4, "wp1": 5})
    assert not facts.routes and not facts.neighbours


def test_a_station_is_behind_the_tunnel() -> None:
    facts = facts_of([STATION], INDEXES)
    assert facts.forwardings == {Forwarding(link=4, mac=MAC, remote=VTEP), Forwarding(link=4, mac=MAC)}
    assert facts.neighbours == {Neighbour(link=3, address=each, mac=MAC) for each in (V4, V6)}


def test_a_gateway_is_asked_for_on_its_segment() -> None:
    (found,) = facts_of([Gateway(BLUE, V4, 7)], INDEXES).addresses
    assert found.link == 3
    assert facts_of([Gateway(BLUE, V4, 8)], INDEXES).addresses == frozenset()


def test_only_where_questions_are_flooded_peers_hear_them() -> None:
    quiet, loud = (facts_of([VxlanPeer(BLUE, 7, str(VTEP), floods)], INDEXES).forwardings for floods in (False, True))
    assert loud - quiet == {Forwarding(link=4, mac=EVERYONE, remote=VTEP)}
    assert not flags_of("wp1", floods=False).broadcast_flood and flags_of("wp1", floods=False).proxy_arp
    assert flags_of("wx7", floods=True).broadcast_flood and not flags_of("wx7", floods=True).neighbour_suppression


def test_old_news_of_others_leave_a_workload_of_ours_alone() -> None:
    own = LocalFdb([PORT], INDEXES)
    spared = own.spared(facts_of([STATION], INDEXES))
    assert spared.forwardings == {Forwarding(link=4, mac=MAC, remote=VTEP)}
    assert not spared.neighbours and not spared.routes
    own.discard(PORT, INDEXES)
    assert own.spared(facts_of([STATION], INDEXES)) == facts_of([STATION], INDEXES)
