"""Names, keys, and how keys are spelled in the store.

A name is matched by pattern before it becomes a key, a path or an interface name, so a key never needs escaping.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from weft.domain.errors import Invalid

TenantName = NewType("TenantName", str)
NetworkName = NewType("NetworkName", str)
GroupName = NewType("GroupName", str)
PolicyName = NewType("PolicyName", str)
RuleId = NewType("RuleId", str)
ProfileName = NewType("ProfileName", str)
ServiceName = NewType("ServiceName", str)
NodeName = NewType("NodeName", str)
EndpointId = NewType("EndpointId", str)

# A slash-joined path below the store's root, such as `networks/default/blue`.
StoreKey = NewType("StoreKey", str)

DEFAULT_TENANT = TenantName("default")
DEFAULT_NETWORK = NetworkName("default-net")
GLOBAL_NAME = "global"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ENDPOINT_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")

NAME_PATTERN = _NAME.pattern
MAX_NAME = 64
MAX_LONG_NAME = 256


class NetworkKey(NamedTuple):
    """A network, unique in the cluster."""

    tenant: TenantName
    network: NetworkName

    def __str__(self) -> str:
        return f"{self.tenant}:{self.network}"


class GroupKey(NamedTuple):
    """An endpoint group, unique in the cluster."""

    tenant: TenantName
    group: GroupName

    def __str__(self) -> str:
        return f"{self.tenant}:{self.group}"


class EndpointKey(NamedTuple):
    """An attachment of a workload to a network, unique in the cluster."""

    tenant: TenantName
    network: NetworkName
    endpoint: EndpointId

    def __str__(self) -> str:
        return f"{self.tenant}:{self.network}:{self.endpoint}"


def check_name(text: str, *, field: str, limit: int = MAX_NAME) -> str:
    """The name unchanged, or `Invalid`: letters, digits, `-` inside, labels joined by dots (contiv 2.1, O2)."""
    if not text:
        raise Invalid(f"{field} is missing: give a name", field=field)
    if len(text) > limit:
        raise Invalid(f"{field} is {len(text)} characters long: at most {limit} are allowed", field=field)
    if not _NAME.fullmatch(text):
        raise Invalid(
            f"{field} {text!r} is not a name: use letters, digits and inner hyphens, labels joined by dots", field=field
        )
    return text


def check_endpoint_id(text: str, *, field: str = "EndpointID") -> EndpointId:
    """The id unchanged, or `Invalid`. Runtimes choose these, so `_` is allowed too."""
    if not text or len(text) > MAX_LONG_NAME or not _ENDPOINT_ID.fullmatch(text):
        raise Invalid(
            f"{field} {text[:80]!r} is not an endpoint id: 1 to {MAX_LONG_NAME} letters, digits, '-', '_' or '.'",
            field=field,
        )
    return EndpointId(text)


def store_key(*parts: str) -> StoreKey:
    """Join checked parts to a key."""
    return StoreKey("/".join(parts))
