"""Parses a CNI request: environment and network configuration, checked and turned into one type per verb.

Every name is matched by pattern here, before it becomes a path, an interface name or a key. Errors carry the
specification's code: 4 for the environment, 6 and 7 for the configuration, 1 for a version, 2 for an unsupported field.

DEL is parsed leniently: only what identifies the attachment must be valid (C-066, C-070).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from weft.cni.arguments import Arguments, parse_arguments
from weft.cni.capabilities import Capabilities, parse_capabilities
from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document, decode_json
from weft.cni.result import Result, parse_result
from weft.cni.versions import SpecVersion, parse_version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_NAME = 255
_INVALID_IN_IFNAME = re.compile(r"[/:%\s\x00-\x1f\x7f]")
# IFNAMSIZ and PATH_MAX, without the NUL.
_MAX_IFNAME = 15
_MAX_PATH = 4_095

# The member with GC's list; the second is the spelling of older libraries (C-095).
_VALID_ATTACHMENTS = ("cni.dev/valid-attachments", "cni.dev/attachments")


class Verb(StrEnum):
    """`CNI_COMMAND`."""

    ADD = "ADD"
    DEL = "DEL"
    CHECK = "CHECK"
    GC = "GC"
    STATUS = "STATUS"
    VERSION = "VERSION"


# The variables that a verb requires besides CNI_COMMAND (C-005 to C-008).
_REQUIRED = {
    Verb.ADD: ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    Verb.DEL: ("CNI_CONTAINERID", "CNI_IFNAME"),
    Verb.CHECK: ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"),
    Verb.GC: ("CNI_PATH",),
    Verb.STATUS: (),
    Verb.VERSION: (),
}

# The versions that introduced a verb.
_SINCE = {
    Verb.CHECK: SpecVersion.V0_4_0,
    Verb.GC: SpecVersion.V1_1_0,
    Verb.STATUS: SpecVersion.V1_1_0,
}


class AttachmentId(NamedTuple):
    """Container id and interface name identify an attachment; a pod's name never does."""

    container: str
    ifname: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """The network of a request, and the result of the plugins before us in the chain."""

    version: SpecVersion
    name: str
    type: str
    prev_result: Result | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Attach a container."""

    attachment: AttachmentId
    netns: str
    arguments: Arguments
    config: NetworkConfig
    capabilities: Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Del:
    """Remove an attachment. `netns` is empty when the runtime no longer has it."""

    attachment: AttachmentId
    netns: str
    arguments: Arguments
    config: NetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check whether an attachment is as `prev_result` says."""

    attachment: AttachmentId
    netns: str
    arguments: Arguments
    config: NetworkConfig
    capabilities: Capabilities
    prev_result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Gc:
    """Remove what is not in `valid`. None means that the request has no list, so nothing may be removed (C-097)."""

    config: NetworkConfig
    valid: frozenset[AttachmentId] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Report whether ADD can be served."""

    config: NetworkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Report the supported versions. Shims answer this themselves."""


Request = Add | Del | Check | Gc | Status | Version


def parse_request(environment: Mapping[str, str], stdin: bytes) -> Request:
    """The request; a `CniError` has the code that the specification defines for the fault."""
    verb = _verb(environment)
    # The environment is checked before stdin is parsed: a runtime without a container id gets code 4, not 6.
    _check_required(verb, environment)
    if verb is Verb.VERSION:
        return Version()
    if verb in {Verb.GC, Verb.STATUS}:
        document = _document(stdin)
        config = _config(document, verb)
        return Status(config=config) if verb is Verb.STATUS else Gc(config=config, valid=_valid_attachments(document))
    attachment = AttachmentId(
        check_container_id(environment["CNI_CONTAINERID"]), check_ifname(environment["CNI_IFNAME"])
    )
    netns = _check_netns(environment.get("CNI_NETNS", ""))
    arguments = parse_arguments(environment.get("CNI_ARGS", ""), refuse_unknown=verb is not Verb.DEL)
    document = _document(stdin)
    config = _config(document, verb)
    # DEL does not read capabilities: an invalid one must not keep the container from being removed.
    if verb is Verb.DEL:
        return Del(attachment=attachment, netns=netns, arguments=arguments, config=config)
    capabilities = parse_capabilities(document, arguments, network=config.name)
    if verb is Verb.ADD:
        return Add(attachment=attachment, netns=netns, arguments=arguments, config=config, capabilities=capabilities)
    if config.prev_result is None:
        raise CniError(Code.BAD_CONFIG, "CHECK needs prevResult: the configuration has none")
    return Check(
        attachment=attachment,
        netns=netns,
        arguments=arguments,
        config=config,
        capabilities=capabilities,
        prev_result=config.prev_result,
    )


