"""Network configurations as a runtime reads them: lists, old single files, and the versions both sides speak."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document, decode_json
from weft.cni.request import is_name
from weft.cni.versions import SUPPORTED, UNSAID, SpecVersion

_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){1,2}")
_SINGLE = (".conf", ".json")
_LIST = ".conflist"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """One plugin of a list, with all its members as they were written."""

    type: str
    members: Mapping[str, object]

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities it declares as true."""
        declared = self.members.get("capabilities")
        return (
            frozenset(name for name, on in declared.items() if on is True)
            if isinstance(declared, dict)
            else frozenset()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkList:
    """A network: the plugins that make an attachment to it, in order. `source` is the file's text."""

    name: str
    version: SpecVersion
    plugins: tuple[PluginConfig, ...]
    disable_check: bool = False
    disable_gc: bool = False
    source: bytes = b""


def read_networks(folder: Path) -> Iterator[NetworkList]:
    """All networks of a folder: the lists by file name, then the single files (C-030)."""
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
    """A `.conflist`. Plugins are also read from `folder`/NAME/*.conf, unless the list says otherwise (C-020, C-028)."""
    document = Document.of(decode_json(source))
    name = _name(document)
    plugins = [_plugin(each) for each in _plugin_members(document)]
    only_inlined = _truth(document, "loadOnlyInlinedPlugins")
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
        disable_check=_truth(document, "disableCheck"),
        disable_gc=_truth(document, "disableGC"),
        source=source,
    )


def parse_single(source: bytes) -> NetworkList:
    """A file with one plugin, from before there were lists."""
    members = _members(source)
    document = Document(members)
    return NetworkList(name=_name(document), version=_version(document), plugins=(_plugin(members),), source=source)


def _members(source: bytes) -> dict[str, object]:
    value = decode_json(source)
    if not isinstance(value, dict):
        raise CniError(Code.BAD_CONFIG, "a plugin's configuration must be an object")
    return value


def _plugin_members(document: Document) -> list[dict[str, object]]:
    document.children("plugins")  # refuses what is no list of objects
    value = document.raw("plugins")
    return value if isinstance(value, list) else []


def _plugin(members: dict[str, object]) -> PluginConfig:
    kind = Document(members).text("type")
    if not kind or "/" in kind:
        raise CniError(Code.BAD_CONFIG, f"type {kind!r} is not the name of a plugin")
    return PluginConfig(type=kind, members=members)


def _name(document: Document) -> str:
    name = document.text("name")
    if not is_name(name):
        raise CniError(Code.BAD_CONFIG, f"name {name!r} is not the name of a network")
    return name


def _version(document: Document) -> SpecVersion:
    """The highest that the list offers and we speak; newer ones are passed over (C-026)."""
    offered = [document.text("cniVersion") or UNSAID, *document.texts("cniVersions")]
    for version in offered:
        if not _VERSION.fullmatch(version):
            raise CniError(Code.NOT_DECODED, f"{version!r} is not a version")
    known = [version for version in SUPPORTED if version in offered]
    if not known:
        raise CniError(Code.INCOMPATIBLE_VERSION, f"none of the versions {', '.join(offered)} is supported")
    return max(known)


def _truth(document: Document, name: str) -> bool:
    """A truth value, which may be written as text in any case (C-027)."""
    value = document.raw(name)
    text = value.lower() if isinstance(value, str) else value
    if text in (None, False, "false"):
        return False
    if text in (True, "true"):
        return True
    raise document.fault(name, "true or false")
