"""The zone cache survives a kill up to the last complete frame."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns import zone_cache as module
from weft.dns.zone_cache import ZoneCache
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.ids import TenantName
from weft.runtime.dns_control import Entries, FullSync, Message, Tenant, encode

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


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_as_good_as_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "zones")
    assert list(ZoneCache(tmp_path / "zones").read()) == []


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 255))
def test_any_bytes_are_read_up_to_the_first_that_make_no_message(tail: bytes, at: int, value: int) -> None:
    with TemporaryDirectory() as home:
        path = Path(home) / "zones"
        filled(path)
        damaged = bytearray(path.read_bytes() + tail)
        damaged[at % len(damaged)] = value
        path.write_bytes(damaged)
        for message in ZoneCache(path).read():
            assert encode(message)


def test_after_a_full_disk_the_state_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a frame in the middle would hide all that follow."""
    cache = ZoneCache(tmp_path / "zones")
    cache.rewrite(BASE)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(OSError, match="space"):
            cache.append(MESSAGES[0])
    torn = cache.is_long
    cache.rewrite(BASE)
    assert (torn, cache.is_long) == (True, False)
    cache.append(MESSAGES[0])
    cache.close()
    assert list(ZoneCache(tmp_path / "zones").read()) == [BASE, MESSAGES[0]]
