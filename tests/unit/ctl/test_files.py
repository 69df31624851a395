"""The token's file, and the files of backup and restore."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from weft.ctl.failures import FileFault
from weft.ctl.files import read_document, read_token, write_document


def config(home: Path, text: str, *, mode: int = 0o600) -> None:
    (home / ".netctl").mkdir(mode=0o700)
    path = home / ".netctl" / "config.json"
    path.write_text(text)
    path.chmod(mode)


def test_no_token_is_fine(tmp_path: Path) -> None:
    assert read_token({"HOME": str(tmp_path)}) == ""
    assert read_token({}) == ""


def test_the_token_of_the_file(tmp_path: Path) -> None:
    config(tmp_path, '{"token": "secret"}')
    assert read_token({"HOME": str(tmp_path)}) == "secret"


def test_the_environment_comes_before_the_file(tmp_path: Path) -> None:
    config(tmp_path, '{"token": "secret"}')
    assert read_token({"HOME": str(tmp_path), "NETCTL_TOKEN": "other"}) == "other"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_token_that_other_users_can_read_is_rejected(tmp_path: Path, mode: int) -> None:
    config(tmp_path, '{"token": "secret"}', mode=mode)
    with pytest.raises(FileFault, match="chmod 600"):
        read_token({"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    "text", ["", "[]", '"secret"', "{", '{"token": 7}', '{"token": "two words"}', '{"token": "a\\nb"}']
)
def test_an_invalid_file_is_reported(tmp_path: Path, text: str) -> None:
    config(tmp_path, text)
    with pytest.raises(FileFault, match=r"config\.json"):
        read_token({"HOME": str(tmp_path)})


def test_a_token_cannot_inject_a_header() -> None:
    with pytest.raises(FileFault, match="NETCTL_TOKEN"):
        read_token({"NETCTL_TOKEN": "a\r\nX-Evil: 1"})


def test_a_written_document_has_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "backup.json"
    write_document(str(path), b"one")
    write_document(str(path), b"two")
    assert read_document(str(path)) == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_unusable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileFault, match="cannot write"):
        write_document(str(tmp_path / "no" / "backup.json"), b"")
    with pytest.raises(FileFault, match="cannot read"):
        read_document(str(tmp_path / "missing"))
