"""Names, typed keys, and the construction of store keys.

A name is checked against a pattern before it becomes part of a key, path or interface name, so that no key needs
escaping.
"""

from __future__ import annotations

import re
from functools import lru_cache
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

# Contiv's names.
DEFAULT_TENANT = TenantName("default")
DEFAULT_NETWORK = NetworkName("default-net")
GLOBAL_NAME = "global"

# fullmatch is used throughout: `$` would accept a trailing newline.
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# `@` stands between a container and its interface.
_ENDPOINT_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.@-]*[A-Za-z0-9])?")

NAME_PATTERN = _NAME.pattern
# Contiv's limits. A long name is one that another system chooses: a node, a pod, a Kubernetes object.
MAX_NAME = 64
MAX_LONG_NAME = 256


class NetworkKey(NamedTuple):
    """The key of a network, unique in the cluster."""

    tenant: TenantName
    network: NetworkName

    def __str__(self) -> str:
        return f"{self.tenant}:{self.network}"


class GroupKey(NamedTuple):
    """The key of an endpoint group, unique in the cluster."""

    tenant: TenantName
    group: GroupName

    def __str__(self) -> str:
        return f"{self.tenant}:{self.group}"


class EndpointKey(NamedTuple):
    """The key of an attachment of a workload to a network, unique in the cluster."""

    tenant: TenantName
    network: NetworkName
    endpoint: EndpointId

    def __str__(self) -> str:
        return f"{self.tenant}:{self.network}:{self.endpoint}"


def check_name(text: str, *, field: str, limit: int = MAX_NAME) -> str:
    """Check a name: letters, digits, inner hyphens, labels joined by dots (contiv 2.1, O2). Returns it unchanged."""
    # Most names are those of a few tenants, networks, groups and nodes, in every one of many endpoints.
    if _is_name(text, limit):
        return text
    if not text:
        raise Invalid(f"{field} is missing: give a name", field=field)
    if len(text) > limit:
        raise Invalid(f"{field} is {len(text)} characters long: at most {limit} are allowed", field=field)
    raise Invalid(
        f"{field} {text!r} is not a name: use letters, digits and inner hyphens, labels joined by dots", field=field
    )


@lru_cache(maxsize=4096)
def _is_name(text: str, limit: int) -> bool:
    return len(text) <= limit and _NAME.fullmatch(text) is not None


def check_endpoint_id(text: str, *, field: str = "EndpointID") -> EndpointId:
    """Check an endpoint id; returns it unchanged. Runtimes choose these ids, so that `_` is allowed too, and `@`."""
    if not text or len(text) > MAX_LONG_NAME or not _ENDPOINT_ID.fullmatch(text):
        raise Invalid(
            f"{field} {text[:80]!r} is not an endpoint id: 1 to {MAX_LONG_NAME} letters, digits, '-', '_', '.' or '@'",
            field=field,
        )
    return EndpointId(text)


def store_key(*parts: str) -> StoreKey:
    """Join checked parts to a store key."""
    return StoreKey("/".join(parts))
