"""The ledger loses nothing to kill -9 and believes nothing that was torn."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from weft.agent.store.attachment_store import Attachment, Handle, Stage
from weft.agent.store.attachment_wal import REWRITE_AFTER, AttachmentWal
from weft.domain import model
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointId, NetworkName, TenantName

BOOT = "boot-1"


def note(name: str, *, stage: Stage = Stage.ATTACHED, interface: str = "eth0") -> Attachment:
    endpoint = model.Endpoint(
        tenant=TenantName("blue"),
        network=NetworkName("net"),
        endpoint_id=EndpointId(name),
        ip_address="10.1.1.1",
        container_id=name,
        interface=interface,
    )
    return Attachment(endpoint=endpoint, published=True, stage=stage)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger"


def reopened(path: Path, *, boot: str = BOOT) -> AttachmentWal:
    return AttachmentWal(path, boot=boot)


def test_what_was_noted_is_there_after_a_restart(path: Path) -> None:
    ledger = reopened(path)
    ledger.put(note("a"))
    ledger.put(note("b", stage=Stage.WIRING))
    ledger.change(note("a").key, stage=Stage.LEAVING)
    ledger.forget(note("b").key)
    ledger.close()
    again = reopened(path)
    assert [(each.key.endpoint, each.stage) for each in again] == [("a", Stage.LEAVING)]
    assert again.find(Handle("a", "eth0")) is not None
    assert again.find(Handle("b", "eth0")) is None
    assert not again.rebooted
    again.close()


def test_what_nobody_has_heard_of_need_not_be_undone_after_a_kill(path: Path) -> None:
    """An address of our own blocks that neither the kernel nor the store knows of is free again."""
    ledger = reopened(path)
    known = note("known", stage=Stage.HELD)
    ledger.put(known)
    ledger.put(msgspec.structs.replace(note("unknown", stage=Stage.HELD), published=False))
    ledger.put(msgspec.structs.replace(note("wired", stage=Stage.HELD), published=False))
    assert {each.key.endpoint for each in ledger} == {"known", "unknown", "wired"}
    ledger.change(note("wired").key, stage=Stage.WIRING)
    ledger.close()
    again = reopened(path)
    assert {each.key.endpoint: each.stage for each in again} == {"known": Stage.HELD, "wired": Stage.WIRING}
    again.close()


def test_what_the_store_has_is_noted_together(path: Path) -> None:
    ledger = reopened(path)
    notes = [msgspec.structs.replace(note(name), published=False) for name in "abc"]
    for each in notes:
        ledger.put(each)
    ledger.note_published([notes[0].key, notes[2].key, note("gone").key])
    ledger.note_published([])
    ledger.close()
    again = reopened(path)
    assert {each.key.endpoint: each.published for each in again} == {"a": True, "b": False, "c": True}
    again.close()


def test_a_kill_at_any_byte_leaves_a_whole_prefix(path: Path) -> None:
    """A writer that died in the middle of a line: everything before that line counts, the line does not."""
    ledger = reopened(path)
    for name in "abc":
        ledger.put(note(name))
    ledger.close()
    whole = path.read_bytes()
    seen = set()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = reopened(path)
        names = [each.key.endpoint for each in again]
        again.close()
        assert names == list("abc")[: len(names)]
        seen.add(len(names))
    assert seen == {0, 1, 2, 3}


def test_damage_in_the_middle_is_not_believed(path: Path) -> None:
    ledger = reopened(path)
    for name in "abc":
        ledger.put(note(name))
    ledger.close()
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"b"', b'"x"')
    path.write_bytes(b"\n".join(lines))
    again = reopened(path)
    assert [each.key.endpoint for each in again] == ["a"]
    again.close()


def test_another_boot_is_noticed_once(path: Path) -> None:
    ledger = reopened(path)
    ledger.put(note("a"))
    ledger.close()
    after = reopened(path, boot="boot-2")
    assert after.rebooted
    assert [each.key.endpoint for each in after] == ["a"]
    after.close()
    later = reopened(path, boot="boot-2")
    assert not later.rebooted
    later.close()


def test_a_second_agent_is_kept_out(path: Path) -> None:
    ledger = reopened(path)
    with pytest.raises(Unavailable, match="another agent"):
        reopened(path)
    ledger.close()
    reopened(path).close()


def test_the_file_does_not_grow_for_ever(path: Path) -> None:
    ledger = reopened(path)
    for _ in range(REWRITE_AFTER):
        ledger.put(note("a"))
        ledger.forget(note("a").key)
    ledger.put(note("kept"))
    size = path.stat().st_size
    ledger.close()
    assert size < 3 * REWRITE_AFTER * 200
    again = reopened(path)
    assert [each.key.endpoint for each in again] == ["kept"]
    again.close()


def test_only_its_owner_can_read_it(path: Path) -> None:
    ledger = reopened(path)
    ledger.put(note("a"))
    ledger.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_container_may_have_several_interfaces(path: Path) -> None:
    """C-049: the handle is container and interface together."""
    ledger = reopened(path)
    ledger.put(note("a"))
    second = note("a-eth1", interface="eth1")
    ledger.put(second)
    ledger.forget(note("a").key)
    assert ledger.find(Handle("a", "eth0")) is None
    assert ledger.find(Handle("a-eth1", "eth1")) == second
    ledger.close()


def test_a_full_disk_refuses_a_note_and_tears_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line was written before the disk was full: what is noted later must be believed nevertheless."""
    ledger = reopened(path)
    ledger.put(note("a"))
    write = os.write
    with monkeypatch.context() as full, pytest.raises(Unavailable, match="No space left"):
        full.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        ledger.put(note("b"))
    assert [each.key.endpoint for each in ledger] == ["a"]
    ledger.put(note("c"))
    ledger.close()
    again = reopened(path)
    assert [each.key.endpoint for each in again] == ["a", "c"]
    again.close()


def test_an_agent_starts_on_a_full_disk_with_what_it_knows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written anew, but those who leave are noted in the file that is there."""

    def refuse(_: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = reopened(path)
    for name in "ab":
        ledger.put(note(name))
    ledger.close()
    path.write_bytes(path.read_bytes() + b"torn")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        again = reopened(path)
        again.forget(note("a").key)
        again.close()
        with pytest.raises(Unavailable, match="No space left"):
            reopened(path, boot="boot-2")
    assert not path.with_suffix(".new").exists()
    later = reopened(path)
    assert [each.key.endpoint for each in later] == ["b"]
    later.close()
