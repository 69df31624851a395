"""Reads CNI network configurations as a runtime does: lists, single files, and version negotiation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document, decode_json
from weft.cni.request import is_name
from weft.cni.versions import DEFAULT, SUPPORTED, SpecVersion

# A version has two or three numbers; anything else is an error, not an unknown version.
_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){1,2}")
# libcni reads both suffixes as single plugins.
_SINGLE = (".conf", ".json")
_LIST = ".conflist"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """One plugin of a list, with its configuration unchanged."""

    type: str
    members: Mapping[str, object]

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities that are set to true."""
        capabilities = self.members.get("capabilities")
        if not isinstance(capabilities, dict):
            return frozenset()
        return frozenset(name for name, enabled in capabilities.items() if enabled is True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkList:
    """A network: its plugins in order of ADD. `source` is the text of the file."""

    name: str
    version: SpecVersion
    plugins: tuple[PluginConfig, ...]
    disable_check: bool = False
    disable_gc: bool = False
    source: bytes = b""


def read_networks(folder: Path) -> Iterator[NetworkList]:
    """Read all networks of a folder: the lists by file name, then the single files (C-030)."""
    files = sorted(folder.iterdir())
    for file in files:
        if file.suffix == _LIST:
            yield parse_list(file.read_bytes(), folder=folder)
    for file in files:
        if file.suffix in _SINGLE:
            yield parse_single(file.read_bytes())


def read_network(folder: Path, name: str) -> NetworkList:
    """The network of that name."""
    for network in read_networks(folder):
        if network.name == name:
            return network
    raise CniError(Code.BAD_CONFIG, f"there is no network {name} in {folder}")


def parse_list(source: bytes, *, folder: Path | None = None) -> NetworkList:
    """Parse a `.conflist`. Plugins are also read from FOLDER/NAME/*.conf unless the list forbids it (C-020, C-028)."""
    document = Document.of(decode_json(source))
    name = _name(document)
    plugins = [_plugin(members) for members in _plugin_members(document)]
    # Set by runtimes that want one file to describe the whole network (CNI 1.1).
    only_inlined = _boolean(document, "loadOnlyInlinedPlugins")
    if only_inlined and "plugins" not in document:
        raise CniError(Code.BAD_CONFIG, f"network {name}: loadOnlyInlinedPlugins without plugins")
    if not only_inlined and folder is not None:
        plugins += [_plugin(_members(file.read_bytes())) for file in sorted((folder / name).glob("*.conf"))]
    if not plugins:
        raise CniError(Code.BAD_CONFIG, f"network {name} has no plugins")
    return NetworkList(
        name=name,
        version=_version(document),
        plugins=tuple(plugins),
        disable_check=_boolean(document, "disableCheck"),
        disable_gc=_boolean(document, "disableGC"),
        source=source,
    )


def parse_single(source: bytes) -> NetworkList:
    """Parse a file with one plugin, the form that preceded lists."""
    members = _members(source)
    document = Document(members)
    return NetworkList(name=_name(document), version=_version(document), plugins=(_plugin(members),), source=source)


def _members(source: bytes) -> dict[str, object]:
    value = decode_json(source)
    if not isinstance(value, dict):
        raise CniError(Code.BAD_CONFIG, "a plugin's configuration must be an object")
    return value


def _plugin_members(document: Document) -> list[dict[str, object]]:
    document.children("plugins")  # raises unless it is a list of objects
    value = document.raw("plugins")
    return value if isinstance(value, list) else []


def _plugin(members: dict[str, object]) -> PluginConfig:
    kind = Document(members).text("type")
    # A type with a slash could execute a file outside of CNI_PATH.
    if not kind or "/" in kind:
        raise CniError(Code.BAD_CONFIG, f"type {kind!r} is not the name of a plugin")
    return PluginConfig(type=kind, members=members)


def _name(document: Document) -> str:
    name = document.text("name")
    if not is_name(name):
        raise CniError(Code.BAD_CONFIG, f"name {name!r} is not the name of a network")
    return name


def _version(document: Document) -> SpecVersion:
    """The highest version that the list offers and we support; unknown newer ones are ignored (C-026)."""
    offered = [document.text("cniVersion") or DEFAULT, *document.texts("cniVersions")]
    for version in offered:
        if not _VERSION.fullmatch(version):
            raise CniError(Code.NOT_DECODED, f"{version!r} is not a version")
    known = [version for version in SUPPORTED if version in offered]
    if not known:
        raise CniError(Code.INCOMPATIBLE_VERSION, f"none of the versions {', '.join(offered)} is supported")
    # SpecVersion compares by release order.
    return max(known)


def _boolean(document: Document, name: str) -> bool:
    """A boolean, which may be a string in any case (C-027)."""
    value = document.raw(name)
    text = value.lower() if isinstance(value, str) else value
    if text in (None, False, "false"):
        return False
    if text in (True, "true"):
        return True
    raise document.fault(name, "true or false")
