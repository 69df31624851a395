"""Finds plugin chains that cannot work: those that chain ours with a plugin that acts on the host end of the veth.

Such a plugin looks for the host end, and for its packets, in the host's network namespace; ours are in the tenant's. It
fails each ADD, or succeeds and has no effect. A plugin does not learn from CNI what follows it in the chain, so the
configuration files are read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from weft.cni.request import is_name

# Where runtimes look for network configurations by default.
CONF_DIR = Path("/etc/cni/net.d")

_SUFFIXES = frozenset({".conf", ".conflist", ".json"})

# Two changes within one tick of the file system's clock have the same mtime. So a folder that changed within the last
# second is read again even if its mtime is unchanged.
_TICK_NS = 1_000_000_000

# Larger files are skipped: no runtime would take them for a network configuration.
_MAX_FILE = 1 << 20

HOST_END_PLUGINS = frozenset({"bandwidth", "firewall", "portmap"})


class Chain(NamedTuple):
    """The plugins of one network in order, and the file that lists them."""

    file: Path
    network: str
    plugins: tuple[str, ...]

    def calls(self, ours: Collection[str]) -> bool:
        """Whether it calls a plugin of one of these names."""
        return any(plugin in ours for plugin in self.plugins)

    def fault(self, ours: Collection[str]) -> str:
        """Why ours cannot work in this chain; empty when it can."""
        incompatible = [plugin for plugin in self.plugins if plugin in HOST_END_PLUGINS]
        if not incompatible or not self.calls(ours):
            return ""
        return f"{self.file} chains {' and '.join(incompatible)}, which cannot act on the host ends of our attachments"


class Chains:
    """The faults of the chains of a folder. Files are read again only when one has changed."""

    def __init__(self, folder: Path, *, ours: Collection[str]) -> None:
        self._folder = str(folder)
        self._ours = ours
        # The folder itself, for files that come and go, and its files.
        self._paths: tuple[str, ...] = (self._folder,)
        self._seen: list[tuple[int, int]] = []
        self._faults: Mapping[str, str] = {}

    def fault(self, network: str) -> str:
        """Why ours cannot work for a network; empty when it can, or when no file lists the network."""
        # A few lstat calls per ADD.
        seen = [*map(_version, self._paths)]
        if seen != self._seen or seen[0][0] > time_ns() - _TICK_NS:
            self._read()
        return self._faults.get(network, "")

    def _read(self) -> None:
        # Versions are taken before the files are read: a change in between is then seen by the next call.
        folder = _version(self._folder)
        try:
            files = sorted(entry.path for entry in os.scandir(self._folder))
        except OSError:
            files = []
        self._paths = (self._folder, *files)
        self._seen = [folder, *map(_version, files)]
        self._faults = {chain.network: chain.fault(self._ours) for chain in read_chains(Path(self._folder))}


def _version(path: str) -> tuple[int, int]:
    """Differs when the file, or the listing of the folder, has changed."""
    try:
        stat = os.lstat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def read_chains(folder: Path) -> Iterator[Chain]:
    """All chains of a folder. Files that no runtime could read are skipped."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _SUFFIXES and file.is_file() and (chain := read_chain(file)):
            yield chain


def read_chain(file: Path) -> Chain | None:
    """The chain in a file, which has a list or a single plugin; None when there is none."""
    network = _read_object(file)
    listed = network.get("plugins", [network])
    members = [*(listed if isinstance(listed, list) else ()), *map(_read_object, _more_plugins(file, network))]
    types = [each.get("type") for each in members if isinstance(each, dict)]
    plugins = tuple(each for each in types if isinstance(each, str))
    return Chain(file, str(network.get("name", "")), plugins) if plugins else None


def _more_plugins(file: Path, network: Mapping[str, object]) -> Iterable[Path]:
    """A list continues in the folder of the network's name, unless it says otherwise (C-028)."""
    name = network.get("name")
    if file.suffix != ".conflist" or network.get("loadOnlyInlinedPlugins") in (True, "true"):
        return ()
    return sorted((file.parent / name).glob("*.conf")) if isinstance(name, str) and is_name(name) else ()


def _read_object(file: Path) -> dict[str, object]:
    try:
        value = json.loads(_read_file(file))
    except (ValueError, RecursionError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_file(file: Path) -> bytes:
    """A regular file of bounded size. An agent reads it on its event loop, which a FIFO would stop."""
    handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
            return b""
        return opened.read(_MAX_FILE)
