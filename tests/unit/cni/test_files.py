"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cni.files import place_file, place_link, remove_file


def test_a_file_is_placed_once(tmp_path: Path) -> None:
    path = tmp_path / "program"
    assert place_file(path, b"one", mode=0o755)
    assert not place_file(path, b"one", mode=0o755)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o755)
    assert list(tmp_path.iterdir()) == [path]


def test_content_and_mode_are_both_wanted(tmp_path: Path) -> None:
    path = tmp_path / "program"
    place_file(path, b"one", mode=0o644)
    assert place_file(path, b"one", mode=0o755)
    assert place_file(path, b"two", mode=0o755)
    assert path.read_bytes() == b"two"


def test_who_runs_the_old_file_keeps_it(tmp_path: Path) -> None:
    """C-119: replaced by rename, never written over."""
    path = tmp_path / "program"
    place_file(path, b"one", mode=0o755)
    with path.open("rb") as running:
        place_file(path, b"two", mode=0o755)
        assert running.read() == b"one"


def test_a_link_gives_way_to_a_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"theirs")
    path = tmp_path / "program"
    path.symlink_to(other)
    place_file(path, b"one", mode=0o755)
    assert (path.is_symlink(), path.read_bytes(), other.read_bytes()) == (False, b"one", b"theirs")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        place_file(path, b"one", mode=0o755)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_placed_once(tmp_path: Path) -> None:
    path = tmp_path / "alias"
    (tmp_path / ".weft-alias.new").symlink_to("left-behind")
    assert place_link(path, "program")
    assert not place_link(path, "program")
    assert path.readlink() == Path("program")
    assert place_link(path, "other")
    assert list(tmp_path.iterdir()) == [path]


def test_removing_twice_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "alias"
    path.symlink_to("nowhere")
    remove_file(path)
    remove_file(path)
    assert not path.is_symlink()
