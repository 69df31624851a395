"""Full disk: ADD fails with the reason, DEL works, no record is torn, and ADD works again once there is space."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest
from tests.support import inventory

from weft.cni.errors import CniError, Code
from weft.lab.hosts import Host
from weft.lab.namespaces import unmount
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE

PIECE = 4096


async def move_to_small_disk(host: Host) -> Path:
    """Restart the agent with its data directory on a disk of a few hundred kilobytes; return the directory."""
    data = host.home / "data"
    records = (data / "attachments.log").read_bytes()
    host.kill()
    mount_small_disk(data)
    (data / "attachments.log").write_bytes(records)
    await host.start()
    return data


def mount_small_disk(place: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    subprocess.run(command, check=True, timeout=DEADLINE)


def fill(directory: Path) -> Path:
    """Fill the disk with a file."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (PIECE, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return ballast


async def test_a_full_disk_fails_add_but_not_del(lab: NetLab) -> None:
    host = await lab.host("one")
    data = await move_to_small_disk(host)
    try:
        pods = [await host.pod(name) for name in "abcdef"]
        ballast = fill(data)
        # The log's reserved space may still hold a few records; then ADD fails with the reason.
        with pytest.raises(CniError) as refusal:
            for number in range(500):
                pods += [await host.pod(f"more{number}")]
        assert refusal.value.code == Code.TRY_LATER
        assert "No space left on device" in str(refusal.value)
        host.remove_netns(f"more{len(pods) - 6}")
        for pod in pods[:3]:
            await pod.remove()
        await inventory.wait_consistent(lab)
        await host.start()
        for pod in pods[3:]:
            await pod.check()
        for pod in pods[3:5]:
            await pod.remove()
        ballast.unlink()
        new = await host.pod("new")
        assert await new.eventually_reaches(pods[5])
        await host.start()
        await inventory.wait_consistent(lab)
        for pod in (*pods[5:], new):
            await pod.remove()
        await inventory.wait_consistent(lab)
    finally:
        host.kill()
        unmount(data)
