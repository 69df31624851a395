"""The attachment log loses nothing to kill -9, reads nothing that is torn, and refuses other formats."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.agent.store.attachment_store import COMPACT_AFTER, FILE_NAME, Attachment, AttachmentWal, Stage
from weft.cni.request import AttachmentId
from weft.domain import model
from weft.domain.errors import Malformed, Unavailable
from weft.domain.ids import EndpointId, NetworkName, TenantName

BOOT = "boot-1"


def attachment(name: str, *, stage: Stage = Stage.ATTACHED, interface: str = "eth0") -> Attachment:
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
    return tmp_path / "state" / FILE_NAME


def opened(path: Path, *, boot: str = BOOT) -> AttachmentWal:
    return AttachmentWal(path, boot=boot)


def test_records_survive_a_restart(path: Path) -> None:
    wal = opened(path)
    wal.put(attachment("a"))
    wal.put(attachment("b", stage=Stage.CONFIGURING))
    wal.update(attachment("a").key, stage=Stage.DELETING)
    wal.delete(attachment("b").key)
    wal.close()
    again = opened(path)
    assert [(record.key.endpoint, record.stage) for record in again] == [("a", Stage.DELETING)]
    assert again.find(AttachmentId("a", "eth0")) is not None
    assert again.find(AttachmentId("b", "eth0")) is None
    assert not again.rebooted
    again.close()


def test_a_reservation_unknown_to_kernel_and_store_needs_no_line(path: Path) -> None:
    """An address of our own blocks is free again after a kill, as long as neither kernel nor store has it."""
    wal = opened(path)
    known = attachment("known", stage=Stage.ALLOCATED)
    wal.put(known)
    wal.put(msgspec.structs.replace(attachment("unknown", stage=Stage.ALLOCATED), published=False))
    wal.put(msgspec.structs.replace(attachment("configured", stage=Stage.ALLOCATED), published=False))
    assert {record.key.endpoint for record in wal} == {"known", "unknown", "configured"}
    wal.update(attachment("configured").key, stage=Stage.CONFIGURING)
    wal.close()
    again = opened(path)
    assert {record.key.endpoint: record.stage for record in again} == {
        "known": Stage.ALLOCATED,
        "configured": Stage.CONFIGURING,
    }
    again.close()


def test_published_endpoints_are_recorded_in_one_write(path: Path) -> None:
    wal = opened(path)
    unpublished = [msgspec.structs.replace(attachment(name), published=False) for name in "abc"]
    for record in unpublished:
        wal.put(record)
    wal.mark_published([unpublished[0].key, unpublished[2].key, attachment("gone").key])
    wal.mark_published([])
    wal.close()
    again = opened(path)
    assert {record.key.endpoint: record.published for record in again} == {"a": True, "b": False, "c": True}
    again.close()


def test_a_kill_at_any_byte_leaves_a_whole_prefix(path: Path) -> None:
    """A writer that died in the middle of a line: everything before that line is read, the line is not."""
    wal = opened(path)
    for name in "abc":
        wal.put(attachment(name))
    wal.close()
    whole = path.read_bytes()
    seen = set()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = opened(path)
        names = [record.key.endpoint for record in again]
        again.close()
        assert names == list("abc")[: len(names)]
        seen.add(len(names))
    assert seen == {0, 1, 2, 3}


def numbered(number: int, *, stage: Stage = Stage.ATTACHED) -> Attachment:
    """An attachment with an address of its own."""
    record = attachment(f"pod-{number}", stage=stage)
    endpoint = msgspec.structs.replace(record.endpoint, ip_address=f"10.1.{number // 250}.{number % 250 + 1}")
    return msgspec.structs.replace(record, endpoint=endpoint)


def write_history(path: Path, *, count: int) -> None:
    """A log with several lines for each attachment, and with some that are deleted."""
    wal = opened(path)
    for number in range(count):
        for stage in (Stage.CONFIGURING, Stage.ATTACHED):
            wal.put(numbered(number, stage=stage))
    for number in range(count, count + 2):
        wal.put(numbered(number))
        wal.delete(numbered(number).key)
    wal.close()


def names_after(path: Path) -> tuple[set[str], bool]:
    """The attachments that are read from a log, and whether it says that it is damaged."""
    wal = opened(path)
    try:
        return {record.key.endpoint for record in wal if record.stage is Stage.ATTACHED}, wal.is_damaged
    finally:
        wal.close()


def test_M9_a_damaged_line_costs_one_record(path: Path) -> None:
    """And the agent knows: it must not take what has no record for a leftover."""
    wal = opened(path)
    for number in range(3):
        wal.put(numbered(number))
    wal.close()
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"pod-1"', b'"pod-7"')
    path.write_bytes(b"\n".join(lines))
    damaged = path.read_bytes()
    again = opened(path)
    assert [record.key.endpoint for record in again] == ["pod-0", "pod-2"]
    assert again.is_damaged
    assert again.damaged_lines == 1
    again.close()
    assert path.with_suffix(".damaged").read_bytes() == damaged
    later = opened(path)
    assert later.is_damaged, "what is lost is lost until the next boot"
    assert later.damaged_lines == 0
    later.close()
    rebooted = opened(path, boot="boot-2")
    assert not rebooted.is_damaged
    rebooted.close()


def test_M9_any_flipped_bit_costs_at_most_one_record(path: Path) -> None:
    """Every bit of the log, that of checksums, numbers and line breaks included."""
    count = 3
    write_history(path, count=count)
    whole = path.read_bytes()
    everyone = {f"pod-{number}" for number in range(count)}
    # Every 11th byte, and those around the line breaks. Each bit in turn; the fuzzers of `make soak` try all.
    breaks = {position + near for position in range(len(whole)) if whole[position] == 10 for near in (-1, 0, 1)}
    for position in sorted({*range(0, len(whole), 11), *breaks} & {*range(len(whole))}):
        bit = position % 8
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        names, is_damaged = names_after(path)
        # A deleted one may be back: its port is gone, so `recover` removes it.
        lost = everyone - names
        assert len(lost) <= 1, f"bit {bit} of byte {position}"
        assert is_damaged, f"bit {bit} of byte {position}"


def _cut(data: bytes, at: int, size: int) -> bytes:
    return data[:at] + data[at + size :]


def _insert(data: bytes, at: int, garbage: bytes) -> bytes:
    return data[:at] + garbage + data[at:]


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_M9_damage_costs_the_lines_that_it_hits_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut out, insert garbage, or repeat lines anywhere: every attachment whose lines are whole is read."""
    path = tmp_path_factory.mktemp("log") / FILE_NAME
    count = 8
    write_history(path, count=count)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole)), label="at")
    kind = data.draw(st.sampled_from(["truncate", "cut", "garbage", "repeat"]), label="kind")
    size = data.draw(st.integers(1, 400), label="size")
    hit: tuple[int, int]
    if kind == "truncate":
        changed, hit = whole[:at], (at, len(whole))
    elif kind == "cut":
        changed, hit = _cut(whole, at, size), (at, at + size)
    elif kind == "garbage":
        changed, hit = _insert(whole, at, data.draw(st.binary(min_size=1, max_size=300))), (at, at + 1)
    else:
        lines = whole.splitlines(keepends=True)
        again = data.draw(st.sampled_from(lines[1:]), label="line")
        boundary = sum(map(len, lines[: data.draw(st.integers(1, len(lines)), label="before")]))
        changed, hit = _insert(whole, boundary, again), (0, 0)
    path.write_bytes(changed)
    names, _ = names_after(path)
    assert names >= _untouched(whole, hit, count)