def check_container_id(text: str) -> str:
    """The id unchanged, or code 4 (C-010)."""
    if not is_name(text):
        raise CniError(
            Code.BAD_ENVIRONMENT,
            f"CNI_CONTAINERID {text!r:.80} is not an id",
            details="a letter or digit, then letters, digits, '_', '.' and '-'",
        )
    return text


def check_ifname(text: str) -> str:
    """The name unchanged, or code 4 (C-011). `%` is rejected: the kernel expands it as a pattern."""
    # The kernel limits bytes, not characters.
    size = len(text.encode(errors="surrogateescape"))
    if not 1 <= size <= _MAX_IFNAME or text in {".", ".."} or _INVALID_IN_IFNAME.search(text):
        raise CniError(
            Code.BAD_ENVIRONMENT,
            f"CNI_IFNAME {text!r:.80} is not an interface name",
            details=f"1 to {_MAX_IFNAME} bytes, without white space, '/', ':' and '%'",
        )
    return text


def is_name(text: str) -> bool:
    """Whether this is a valid name of a container or a network."""
    return len(text) <= _MAX_NAME and _NAME.fullmatch(text) is not None


def _verb(environment: Mapping[str, str]) -> Verb:
    command = environment.get("CNI_COMMAND", "")
    try:
        return Verb(command)
    except ValueError as error:
        known = ", ".join(Verb)
        raise CniError(Code.BAD_ENVIRONMENT, f"CNI_COMMAND {command!r:.80} is none of {known}") from error


def _check_required(verb: Verb, environment: Mapping[str, str]) -> None:
    """The error names all missing variables at once (C-009). Empty counts as missing."""
    if missing := [name for name in _REQUIRED[verb] if not environment.get(name)]:
        raise CniError(Code.BAD_ENVIRONMENT, f"{verb} needs {', '.join(missing)} in the environment")


def _check_netns(path: str) -> str:
    if path and (not path.startswith("/") or len(path) > _MAX_PATH):
        raise CniError(Code.BAD_ENVIRONMENT, f"CNI_NETNS {path!r:.80} is not an absolute path")
    return path


def _document(stdin: bytes) -> Document:
    value = decode_json(stdin)
    if not isinstance(value, dict):
        raise CniError(Code.NOT_DECODED, "the network configuration is not a JSON object")
    return Document(value)


def _config(document: Document, verb: Verb) -> NetworkConfig:
    version = parse_version(document.raw("cniVersion"))
    name, kind = document.text("name"), document.text("type")
    # Runtimes build paths from both.
    if not is_name(name):
        raise CniError(Code.BAD_CONFIG, f"name {name!r:.80} is not the name of a network")
    if not kind or "/" in kind:
        raise CniError(Code.BAD_CONFIG, f"type {kind!r:.80} is not the name of a plugin")
    if version < _SINCE.get(verb, version):
        raise CniError(
            Code.INCOMPATIBLE_VERSION,
            f"CNI version {version} does not allow {verb}",
            details=f"{verb} came with version {_SINCE[verb]}",
        )
    return NetworkConfig(version=version, name=name, type=kind, prev_result=_prev_result(document, version, verb))


def _prev_result(document: Document, version: SpecVersion, verb: Verb) -> Result | None:
    value = document.raw("prevResult")
    if not value:
        return None
    try:
        return parse_result(value, version=version, where="prevResult")
    except CniError:
        if verb is Verb.DEL:
            return None  # DEL goes by the attachment log: an unreadable result must not keep it from freeing (C-066)
        raise


def _valid_attachments(document: Document) -> frozenset[AttachmentId] | None:
    """The attachments to keep. One that cannot be read rejects the request: it might be in use."""
    place = next((name for name in _VALID_ATTACHMENTS if name in document), None)
    if place is None:
        return None
    valid = set()
    for item in document.children(place):
        container, ifname = item.text("containerID"), item.text("ifname")
        if not is_name(container) or not ifname:
            raise item.fault("containerID", "an id, with an ifname")
        valid.add(AttachmentId(container, ifname))
    return frozenset(valid)
