"""Chains that cannot work: lists in which a plugin that acts on the host end stands beside ours.

Such a plugin looks for an attachment's host end, and its packets, in the host's own network namespace; ours are in the
tenant's. It fails each ADD, or succeeds and does nothing. A plugin is not told who comes after it: who wants to know
reads the lists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from weft.cni.request import is_name

# Where runtimes look for networks, unless they were told otherwise.
CONF_DIR = Path("/etc/cni/net.d")

_SUFFIXES = frozenset({".conf", ".conflist", ".json"})

# A folder may change twice within one tick of its clock, which does not show; so one that has just changed is read.
_TICK_NS = 1_000_000_000

HOST_END_PLUGINS = frozenset({"bandwidth", "firewall", "portmap"})


class Chain(NamedTuple):
    """The plugins of one network by name, in order, and the file that lists them."""

    file: Path
    network: str
    plugins: tuple[str, ...]

    def names(self, ours: Collection[str]) -> bool:
        """Whether it calls a plugin of these names."""
        return any(plugin in ours for plugin in self.plugins)

    def fault(self, ours: Collection[str]) -> str:
        """What is wrong with calling ours in this chain; empty when nothing is."""
        misplaced = [plugin for plugin in self.plugins if plugin in HOST_END_PLUGINS]
        if not misplaced or not self.names(ours):
            return ""
        return f"{self.file} chains {' and '.join(misplaced)}, which cannot act on the host ends of our attachments"


class Chains:
    """What is wrong with the chains of a folder. They are read again when a file has changed; looking takes no time."""

    def __init__(self, folder: Path, *, ours: Collection[str]) -> None:
        self._folder = str(folder)
        self._ours = ours
        # The folder and what is in it.
        self._paths: tuple[str, ...] = (self._folder,)
        self._seen: list[tuple[int, int]] = []
        self._faults: Mapping[str, str] = {}

    def fault(self, network: str) -> str:
        """What is wrong with calling ours for a network; empty when nothing is, or nobody lists it."""
        seen = [*map(_stamp, self._paths)]
        if seen != self._seen or seen[0][0] > time_ns() - _TICK_NS:
            self._read()
        return self._faults.get(network, "")

    def _read(self) -> None:
        """Look before reading: what changes meanwhile is seen the next time."""
        folder = _stamp(self._folder)
        try:
            files = sorted(entry.path for entry in os.scandir(self._folder))
        except FileNotFoundError:
            files = []
        self._paths = (self._folder, *files)
        self._seen = [folder, *map(_stamp, files)]
        self._faults = {chain.network: chain.fault(self._ours) for chain in read_chains(Path(self._folder))}


def _stamp(path: str) -> tuple[int, int]:
    """What is another when a file is, or what a folder holds."""
    try:
        stat = os.lstat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def read_chains(folder: Path) -> Iterator[Chain]:
    """All chains of a folder. Files that no runtime could read are left out: they are nobody's."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _SUFFIXES and file.is_file() and (chain := read_chain(file)):
            yield chain


def read_chain(file: Path) -> Chain | None:
    """The chain in a file, be it a list or a single plugin; None when there is none."""
    network = _read_object(file)
    listed = network.get("plugins", [network])
    members = [*(listed if isinstance(listed, list) else ()), *map(_read_object, _more_plugins(file, network))]
    types = [each.get("type") for each in members if isinstance(each, dict)]
    plugins = tuple(each for each in types if isinstance(each, str))
    return Chain(file, str(network.get("name", "")), plugins) if plugins else None


def _more_plugins(file: Path, network: Mapping[str, object]) -> Iterable[Path]:
    """A list goes on in the folder of the network's name, unless it says otherwise (C-028)."""
    name = network.get("name")
    if file.suffix != ".conflist" or network.get("loadOnlyInlinedPlugins") in (True, "true"):
        return ()
    return sorted((file.parent / name).glob("*.conf")) if isinstance(name, str) and is_name(name) else ()


def _read_object(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError):
        return {}
    return value if isinstance(value, dict) else {}
