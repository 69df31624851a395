"""The ruleset through libnftables and through the nft program: both must agree."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from weft.domain.errors import DatapathFault
from weft.kernel import nftables
from weft.kernel.nftables import Nftables, NftablesLibrary, NftablesProgram, open_nftables

if TYPE_CHECKING:
    from tests.lab.conftest import TenantNetns

TABLE = """
add table inet weft
add set inet weft blocked { type ipv4_addr; }
add chain inet weft incoming { type filter hook input priority 0; policy accept; }
add rule inet weft incoming ip saddr @blocked counter drop
"""


@pytest.fixture(params=["library", "program"])
def nft(request: pytest.FixtureRequest, there: TenantNetns) -> Iterator[Nftables]:
    if request.param == "library":
        opened: Nftables = NftablesLibrary(ctypes.CDLL("libnftables.so.1"), namespace=there.namespace)
    else:
        program = shutil.which("nft")
        assert program is not None
        opened = NftablesProgram(program, namespace=there.namespace)
    with opened:
        yield opened


def tables(netns: TenantNetns) -> list[str]:
    return [item["table"]["name"] for item in netns.ask("nft", "-j", "list tables")["nftables"] if "table" in item]


def test_commands_take_effect_inside_only(nft: Nftables, here: TenantNetns, there: TenantNetns) -> None:
    nft.run(TABLE)
    assert (tables(there), tables(here)) == (["weft"], [])


def test_commands_are_atomic(nft: Nftables, there: TenantNetns) -> None:
    with pytest.raises(DatapathFault, match="No such file or directory"):
        nft.run("add table inet one\nadd rule inet two incoming accept\nadd table inet three")
    assert tables(there) == []


@pytest.mark.parametrize(
    "commands", ["no such command", "add table inet weft {", "add rule inet nowhere incoming accept"]
)
def test_a_fault_has_the_message_of_nft(nft: Nftables, commands: str) -> None:
    with pytest.raises(DatapathFault) as fault:
        nft.run(commands)
    assert "Error: " in fault.value.message


def test_created_objects_are_read_back(nft: Nftables) -> None:
    nft.run(TABLE)
    nft.run("add element inet weft blocked { 10.0.0.1, 10.0.0.2 }")
    listed = nft.read("list table inet weft")
    assert [next(iter(item)) for item in listed] == ["table", "set", "chain", "rule"]
    assert sorted(listed[1]["set"]["elem"]) == ["10.0.0.1", "10.0.0.2"]


def test_reads_and_writes_alternate(nft: Nftables) -> None:
    for number in range(5):
        nft.run(f"add table inet weft{number}")
        assert len(nft.read("list tables")) == number + 1


def test_reading_a_missing_table_is_a_fault(nft: Nftables) -> None:
    with pytest.raises(DatapathFault, match="No such file or directory"):
        nft.read("list table inet weft")


def test_the_library_is_preferred(there: TenantNetns) -> None:
    with open_nftables(there.namespace) as opened:
        assert isinstance(opened, NftablesLibrary)


def test_without_the_library_the_program_is_used(there: TenantNetns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nftables, "_LIBRARY", "libnowhere.so.1")
    with open_nftables(there.namespace) as opened:
        opened.run("add table inet weft")
    assert tables(there) == ["weft"]


def test_without_both_the_error_names_them(there: TenantNetns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nftables, "_LIBRARY", "libnowhere.so.1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DatapathFault, match="neither"):
        open_nftables(there.namespace)