def _untouched(whole: bytes, hit: tuple[int, int], count: int) -> set[str]:
    """The attachments of which no line lies in the range that was hit."""
    untouched = {f"pod-{number}" for number in range(count)}
    start = 0
    for line in whole.splitlines(keepends=True):
        end = start + len(line)
        if start < hit[1] and hit[0] < end:
            untouched = {name for name in untouched if f'"{name}"'.encode() not in line}
        start = end
    return untouched


def test_M9_a_torn_last_line_is_no_damage(path: Path) -> None:
    write_history(path, count=2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert not names_after(path)[1]


def test_M9_an_address_given_again_belongs_to_the_later_record(path: Path) -> None:
    """The deletion between two holders of an address is damaged: the first one is gone, whatever its line says."""
    wal = opened(path)
    wal.put(attachment("first"))
    wal.delete(attachment("first").key)
    wal.put(attachment("second"))
    wal.close()
    lines = path.read_bytes().split(b"\n")
    lines[2] = b"garbage"
    path.write_bytes(b"\n".join(lines))
    again = opened(path)
    assert [record.key.endpoint for record in again] == ["second"]
    assert again.numbers_in_use(attachment("second").endpoint.network_key, 4)
    again.close()


def test_M9_an_agent_appends_behind_damage_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damaged file cannot be rewritten: what is appended is read at the next start all the same."""

    def refuse(_: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_history(path, count=3)
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + b"x" + whole[61:] + b"torn")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        wal = opened(path)
        wal.delete(numbered(2).key)
        wal.close()
    assert names_after(path)[0] >= {"pod-0", "pod-1"}
    assert "pod-2" not in names_after(path)[0]


def test_a_reboot_is_detected_once(path: Path) -> None:
    wal = opened(path)
    wal.put(attachment("a"))
    wal.close()
    after = opened(path, boot="boot-2")
    assert after.rebooted
    assert [record.key.endpoint for record in after] == ["a"]
    after.close()
    later = opened(path, boot="boot-2")
    assert not later.rebooted
    later.close()


def test_a_second_agent_is_refused(path: Path) -> None:
    wal = opened(path)
    with pytest.raises(Unavailable, match="another agent"):
        opened(path)
    wal.close()
    opened(path).close()


def test_the_file_is_compacted(path: Path) -> None:
    wal = opened(path)
    for _ in range(COMPACT_AFTER):
        wal.put(attachment("a"))
        wal.delete(attachment("a").key)
    wal.put(attachment("kept"))
    size = path.stat().st_size
    wal.close()
    assert size < 3 * COMPACT_AFTER * 200
    again = opened(path)
    assert [record.key.endpoint for record in again] == ["kept"]
    again.close()


def test_only_the_owner_can_read_the_file(path: Path) -> None:
    wal = opened(path)
    wal.put(attachment("a"))
    wal.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_container_may_have_several_interfaces(path: Path) -> None:
    """C-049: container and interface together identify an attachment."""
    wal = opened(path)
    wal.put(attachment("a"))
    second = attachment("a-eth1", interface="eth1")
    wal.put(second)
    wal.delete(attachment("a").key)
    assert wal.find(AttachmentId("a", "eth0")) is None
    assert wal.find(AttachmentId("a-eth1", "eth1")) == second
    wal.close()


def test_a_full_disk_refuses_a_record_and_tears_no_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line was written before the disk was full: later records must be readable nevertheless."""
    wal = opened(path)
    wal.put(attachment("a"))
    write = os.write
    with monkeypatch.context() as full, pytest.raises(Unavailable, match="No space left"):
        full.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        wal.put(attachment("b"))
    assert [record.key.endpoint for record in wal] == ["a"]
    wal.put(attachment("c"))
    wal.close()
    again = opened(path)
    assert [record.key.endpoint for record in again] == ["a", "c"]
    again.close()


def test_an_agent_starts_on_a_full_disk_with_its_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction fails, but deletions are appended to the file that is there."""

    def refuse(_: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wal = opened(path)
    for name in "ab":
        wal.put(attachment(name))
    wal.close()
    path.write_bytes(path.read_bytes() + b"torn")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        again = opened(path)
        again.delete(attachment("a").key)
        again.close()
        with pytest.raises(Unavailable, match="No space left"):
            opened(path, boot="boot-2")
    assert not path.with_suffix(".new").exists()
    later = opened(path)
    assert [record.key.endpoint for record in later] == ["b"]
    later.close()


# As commit 5a8de5d wrote it: a bare boot id, then lines with the fields `note`, `stage: wiring` and `wiring`.
FORMER = (
    b"aed59262 boot-1\n"
    b'd2c5fedc {"key":["blue","net","a"],"note":{"endpoint":{"tenantName":"blue","networkName":"net","endpointID":"a",'
    b'"ipAddress":"10.1.1.1","macAddress":"02:02:0a:01:01:01","homingHost":"one","intfName":"eth0","containerID":"a"},'
    b'"published":false,"stage":"wiring","wiring":{"port":{"tenant":"blue","interface":"wpc05dedf7c0d",'
    b'"mac":"02:02:0a:01:01:01","addresses":[[4,167837953]],"segment":0},"netns":"/run/netns/a","interface":"eth0",'
    b'"addresses":[],"mtu":1450,"full_name":"","way_out":true,"shares_subnets":false,"ports":[],'
    b'"rates":{"out":0,"out_burst":0,"into":0,"into_burst":0},"endpoint":"","workload":""},"network_name":"weft"}}\n'
)


@pytest.mark.parametrize("name", ["ledger", FILE_NAME])
def test_a_log_of_the_former_format_is_refused_in_one_sentence(path: Path, name: str) -> None:
    """Under its own name, and under today's: none of it is read, and the file stays as it is for the former version."""
    path.parent.mkdir()
    former = path.with_name(name)
    former.write_bytes(FORMER)
    for boot in (BOOT, "boot-2"):
        with pytest.raises(Malformed) as raised:
            opened(path, boot=boot)
        assert raised.value.message == (
            f"{former} was written by another version of Weft and cannot be read (this one reads format 2): "
            f"drain the node or reboot it, so that no attachment is left, delete {former} and start netplugin again"
        )
    assert former.read_bytes() == FORMER
    former.unlink()
    opened(path).close()


def test_a_log_of_a_later_format_is_refused(path: Path) -> None:
    path.parent.mkdir()
    header = b'{"format":3,"boot":"boot-1"}'
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(header), header))
    with pytest.raises(Malformed, match="this one reads format 2"):
        opened(path)
