"""The runtime's cache of ADD results, in libcni's file format (`cniCacheV1`, C-116)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document

KIND = "cniCacheV1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """One interface of one container, with the runtime's parameters for the plugins."""

    container: str
    netns: str
    ifname: str = "eth0"
    args: tuple[tuple[str, str], ...] = ()
    capabilities: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """A cache entry of an ADD: the attachment, the network list, and the final result as JSON."""

    network: str
    attachment: Attachment
    source: bytes
    result: Mapping[str, object]


class ResultCache:
    """One file for each attachment, below `folder`/results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "results"

    def write(self, cached: Cached) -> None:
        """Store the result of an ADD."""
        attachment = cached.attachment
        document = {
            "kind": KIND,
            "containerId": attachment.container,
            # libcni stores the list as base64 and the result as plain JSON.
            "config": base64.b64encode(cached.source).decode(),
            "ifName": attachment.ifname,
            "networkName": cached.network,
            "netns": attachment.netns,
            "cniArgs": [list(pair) for pair in attachment.args],
            "capabilityArgs": dict(attachment.capabilities),
            "result": dict(cached.result),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(cached.network, attachment).write_text(json.dumps(document))

    def read(self, network: str, attachment: Attachment) -> Cached | None:
        """The entry of an attachment, or None; `CniError` with code 6 if it is unreadable."""
        file = self._file(network, attachment)
        return _parse(file) if file.exists() else None

    def remove(self, network: str, attachment: Attachment) -> None:
        """Delete the entry of an attachment; idempotent."""
        self._file(network, attachment).unlink(missing_ok=True)

    def all(self, network: str) -> Iterator[Cached]:
        """The readable entries of a network."""
        # The glob also matches networks whose names begin with this one and a dash.
        for file in sorted(self._folder.glob(f"{network}-*")):
            try:
                cached = _parse(file)
            except CniError:
                continue  # as libcni does: GC cannot detach what it cannot read
            if cached.network == network:
                yield cached

    def _file(self, network: str, attachment: Attachment) -> Path:
        return self._folder / f"{network}-{attachment.container}-{attachment.ifname}"


def _parse(file: Path) -> Cached:
    try:
        document = Document.of(json.loads(file.read_bytes()), where=file.name)
        source = base64.b64decode(document.text("config"), validate=True)
    except (ValueError, binascii.Error) as error:
        raise CniError(Code.NOT_DECODED, f"the cached result {file.name} cannot be read") from error
    result, capabilities = document.raw("result"), document.raw("capabilityArgs")
    if document.text("kind") != KIND or not isinstance(result, dict):
        raise CniError(Code.NOT_DECODED, f"{file.name} is not a cached result")
    attachment = Attachment(
        container=document.text("containerId"),
        netns=document.text("netns"),
        ifname=document.text("ifName"),
        args=_pairs(document.raw("cniArgs")),
        capabilities=capabilities if isinstance(capabilities, dict) else {},
    )
    return Cached(network=document.text("networkName"), attachment=attachment, source=source, result=result)


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    return tuple((str(key), str(text)) for key, text in value) if isinstance(value, list) else ()
