"""Cgroups for containers of tests: they alone are of no namespace that would take them along."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from weft.lab.waiting import until

_ROOT = Path("/sys/fs/cgroup")
_INHERITED = ("cpuset.cpus", "cpuset.mems")


@asynccontextmanager
async def own_cgroup(name: str) -> AsyncIterator[str]:
    """A name for cgroups directly below the root, which are gone afterwards. Their processes must be gone by then.

    It must begin with `weft-` and the number of this process: what one that was killed has left is removed here.
    """
    _remove_orphans()
    try:
        yield name
    finally:
        await until(lambda: _remove_all(name))


def make_cgroup(name: str) -> None:
    """Make it in every hierarchy, able to hold processes and further cgroups."""
    hierarchies = [_ROOT] if (_ROOT / "cgroup.procs").exists() else [each for each in _ROOT.iterdir() if each.is_dir()]
    for hierarchy in hierarchies:
        cgroup = hierarchy / name
        cgroup.mkdir(exist_ok=True)
        for setting in _INHERITED:  # the first version of cgroups leaves them empty, and then nobody may enter
            if (cgroup / setting).exists() and not (cgroup / setting).read_text().strip():
                (cgroup / setting).write_text((hierarchy / setting).read_text())


def _remove_orphans() -> None:
    """Cgroups of processes that are no more. One with containers that still run stays, the kernel sees to that."""
    for directory in (*_ROOT.glob("weft-*"), *_ROOT.glob("*/weft-*")):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            _remove_all(directory.name)


def _remove_all(name: str) -> bool:
    """Whether none is left. One cannot be removed before its last process is quite gone."""
    found = [*_ROOT.glob(f"{name}/**/"), *_ROOT.glob(f"*/{name}/**/")]
    for directory in sorted(found, reverse=True):
        with suppress(OSError):
            directory.rmdir()
    return not any(directory.exists() for directory in found)
