"""Neighbours, proxies and forwarding entries as messages, checked with pyroute2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.neigh import (
    FdbEntry,
    Neighbour,
    Proxy,
    parse_fdb_entry,
    parse_neighbour,
    parse_proxy,
    put_fdb_entry,
    put_neighbour,
    put_proxy,
)

if TYPE_CHECKING:
    from tests.unit.kernel.conftest import Decoder

MAC = "02:02:0a:01:00:02"


def at(text: str) -> Address:
    return parse_address(text, field="address")


@pytest.mark.parametrize(("text", "family"), [("10.1.0.2", 2), ("fd01::2", 10)])
def test_a_permanent_neighbour(decode: Decoder, text: str, family: int) -> None:
    neighbour = Neighbour(link=5, address=at(text), mac=MAC)
    fields, attributes = decode(put_neighbour(neighbour))
    assert (fields["family"], fields["ifindex"], fields["state"], fields["flags"]) == (family, 5, 0x80, 0)
    assert attributes == {"NDA_DST": text, "NDA_LLADDR": MAC}
    assert parse_neighbour(put_neighbour(neighbour).payload) == neighbour


def test_a_proxied_address(decode: Decoder) -> None:
    proxy = Proxy(link=5, address=at("10.1.0.9"))
    fields, attributes = decode(put_proxy(proxy))
    assert (fields["flags"], attributes) == (0x8, {"NDA_DST": "10.1.0.9"})
    assert parse_proxy(put_proxy(proxy).payload) == proxy


@pytest.mark.parametrize("remote", ["192.0.2.1", "fd00::1"])
def test_forwarding_to_another_machine(decode: Decoder, remote: str) -> None:
    entry = FdbEntry(link=5, mac=MAC, remote=at(remote))
    fields, attributes = decode(put_fdb_entry(entry))
    assert (fields["family"], fields["state"], fields["flags"]) == (7, 0xC0, 0x2)
    assert attributes == {"NDA_LLADDR": MAC, "NDA_DST": remote}
    assert parse_fdb_entry(put_fdb_entry(entry).payload) == entry


def test_forwarding_by_the_bridge(decode: Decoder) -> None:
    fields, attributes = decode(put_fdb_entry(FdbEntry(link=5, mac=MAC)))
    assert (fields["family"], fields["state"], fields["flags"]) == (7, 0x40, 0x4)
    assert attributes == {"NDA_LLADDR": MAC}


def test_refusals_are_about_something() -> None:
    assert str(put_fdb_entry(FdbEntry(link=5, mac=MAC, remote=at("192.0.2.1")))) == (
        f"add FDB entry {MAC} by link 5 to 192.0.2.1"
    )
    assert str(put_neighbour(Neighbour(link=5, address=at("fd01::2"), mac=MAC))) == (
        f"add neighbour fd01::2 at {MAC} on link 5"
    )
    assert str(put_proxy(Proxy(link=5, address=at("fd01::2")))) == "add proxy for fd01::2 on link 5"


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    for parse in (parse_neighbour, parse_proxy, parse_fdb_entry):
        try:
            parse(payload)
        except DatapathFault:
            continue
