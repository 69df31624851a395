"""Stores are found by name, and settings reach them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from weft.domain.errors import Invalid, Unavailable
from weft.domain.ids import StoreKey
from weft.drivers import (
    EtcdStoreSettings,
    MemoryStoreSettings,
    RemoteStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
    open_store,
)
from weft.ports.store import Put

A = StoreKey("a")


async def test_a_store_is_opened_as_the_settings_say(tmp_path: Path) -> None:
    settings: list[StoreSettings] = [MemoryStoreSettings(), SqliteStoreSettings(path=str(tmp_path / "store.db"))]
    for each in settings:
        async with open_store(each) as store:
            await store.commit([], [Put(A, b"1")])
            assert await store.read(A) is not None


@pytest.mark.parametrize(
    "settings",
    [
        EtcdStoreSettings(endpoints=("http://127.0.0.1:1",), user="weft", password="secret"),
        RemoteStoreSettings(endpoints=("unix:/run/absent.sock",), node="node-1"),
    ],
)
def test_every_setting_is_taken_by_its_store(settings: StoreSettings) -> None:
    open_store(settings)


def test_settings_that_name_no_server_are_refused() -> None:
    with pytest.raises(Invalid):
        open_store(EtcdStoreSettings(endpoints=()))


def test_a_store_that_is_not_installed_is_named() -> None:
    class Absent(MemoryStoreSettings):
        driver: ClassVar[str] = "absent"

    with pytest.raises(Unavailable, match="'absent'"):
        open_store(Absent())


def test_a_password_is_not_printed() -> None:
    assert "secret" not in repr(EtcdStoreSettings(endpoints=("http://127.0.0.1:1",), password="secret"))
