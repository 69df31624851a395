"""The zone cache survives a kill up to the last complete frame."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from weft.dns import zone_cache as module
from weft.dns.zone_cache import ZoneCache
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.ids import TenantName
from weft.runtime.dns_control import Entries, FullSync, Message, Tenant

BLUE = TenantName("blue")
WEB = Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),), ("10.0.0.2",))
BASE = FullSync({BLUE: Zone({"a": WEB}, ("10.0.0.0/24",))})
MESSAGES: list[Message] = [Entries(BLUE, {"b": WEB}, ("a",)), Tenant(TenantName("red"), Zone()), Tenant(BLUE)]


def filled(path: Path) -> None:
    cache = ZoneCache(path)
    cache.rewrite(BASE)
    for message in MESSAGES:
        cache.append(message)
    cache.close()


def test_messages_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "zones"
    assert list(ZoneCache(path).read()) == []
    filled(path)
    assert list(ZoneCache(path).read()) == [BASE, *MESSAGES]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_kill_at_any_byte_loses_at_most_the_torn_frame(tmp_path: Path) -> None:
    path = tmp_path / "zones"
    filled(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        read = list(ZoneCache(path).read())
        assert read == [BASE, *MESSAGES][: len(read)]


def test_an_unreadable_frame_ends_reading(tmp_path: Path) -> None:
    path = tmp_path / "zones"
    filled(path)
    path.write_bytes(path.read_bytes() + b"\0\0\0\1\xc1")
    assert list(ZoneCache(path).read()) == [BASE, *MESSAGES]


def test_a_long_file_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_TAIL", 100)
    cache = ZoneCache(tmp_path / "zones")
    cache.rewrite(BASE)
    for _ in range(10):
        cache.append(MESSAGES[0])
    grown = cache.is_long
    cache.rewrite(BASE)
    assert (grown, cache.is_long) == (True, False)
    cache.close()
    assert list(ZoneCache(tmp_path / "zones").read()) == [BASE]
