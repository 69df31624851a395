"""Cgroups for containers in tests. Unlike the rest of a lab, cgroups are not removed with a namespace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from weft.lab.waiting import until

_ROOT = Path("/sys/fs/cgroup")
_INHERITED = ("cpuset.cpus", "cpuset.mems")


@asynccontextmanager
async def own_cgroup(name: str) -> AsyncIterator[str]:
    """A name for cgroups directly below the root, which are removed afterwards. Their processes must have exited.

    It begins with `weft-` and our PID, so that cgroups of killed test runs can be recognized and removed.
    """
    _remove_orphans()
    try:
        yield name
    finally:
        await until(lambda: _remove_all(name))


def make_cgroup(name: str) -> None:
    """Create it in every hierarchy, able to hold processes and child cgroups."""
    hierarchies = [_ROOT] if (_ROOT / "cgroup.procs").exists() else [each for each in _ROOT.iterdir() if each.is_dir()]
    for hierarchy in hierarchies:
        cgroup = hierarchy / name
        cgroup.mkdir(exist_ok=True)
        for setting in _INHERITED:  # cgroup v1 leaves them empty, and then no process can join
            if (cgroup / setting).exists() and not (cgroup / setting).read_text().strip():
                (cgroup / setting).write_text((hierarchy / setting).read_text())


def _remove_orphans() -> None:
    """Remove cgroups of dead test runs. The kernel refuses to remove one with running processes."""
    for directory in (*_ROOT.glob("weft-*"), *_ROOT.glob("*/weft-*")):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove_all(directory.name)


def _remove_all(name: str) -> bool:
    """Whether all are removed. A cgroup cannot be removed before its last process has exited."""
    found = [*_ROOT.glob(f"{name}/**/"), *_ROOT.glob(f"*/{name}/**/")]
    for directory in sorted(found, reverse=True):
        with suppress(OSError):
            directory.rmdir()
    return not any(directory.exists() for directory in found)
