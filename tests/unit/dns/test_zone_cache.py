"""What netdns was told survives it, up to the last whole frame."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from weft.dns import zone_cache as module
from weft.dns.zone_cache import Memory
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.ids import TenantName
from weft.runtime.dns_control import Entries, FullSync, Message, Tenant

BLUE = TenantName("blue")
WEB = Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),), ("10.0.0.2",))
BASE = FullSync({BLUE: Zone({"a": WEB}, ("10.0.0.0/24",))})
SAID: list[Message] = [Entries(BLUE, {"b": WEB}, ("a",)), Tenant(TenantName("red"), Zone()), Tenant(BLUE)]


def filled(path: Path) -> None:
    memory = Memory(path)
    memory.rewrite(BASE)
    for message in SAID:
        memory.append(message)
    memory.close()


def test_what_was_said_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "names"
    assert list(Memory(path).read()) == []
    filled(path)
    assert list(Memory(path).read()) == [BASE, *SAID]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_kill_at_any_byte_costs_at_most_the_frame_it_tore(tmp_path: Path) -> None:
    path = tmp_path / "names"
    filled(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        read = list(Memory(path).read())
        assert read == [BASE, *SAID][: len(read)]


def test_what_cannot_be_read_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "names"
    filled(path)
    path.write_bytes(path.read_bytes() + b"\0\0\0\1\xc1")
    assert list(Memory(path).read()) == [BASE, *SAID]


def test_a_file_that_grows_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_TAIL", 100)
    memory = Memory(tmp_path / "names")
    memory.rewrite(BASE)
    for _ in range(10):
        memory.append(SAID[0])
    grown = memory.is_long
    memory.rewrite(BASE)
    assert (grown, memory.is_long) == (True, False)
    memory.close()
    assert list(Memory(tmp_path / "names").read()) == [BASE]
