"""Parses `CNI_ARGS`: what Kubernetes, podman and Nomad pass about the container in the environment (C-016, cni 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_interface

from weft.cni.errors import CniError, Code
from weft.cni.result import IPAddress

# Arguments that select tenant, network and group: `io.contiv.tenant` and so on. In any spelling of the prefix, so that
# the agent can refuse a misspelt one: `IgnoreUnknown` would pass over it.
_LABEL = re.compile(r"io[._/-]?contiv", re.IGNORECASE)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}")
_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
# The group bit of the first octet (IEEE 802): no interface may have such an address.
_MULTICAST = 0x01

_POD_NAMESPACE = "K8S_POD_NAMESPACE"
_POD_NAME = "K8S_POD_NAME"
_POD_UID = "K8S_POD_UID"
_POD_SANDBOX = "K8S_POD_INFRA_CONTAINER_ID"
_POD = (_POD_NAMESPACE, _POD_NAME, _POD_UID, _POD_SANDBOX)
# `GATEWAY` is accepted and ignored: the gateway is the network's.
_KNOWN = frozenset((*_POD, "IP", "MAC", "GATEWAY", "IgnoreUnknown"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments; absent ones are empty. `others` are those that have no meaning here."""

    pod_namespace: str = ""
    pod_name: str = ""
    pod_uid: str = ""
    pod_sandbox: str = ""
    addresses: tuple[IPAddress, ...] = ()
    mac: str = ""
    labels: Mapping[str, str]
    others: Mapping[str, str]


def parse_arguments(text: str, *, refuse_unknown: bool) -> Arguments:
    """The arguments in `K=V;K=V`, in any order. Whatever is malformed is code 4.

    Unknown keys are refused if the caller wants that, unless the arguments themselves say `IgnoreUnknown`.
    """
    pairs = _split(text)
    others = {key: value for key, value in pairs.items() if key not in _KNOWN and not _LABEL.match(key)}
    if refuse_unknown and others and pairs.get("IgnoreUnknown", "").lower() not in {"1", "true"}:
        raise CniError(Code.BAD_ENVIRONMENT, f"CNI_ARGS has unknown keys: {', '.join(sorted(others))}")
    for key in _POD:
        if pairs.get(key) and not _NAME.fullmatch(pairs[key]):
            raise CniError(Code.BAD_ENVIRONMENT, f"CNI_ARGS: {key} {pairs[key]!r:.80} is not a name")
    try:
        addresses = parse_addresses(filter(None, pairs.get("IP", "").split(",")))
        mac = parse_mac(pairs.get("MAC", ""))
    except ValueError as error:
        raise CniError(Code.BAD_ENVIRONMENT, f"CNI_ARGS: {error}") from error
    return Arguments(
        pod_namespace=pairs.get(_POD_NAMESPACE, ""),
        pod_name=pairs.get(_POD_NAME, ""),
        pod_uid=pairs.get(_POD_UID, ""),
        pod_sandbox=pairs.get(_POD_SANDBOX, ""),
        addresses=addresses,
        mac=mac,
        labels={key: value for key, value in pairs.items() if _LABEL.match(key)},
        others=others,
    )


def parse_addresses(texts: Iterable[str]) -> tuple[IPAddress, ...]:
    """Requested addresses; `ValueError` when one is invalid. A prefix length is accepted and ignored."""
    return tuple(ip_interface(text).ip for text in texts)


def parse_mac(text: str) -> str:
    """A hardware address in lower case with colons, or `ValueError`; empty stays empty."""
    mac = text.lower().replace("-", ":")
    if not mac:
        return ""
    if not _MAC.fullmatch(mac) or int(mac[:2], 16) & _MULTICAST or mac == "00:00:00:00:00:00":
        raise ValueError(f"{text[:80]!r} is not the hardware address of one interface")
    return mac


def _split(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in text.split(";") if text else ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise CniError(Code.BAD_ENVIRONMENT, f"CNI_ARGS: {pair!r:.80} is not of the form KEY=VALUE")
        # Two values of one key mean that somebody appended to the string: which one counts would be a guess.
        if key in pairs:
            raise CniError(Code.BAD_ENVIRONMENT, f"CNI_ARGS names {key!r:.80} twice")
        pairs[key] = value
    return pairs
