"""Elements of nft sets and maps of every type we use, compared with `nft -j`."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

from weft.domain.addresses import parse_address
from weft.kernel.netlink.codec import pack_address, pack_mac
from weft.kernel.netlink.nft_set import (
    Element,
    SetName,
    Verdict,
    apply_changes,
    drop_elements,
    interface,
    key,
    mark,
    port,
    protocol,
    put_elements,
    read_elements,
)
from weft.kernel.netlink.socket import NetlinkError
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.nf_tables import NF_ACCEPT, NF_DROP, NFPROTO_INET, NFT_JUMP
from weft.lab.servers.processes import DEADLINE
from weft.lab.waiting import until

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

TABLE = """
add table inet weft
add chain inet weft web
add set inet weft addresses { type ipv4_addr; }
add set inet weft addresses6 { type ipv6_addr; }
add set inet weft ports { type ifname . ether_addr . ipv4_addr; }
add set inet weft services { type inet_service; }
add set inet weft allowed { type mark . mark . inet_proto . inet_service; }
add map inet weft identities { type ipv4_addr : mark; }
add map inet weft verdicts { type ipv4_addr . inet_service : verdict; }
add map inet weft backends { type ipv4_addr . inet_service : ipv4_addr . inet_service; }
"""


def at(text: str) -> bytes:
    return pack_address(parse_address(text, field="address"))


def named(name: str) -> SetName:
    return SetName(NFPROTO_INET, "weft", name)


EXAMPLES: dict[str, tuple[Iterable[Element], list[Any]]] = {
    "addresses": ([Element(key=at("10.0.0.1")), Element(key=at("10.0.0.2"))], ["10.0.0.1", "10.0.0.2"]),
    "addresses6": ([Element(key=at("fd00::1"))], ["fd00::1"]),
    "ports": (
        [Element(key=key(interface("wp1"), pack_mac("02:02:0a:00:00:01"), at("10.0.0.1")))],
        [{"concat": ["wp1", "02:02:0a:00:00:01", "10.0.0.1"]}],
    ),
    "services": ([Element(key=port(80)), Element(key=port(443))], [80, 443]),
    "allowed": (
        [Element(key=key(mark(1), mark(2), protocol(6), port(80)))],
        [{"concat": [1, 2, "tcp", 80]}],
    ),
    "identities": ([Element(key=at("10.0.0.1"), value=mark(77))], [["10.0.0.1", 77]]),
    "verdicts": (
        [
            Element(key=key(at("10.0.0.1"), port(80)), verdict=Verdict(NFT_JUMP, "web")),
            Element(key=key(at("10.0.0.2"), port(80)), verdict=Verdict(NF_ACCEPT)),
            Element(key=key(at("10.0.0.3"), port(80)), verdict=Verdict(NF_DROP)),
        ],
        [
            [{"concat": ["10.0.0.1", 80]}, {"jump": {"target": "web"}}],
            [{"concat": ["10.0.0.2", 80]}, {"accept": None}],
            [{"concat": ["10.0.0.3", 80]}, {"drop": None}],
        ],
    ),
    "backends": (
        [Element(key=key(at("10.96.0.1"), port(80)), value=key(at("10.0.0.1"), port(8080)))],
        [[{"concat": ["10.96.0.1", 80]}, {"concat": ["10.0.0.1", 8080]}]],
    ),
}


@pytest.fixture(autouse=True)
def table(here: TenantNetns) -> None:
    with open_nftables(here.namespace) as nft:
        nft.run(TABLE)


def shown_by_nft(netns: TenantNetns, name: str) -> list[Any]:
    listed = netns.ask("nft", "-j", "list table inet weft")["nftables"]
    (found,) = (item[kind] for item in listed for kind in ("set", "map") if kind in item and item[kind]["name"] == name)
    return sorted(found.get("elem", []), key=str)


@pytest.mark.parametrize("name", EXAMPLES)
def test_elements_are_added_and_deleted(here: TenantNetns, name: str) -> None:
    elements, meaning = EXAMPLES[name]
    apply_changes(here.netfilter, put_elements(named(name), elements))
    assert shown_by_nft(here, name) == sorted(meaning, key=str)
    assert set(read_elements(here.netfilter, named(name))) == set(elements)
    apply_changes(here.netfilter, drop_elements(named(name), elements))
    assert shown_by_nft(here, name) == []
    assert read_elements(here.netfilter, named(name)) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_elements_of_nft_have_the_same_encoding(here: TenantNetns, name: str) -> None:
    elements, meaning = EXAMPLES[name]
    command_json = {"add": {"element": {"family": "inet", "table": "weft", "name": name, "elem": meaning}}}
    command = json.dumps({"nftables": [command_json]}).encode()
    subprocess.run(["nft", "-j", "-f", "-"], input=command, check=True, timeout=DEADLINE)
    assert set(read_elements(here.netfilter, named(name))) == set(elements)


@pytest.mark.parametrize("name", EXAMPLES)
def test_adding_existing_elements_succeeds(here: TenantNetns, name: str) -> None:
    elements, meaning = EXAMPLES[name]
    for _ in range(2):
        apply_changes(here.netfilter, put_elements(named(name), elements))
    assert shown_by_nft(here, name) == sorted(meaning, key=str)


def test_a_map_value_is_replaced_in_one_transaction(here: TenantNetns) -> None:
    old, new = (Element(key=at("10.0.0.1"), value=mark(number)) for number in (1, 2))
    target = named("identities")
    apply_changes(here.netfilter, put_elements(target, [old]))
    apply_changes(here.netfilter, [*drop_elements(target, [old]), *put_elements(target, [new])])
    assert shown_by_nft(here, "identities") == [["10.0.0.1", 2]]


ONE = Element(key=at("10.0.0.1"))
REFUSALS = {
    "deleting a missing element": (drop_elements(named("addresses"), [ONE]), errno.ENOENT),
    "no such set": (put_elements(named("nowhere"), [ONE]), errno.ENOENT),
    "no such table": (put_elements(SetName(NFPROTO_INET, "nowhere", "addresses"), [ONE]), errno.ENOENT),
    "another value": (put_elements(named("identities"), [Element(key=at("10.0.0.9"), value=mark(1))]), errno.EEXIST),
    "no such chain": (
        put_elements(
            named("verdicts"), [Element(key=key(at("10.0.0.1"), port(80)), verdict=Verdict(NFT_JUMP, "gone"))]
        ),
        errno.ENOENT,
    ),
    "a key of another size": (put_elements(named("services"), [ONE]), errno.EINVAL),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_one_error_rolls_back_the_transaction(here: TenantNetns, why: str) -> None:
    requests, number = REFUSALS[why]
    apply_changes(here.netfilter, put_elements(named("identities"), [Element(key=at("10.0.0.9"), value=mark(9))]))
    for changes, position in (
        ([*put_elements(named("services"), [Element(key=port(80))]), *requests], 1),
        ([*requests, *put_elements(named("services"), [Element(key=port(80))])], 0),
    ):
        with pytest.raises(NetlinkError) as refused:
            apply_changes(here.netfilter, changes)
        assert (refused.value.errno, refused.value.position) == (number, position)
        assert shown_by_nft(here, "services") == []


def test_reading_a_missing_set_is_reported_by_errno(here: TenantNetns) -> None:
    with pytest.raises(NetlinkError) as refused:
        read_elements(here.netfilter, named("nowhere"))
    assert refused.value.errno == errno.ENOENT


async def test_ten_thousand_elements_in_one_transaction(here: TenantNetns) -> None:
    """The kernel resizes the hash table asynchronously, and a dump in the meantime may miss elements."""
    elements = [Element(key=number.to_bytes(4, "big")) for number in range(10_000)]
    apply_changes(here.netfilter, put_elements(named("addresses"), elements))
    await until(lambda: set(read_elements(here.netfilter, named("addresses"))) == set(elements))
    apply_changes(here.netfilter, drop_elements(named("addresses"), elements))
    assert read_elements(here.netfilter, named("addresses")) == []


def test_an_empty_transaction(here: TenantNetns) -> None:
    apply_changes(here.netfilter, [])
